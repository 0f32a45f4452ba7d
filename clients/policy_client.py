"""The blocking policy client."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from socket import SHUT_RDWR
from typing import TYPE_CHECKING, Any

from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect

from clients.conversation import IO_ERRORS, Close, Conversation, Exchange, IsOpen, Open, Pause, Result, Step, Steps

if TYPE_CHECKING:
    from typing import Self  # not in Python 3.9


class PolicyClient:
    """Asks a policy server for actions; takes the place of openpi_client's WebsocketClientPolicy.

    host: a host name or address, or a whole ws:// or wss:// URL. port: appended to it. api_key: the server's key.
    resend: what to do when the connection breaks between an observation and its reply, so that nobody knows whether
        the server acted on it: True connects and sends it once more, False (the default) raises ReplyLost.
    connect_timeout: seconds to wait for a server that is not up or still loading, at the start and at each reconnect;
        None waits for ever.

    A connection that was lost between two calls is made again, with a line in the log (logger "clients").
    The constructor connects. Raises ConnectFailed. May be used from several threads: calls take turns.
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
        self._exit = ExitStack()
        self._turn = threading.Lock()
        self._run(self._conversation.connect())

    def get_server_metadata(self) -> dict[str, Any]:
        """The server's handshake: six keys (protocol.handshake)."""
        return self._conversation.metadata

    def infer(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """The server's reply to an observation (keys as in protocol.observation, with `prompt` and `session_id`).

        Returns {"actions": (24, 8) float32, "server_timing": {name: milliseconds}}; arrays are writable.
        Raises PolicyError where the server refuses the observation, ReplyLost, ConnectFailed, and CodecError where
        the observation holds what cannot be sent.
        """
        return self._run(self._conversation.infer(obs))

    def reset(self) -> None:
        """End the episode: the server forgets what this session saw. (openpi's own client sends nothing here.)

        Raises PolicyError, ReplyLost, ConnectFailed.
        """
        self._run(self._conversation.reset())

    def close(self) -> None:
        """Close the connection. A later call would open a new one."""
        with self._turn:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, steps: Steps[Result]) -> Result:
        with self._turn:
            try:
                step = next(steps)
                while True:
                    try:
                        outcome = self._do(step)
                    except IO_ERRORS as error:
                        step = steps.throw(error)
                    else:
                        step = steps.send(outcome)
            except StopIteration as stop:
                return stop.value

    def _do(self, step: Step) -> object:
        if isinstance(step, Open):
            return self._open(step.seconds)
        if isinstance(step, IsOpen):
            return self._connection is not None and self._connection.protocol.state is State.OPEN
        if isinstance(step, Exchange):
            return self._exchange(step.frame)
        if isinstance(step, Pause):
            time.sleep(step.seconds)
        elif isinstance(step, Close):
            self._close()
        return None

    def _open(self, seconds: float) -> bytes | str:
        self._close()
        self._connection = self._exit.enter_context(
            connect(
                self._conversation.url,
                additional_headers=self._conversation.headers,
                compression=None,
                max_size=None,
                open_timeout=seconds,
            )
        )
        try:
            return self._connection.recv(seconds)
        except BaseException:
            self._drop()
            raise

    def _exchange(self, frame: bytes) -> bytes | str:
        assert self._connection is not None  # the conversation opened it
        try:
            self._connection.send(frame)
            return self._connection.recv()
        except BaseException:  # also an interrupt: the reply on its way must not answer the next request
            self._drop()
            raise

    def _drop(self) -> None:
        """Close without the closing handshake, which a broken server would not answer."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.socket.shutdown(SHUT_RDWR)
        self._close()

    def _close(self) -> None:
        self._connection = None
        self._exit.close()
