"""The asyncio policy client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.protocol import State

from clients.conversation import IO_ERRORS, Close, Conversation, Exchange, IsOpen, Open, Pause, Result, Step, Steps

if TYPE_CHECKING:
    from typing import Self  # not in Python 3.9


class AsyncPolicyClient:
    """The asyncio twin of clients.PolicyClient: same parameters, same errors.

    The constructor raises ConnectFailed where host and port make no URL. The client connects on entering `async with`,
    or else at its first call. Calls made at once take turns. A call that is cancelled drops the connection, so that its
    late reply cannot answer the next call, which connects again.
    """

    def __init__(
        self,
        host: str = "0.0.0.0",
        port: int | None = None,
        api_key: str | None = None,
        *,
        resend: bool = False,
        connect_timeout: float | None = None,
    ) -> None:
        self._conversation = Conversation(host, port, api_key, resend, connect_timeout)
        self._connection: ClientConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: asyncio.Lock

    async def get_server_metadata(self) -> dict[str, Any]:
        """The server's handshake: six keys (protocol.handshake). Raises ConnectFailed."""
        if not self._conversation.metadata:
            await self._run(self._conversation.connect())
        return self._conversation.metadata

    async def infer(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """As PolicyClient.infer."""
        return await self._run(self._conversation.infer(obs))

    async def reset(self) -> None:
        """As PolicyClient.reset."""
        await self._run(self._conversation.reset())

    async def close(self) -> None:
        """Close the connection. A later call would open a new one."""
        async with self._turn_here():
            await self._close()

    async def __aenter__(self) -> Self:
        await self.get_server_metadata()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, steps: Steps[Result]) -> Result:
        async with self._turn_here():
            try:
                step = next(steps)
                while True:
                    try:
                        outcome = await self._do(step)
                    except IO_ERRORS as error:
                        step = steps.throw(error)
                    else:
                        step = steps.send(outcome)
            except StopIteration as stop:
                return stop.value

    def _turn_here(self) -> asyncio.Lock:
        """The lock by which calls take turns. It belongs to one event loop, as the connection does: both are new in
        another."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._turn, self._connection = loop, asyncio.Lock(), None
        return self._turn

    async def _do(self, step: Step) -> object:
        if isinstance(step, Open):
            return await self._open(step.seconds)
        if isinstance(step, IsOpen):
            return self._connection is not None and self._connection.protocol.state is State.OPEN
        if isinstance(step, Exchange):
            return await self._exchange(step.frame)
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
        elif isinstance(step, Close):
            await self._close()
        return None

    async def _open(self, seconds: float) -> bytes | str:
        await self._close()
        self._connection = await connect(
            self._conversation.url,
            additional_headers=self._conversation.headers,
            compression=None,
            max_size=None,
            open_timeout=seconds,
        )
        try:
            return await asyncio.wait_for(self._connection.recv(), seconds)
        except BaseException:
            self._drop()
            raise

    async def _exchange(self, frame: bytes) -> bytes | str:
        assert self._connection is not None  # the conversation opened it
        try:
            await self._connection.send(frame)
            return await self._connection.recv()
        except BaseException:  # also cancellation: the reply on its way must not answer the next request
            self._drop()
            raise

    def _drop(self) -> None:
        """Close without the closing handshake, which a broken server would not answer."""
        if self._connection is not None:
            self._connection.transport.abort()
            self._connection = None

    async def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
