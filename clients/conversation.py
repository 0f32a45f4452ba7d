"""What a client says to a policy server and what it makes of the replies, without any I/O.

Each method is a generator of steps (see Step). The client that runs it does the I/O that a step asks for and sends
the outcome back in, or throws in the exception that the I/O raised; the generator's return value is the result. So
one text serves the blocking client and the asyncio one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, Union

from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus, InvalidURI, WebSocketException
from websockets.uri import parse_uri

from clients.errors import ConnectFailed, PolicyError, ReplyLost
from protocol.codec import CodecError, Dialect, decode, encode
from protocol.messages import RESET_REPLY

logger = logging.getLogger("clients")

IO_ERRORS = (
    OSError,
    WebSocketException,
    asyncio.TimeoutError,
)  # a TimeoutError, and so an OSError, from Python 3.11 on
"""What a step's I/O may raise into the generator; anything else is not for it to handle."""

_ATTEMPT_SECONDS = 10.0
_FIRST_DELAY, _LONGEST_DELAY = 0.25, 5.0
_COMES_BACK = (1001, 1006, 1012, 1013)  # close codes: going away, broken, restarting, try again later
_NOT_WITH_THIS_MESSAGE = (1007, 1008, 1009)  # close codes: invalid data, against a policy, too big


@dataclass(frozen=True)
class Open:
    """Connect, in place of any earlier connection, and receive within so many seconds. Outcome: the first frame."""

    seconds: float


@dataclass(frozen=True)
class IsOpen:
    """Outcome: whether there is a connection, as far as one can know without using it."""


@dataclass(frozen=True)
class Exchange:
    """Send a frame and receive one. Outcome: that one. Whatever is raised here, the connection is dropped first."""

    frame: bytes


@dataclass(frozen=True)
class Pause:
    """Sleep."""

    seconds: float


@dataclass(frozen=True)
class Close:
    """Close the connection, if there is one."""


Step = Union[Open, IsOpen, Exchange, Pause, Close]
Result = TypeVar("Result")
Steps = Generator[Step, Any, Result]


class Conversation:
    """One client's side; the parameters are those of clients.PolicyClient. `metadata` is the server's handshake.

    Raises ConnectFailed where the URL is not one.
    """

    def __init__(
        self, host: str, port: int | None, api_key: str | None, resend: bool, connect_timeout: float | None
    ) -> None:
        self.url = host if host.startswith(("ws://", "wss://")) else f"ws://{host}"
        if port is not None:
            self.url += f":{port}"
        try:
            parse_uri(self.url)
        except (InvalidURI, ValueError) as error:
            raise ConnectFailed(f"cannot connect to {self.url}: {error}") from error
        self.headers = {"Authorization": f"Api-Key {api_key}"} if api_key else {}
        self.metadata: dict[str, Any] = {}
        self._resend = resend
        self._connect_timeout = math.inf if connect_timeout is None else connect_timeout
        self._session_id: object = None

    def connect(self) -> Steps[None]:
        """Wait for the server and take its handshake. Raises ConnectFailed."""
        deadline = time.monotonic() + self._connect_timeout
        for delay in _retry_delays():
            left = deadline - time.monotonic()
            try:
                first = yield Open(max(0.1, min(_ATTEMPT_SECONDS, left)))
                break
            except IO_ERRORS as error:
                if not _may_pass(error):
                    raise ConnectFailed(f"cannot connect to {self.url}: {_reason(error)}") from error
                if left <= 0:
                    waited = f"within {self._connect_timeout:g} s"
                    raise ConnectFailed(f"no policy server at {self.url} {waited}: {_reason(error)}") from error
                logger.info("waiting for the policy server at %s: %s", self.url, _reason(error))
                yield Pause(min(delay, max(0.0, deadline - time.monotonic())))
        try:
            self.metadata = _map_in(first)
        except PolicyError as error:
            yield Close()
            raise ConnectFailed(f"{self.url} did not begin with a handshake: {error}") from error

    def infer(self, observation: Mapping[str, Any]) -> Steps[dict[str, Any]]:
        """Send an observation, return the reply. Raises PolicyError, ReplyLost, ConnectFailed and CodecError."""
        frame = encode(dict(observation), Dialect.OPENPI)
        self._session_id = observation.get("session_id")
        return _map_in((yield from self._reply_to(frame, self._resend)))

    def reset(self) -> Steps[None]:
        """End the episode on the server. Raises PolicyError, ReplyLost, ConnectFailed.

        The message names the session last used, since after a reconnect the server cannot know it from the connection.
        Doing it twice is harmless, so it is always sent again where the reply got lost.
        """
        request: dict[str, object] = {"endpoint": "reset"}
        if self._session_id is not None:
            request["session_id"] = self._session_id
        reply = yield from self._reply_to(encode(request, Dialect.OPENPI), resend=True)
        if reply != RESET_REPLY:
            raise PolicyError(reply if isinstance(reply, str) else "the reply to reset is not a text")

    def _reply_to(self, frame: bytes, resend: bool) -> Steps[bytes | str]:
        if not (yield IsOpen()):
            if self.metadata:
                logger.warning("the connection to %s was lost; connecting again", self.url)
            yield from self.connect()
        try:
            return (yield Exchange(frame))
        except IO_ERRORS as error:
            too_much = isinstance(error, ConnectionClosed) and error.rcvd and error.rcvd.code in _NOT_WITH_THIS_MESSAGE
            if too_much or not resend:
                raise self._lost(error) from error
            logger.warning("the connection to %s broke (%s); connecting and sending again", self.url, _reason(error))
        yield from self.connect()
        try:
            return (yield Exchange(frame))
        except IO_ERRORS as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> ReplyLost:
        doubt = "the server may or may not have acted on the request"
        return ReplyLost(f"the connection to {self.url} broke before the reply: {_reason(error)}; {doubt}")


def _map_in(frame: bytes | str) -> dict[str, Any]:
    if isinstance(frame, str):
        raise PolicyError(frame)
    try:
        value, _ = decode(frame)
    except CodecError as error:
        raise PolicyError(f"the server's message cannot be decoded: {error}") from error
    if not isinstance(value, dict):
        raise PolicyError("the server's message is not a map")
    return value


def _may_pass(error: Exception) -> bool:
    """Whether connecting later may succeed: the server is not up yet, or still loading."""
    if isinstance(error, (socket.gaierror, ssl.SSLError)):
        return False
    if isinstance(error, (OSError, asyncio.TimeoutError)):
        return True
    if isinstance(error, InvalidStatus):
        return error.response.status_code == 503
    if isinstance(error, InvalidMessage):
        return isinstance(error.__cause__, EOFError)
    if isinstance(error, ConnectionClosed):
        return error.rcvd is None or error.rcvd.code in _COMES_BACK
    return False


def _reason(error: Exception) -> str:
    if isinstance(error, InvalidStatus):
        body = error.response.body.decode("utf-8", "replace").strip() if error.response.body else ""
        return f"HTTP {error.response.status_code} {error.response.reason_phrase} {body[:200]}".strip()
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return str(error) or type(error).__name__


def _retry_delays() -> Iterator[float]:
    delay = _FIRST_DELAY
    while True:
        yield delay
        delay = min(2 * delay, _LONGEST_DELAY)
