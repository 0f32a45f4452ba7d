"""The asyncio policy client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from socket import SHUT_RDWR
from typing import TYPE_CHECKING, Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ProtocolError
from websockets.protocol import State

from clients.client_protocol import (
    IO_ERRORS,
    LARGEST_REPLY,
    MOST_PIECES,
    ClientProtocol,
    Deadline,
    Drop,
    Exchange,
    IsOpen,
    Open,
    Pause,
    Receive,
    Result,
    Step,
    Steps,
)
from clients.forks import forget_in_children

if TYPE_CHECKING:
    from typing import Self  # not in Python 3.9


class AsyncPolicyClient:
    """The asyncio twin of clients.PolicyClient: same parameters, same errors, tasks for threads.

    The constructor raises ConnectFailed where host and port make no URL. The client connects on entering `async with`,
    or else at its first call. Calls made at once take turns. A call that is cancelled drops the connection, so that its
    late reply cannot answer the next call, which connects again. So does a call in another event loop.
    """

    def __init__(
        self,
        host: str = "0.0.0.0",
        port: int | None = None,
        api_key: str | None = None,
        *,
        resend: bool = False,
        connect_timeout: float | None = None,
        max_size: int = LARGEST_REPLY,
    ) -> None:
        self._protocol = ClientProtocol(host, port, api_key, resend, connect_timeout, max_size)
        self._connection: ClientConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: asyncio.Lock
        forget_in_children(self)

    async def get_server_metadata(self) -> dict[str, Any]:
        """The server's handshake: six keys (protocol.robot). Raises ConnectFailed."""
        if not self._protocol.metadata:
            await self._run(self._protocol.connect(), Deadline(None))
        return self._protocol.metadata

    async def infer(self, obs: Mapping[str, Any], *, timeout: float | None = None) -> dict[str, Any]:
        """As PolicyClient.infer."""
        call = Deadline(timeout)
        return await self._run(self._protocol.infer(obs, asyncio.current_task(), call), call)

    async def reset(self, *, session_id: str | int | None = None, timeout: float | None = None) -> None:
        """As PolicyClient.reset; without a name, the session that the calling task used last."""
        call = Deadline(timeout)
        await self._run(self._protocol.reset(session_id, asyncio.current_task(), call), call)

    async def close(self) -> None:
        """Close the connection. A later call would open a new one."""
        async with self._turn_here():
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.close()

    def after_fork(self) -> None:
        """Leave the connection to the parent process. Called in the child (clients.forks)."""
        self._loop, self._connection = None, None
        self._protocol.begin_anew()

    async def __aenter__(self) -> Self:
        await self.get_server_metadata()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, steps: Steps[Result], call: Deadline) -> Result:
        turn = self._turn_here()
        try:
            await _within(call.left(), turn.acquire())
        except TimeoutError:
            raise self._protocol.no_turn(call) from None
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
        finally:
            turn.release()

    def _turn_here(self) -> asyncio.Lock:
        """The lock by which calls take turns; like the connection it is of one event loop, and new in another."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._connection is not None:
                with suppress(OSError):  # the transport's own end would need its loop, which may be closed
                    self._connection.transport.get_extra_info("socket").shutdown(SHUT_RDWR)
            self._loop, self._turn, self._connection = loop, asyncio.Lock(), None
        return self._turn

    async def _do(self, step: Step) -> object:
        if isinstance(step, Open):
            self._drop()
            opening = connect(step.url, open_timeout=step.seconds, **step.options)
            self._connection = await _within(math.inf, opening.__aenter__())
        elif isinstance(step, IsOpen):
            return self._connection is not None and self._connection.protocol.state is State.OPEN
        elif isinstance(step, Receive):
            return await self._exchange(None, step.seconds)
        elif isinstance(step, Exchange):
            return await self._exchange(step.frame, step.seconds)
        elif isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
        elif isinstance(step, Drop):
            self._drop()
        return None

    async def _exchange(self, frame: bytes | None, seconds: float) -> bytes | str:
        assert self._connection is not None  # the protocol opened it
        try:
            return await _within(seconds, _reply(self._connection, frame))
        except BaseException:  # also cancellation: the reply on its way must not answer the next request
            self._drop()
            raise

    def _drop(self) -> None:
        """Close without the closing handshake, which a broken server would not answer."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.abort()


async def _reply(connection: ClientConnection, frame: bytes | None) -> bytes | str:
    """Send a frame, if there is one, and receive the next message.

    The library's own limit of pieces is not in its releases for older Pythons.
    """
    if frame is not None:
        await connection.send(frame)
    pieces: list[Any] = []
    async for piece in connection.recv_streaming():
        pieces.append(piece)
        if len(pieces) > MOST_PIECES:
            raise ProtocolError(f"a message in more than {MOST_PIECES} pieces")
    return type(pieces[0])().join(pieces)


async def _within(seconds: float, waiting: Awaitable[Result]) -> Result:
    try:
        return await asyncio.wait_for(waiting, None if seconds == math.inf else seconds)
    except asyncio.TimeoutError as error:  # another class than TimeoutError before Python 3.11
        raise TimeoutError(str(error)) from error
