"""The blocking policy client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from socket import SHUT_RDWR
from typing import TYPE_CHECKING, Any

from websockets.exceptions import InvalidHandshake, ProtocolError
from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect

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


class PolicyClient:
    """Asks a policy server for actions; takes the place of openpi_client's WebsocketClientPolicy.

    host: a host name or address, which may have a port, or a whole URL (ws, wss; http and https stand for them).
    port: the server's, 80 by default (443 with TLS) as in openpi's client. api_key: the server's key.
    resend: what to do when the connection breaks between an observation and its reply, so that nobody knows whether
        the server acted on it: True connects and sends it once more, False (the default) raises ReplyLost.
    connect_timeout: seconds to wait for a server that is not up or still loading, at the start and at each reconnect;
        None waits for ever, though not on a dead link.
    max_size: bytes of a message of the server's; larger ones break the connection.

    A connection that was lost between two calls is made again, with a line in the log (logger "clients"). Where the
    server then begins a new episode since it does not know the old one, that is a warning there; so is, once each,
    what the server itself warns of. A proxy that the environment names is used, but for addresses of this machine.

    The constructor connects. Raises ConnectFailed. May be used from several threads, for one session or several: calls
    take turns. A forked process connects anew at its first call.
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
        self._exit = ExitStack()
        self._turn = threading.Lock()
        forget_in_children(self)
        self._run(self._protocol.connect(), Deadline(None))

    def get_server_metadata(self) -> dict[str, Any]:
        """The server's handshake: six keys (protocol.robot)."""
        return self._protocol.metadata

    def infer(self, obs: Mapping[str, Any], *, timeout: float | None = None) -> dict[str, Any]:
        """The server's reply to an observation (keys as in protocol.observation, with `prompt` and `session_id`).

        timeout: seconds for the whole call, waiting for other threads' calls and connecting again included; None for
            ten minutes from sending to reply, and connect_timeout where there must be a new connection.

        Returns a map with "actions", (24, 8) float32 and writable, and, from a server that sends them, with
        "server_timing" {name: milliseconds}, "episode" {"call": its number in the episode, "window": why the call began
        a window, or "continued"} and "warnings" [text].

        Raises PolicyError where the server refuses the observation, ReplyTimeout where the reply does not come in time,
        ReplyLost, ConnectFailed, and CodecError where the observation holds what cannot be sent.
        """
        call = Deadline(timeout)
        return self._run(self._protocol.infer(obs, threading.current_thread(), call), call)

    def reset(self, *, session_id: str | int | None = None, timeout: float | None = None) -> None:
        """End an episode: the server forgets what that session saw. (openpi's own client sends nothing here.)

        session_id: which; None for the one that the calling thread used last, or anybody where it used none.
        timeout: as for infer. Raises PolicyError, ReplyTimeout, ReplyLost, ConnectFailed.
        """
        call = Deadline(timeout)
        self._run(self._protocol.reset(session_id, threading.current_thread(), call), call)

    def close(self) -> None:
        """Close the connection. A later call would open a new one."""
        with self._turn:
            self._close()

    def after_fork(self) -> None:
        """Leave the connection to the parent process. Called in the child (clients.forks)."""
        if self._connection is not None:
            self._connection.socket.close()  # this process's copy of it
        self._connection = None
        self._exit = ExitStack()
        self._turn = threading.Lock()  # which a thread of the parent may have held
        self._protocol.begin_anew()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, steps: Steps[Result], call: Deadline) -> Result:
        if not self._turn.acquire(timeout=min(call.left(), threading.TIMEOUT_MAX)):
            raise self._protocol.no_turn(call)
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
        finally:
            self._turn.release()

    def _do(self, step: Step) -> object:
        if isinstance(step, Open):
            self._open(step)
        elif isinstance(step, IsOpen):
            return self._connection is not None and self._connection.protocol.state is State.OPEN
        elif isinstance(step, Receive):
            return self._exchange(None, step.seconds)
        elif isinstance(step, Exchange):
            return self._exchange(step.frame, step.seconds)
        elif isinstance(step, Pause):
            time.sleep(step.seconds)
        elif isinstance(step, Drop):
            self._drop()
        return None

    def _open(self, step: Open) -> None:
        self._drop()
        try:
            opened = connect(step.url, open_timeout=step.seconds, **step.options)
        except AssertionError as error:  # how the library takes a server that speaks before it was asked
            raise InvalidHandshake("it speaks another protocol") from error
        self._connection = self._exit.enter_context(opened)

    def _exchange(self, frame: bytes | None, seconds: float) -> bytes | str:
        connection = self._connection
        assert connection is not None  # the protocol opened it
        try:
            with _cut_after(seconds, connection):
                if frame is not None:
                    connection.send(frame)
                return _received(connection)
        except BaseException:  # also an interrupt: the reply on its way must not answer the next request
            self._drop()
            raise

    def _drop(self) -> None:
        """Close without the closing handshake, which a broken server would not answer."""
        if self._connection is not None:
            _cut(self._connection)
        self._close()

    def _close(self) -> None:
        self._connection = None
        self._exit.close()


def _received(connection: ClientConnection) -> bytes | str:
    """The next message. The library's own limit of pieces is not in its releases for older Pythons."""
    pieces: list[Any] = []
    for piece in connection.recv_streaming():
        pieces.append(piece)
        if len(pieces) > MOST_PIECES:
            raise ProtocolError(f"a message in more than {MOST_PIECES} pieces")
    return type(pieces[0])().join(pieces)


@contextmanager
def _cut_after(seconds: float, connection: ClientConnection) -> Iterator[None]:
    """Raises TimeoutError where the body takes longer: the connection is cut, which ends all waiting for it.

    Neither sending nor receiving in pieces has a timeout of its own.
    """
    if seconds > threading.TIMEOUT_MAX:
        yield
        return
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _cut(connection)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except IO_ERRORS as error:
        if not expired.is_set():
            raise
        raise TimeoutError from error
    finally:
        timer.cancel()
        timer.join()
    if expired.is_set():
        raise TimeoutError


def _cut(connection: ClientConnection) -> None:
    with suppress(OSError):
        connection.socket.shutdown(SHUT_RDWR)
