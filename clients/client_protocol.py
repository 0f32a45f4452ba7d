"""What a client says to a policy server and what it makes of the replies, without any I/O.

Each method is a generator of steps (see Step). The client that runs it does the I/O that a step asks for and sends
the outcome back in, or throws in the exception that the I/O raised; the generator's return value is the result. So
one text serves the blocking client and the asyncio one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, Union

import numpy as np
from websockets.exceptions import WebSocketException

from clients.address import proxy_on_the_way, server_address
from clients.errors import ConnectFailed, PolicyError, ReplyLost, ReplyTimeout
from clients.failures import is_answer_to_the_message, may_pass, reason
from clients.sessions import Sessions
from protocol.codec import CodecError, Dialect, decode, encode
from protocol.messages import RESET_REPLY, session_name
from protocol.robot import HANDSHAKE

logger = logging.getLogger("clients")

IO_ERRORS = (OSError, WebSocketException, ImportError)
"""What a step's I/O may raise into the generator (ImportError where a proxy needs a package); anything else is not for
it to handle."""

_LONG = 10**6  # seconds, for ever
_REPLY_SECONDS = 600.0  # how long a reply is waited for where the caller does not say

LARGEST_REPLY = 16 * 2**20
"""Bytes of one message of the server's, where the caller does not say: ten thousand times what actions take."""

MOST_PIECES = 4096
"""A message in more pieces than this is an attempt to fill the memory with empty ones."""

# A link is dead after minutes without a word, not after seconds: a program that computes between calls answers nothing
# meanwhile, and neither does a server that computes on its event loop.
_PING_SECONDS, _PONG_SECONDS = 20.0, 120.0
_CLOSE_SECONDS = 0.5  # for the closing handshake; nothing is lost without it
_ATTEMPT_SECONDS, _SHORTEST_ATTEMPT = 10.0, 0.1
_FIRST_DELAY, _LONGEST_DELAY = 0.25, 5.0


class Deadline:
    """When a call must be done. seconds: from now on; None for never."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds from now on, not below 0; infinite where there is no end."""
        return max(0.0, self._end - time.monotonic())


@dataclass(frozen=True)
class Open:
    """Connect within so many seconds, in place of any earlier connection. options: as websockets' `connect` has."""

    url: str
    seconds: float
    options: dict[str, Any]


@dataclass(frozen=True)
class IsOpen:
    """Outcome: whether there is a connection, as far as one can know without using it."""


@dataclass(frozen=True)
class Receive:
    """Receive a frame within so many seconds. Outcome: that one.

    Raises TimeoutError where it takes longer. Whatever is raised here, the connection is dropped first.
    """

    seconds: float


@dataclass(frozen=True)
class Exchange:
    """Send a frame and receive one. Otherwise as Receive."""

    frame: bytes
    seconds: float


@dataclass(frozen=True)
class Pause:
    """Sleep."""

    seconds: float


@dataclass(frozen=True)
class Drop:
    """End the connection without another word, if there is one."""


Step = Union[Open, IsOpen, Receive, Exchange, Pause, Drop]
Result = TypeVar("Result")
Steps = Generator[Step, Any, Result]


class ClientProtocol:
    """One client's side; the parameters are those of clients.PolicyClient. `metadata` is the server's handshake.

    Raises ConnectFailed where host and port make no URL.
    """

    def __init__(
        self,
        host: str,
        port: int | None,
        api_key: str | None,
        resend: bool,
        connect_timeout: float | None,
        max_size: int,
    ) -> None:
        self.metadata: dict[str, Any] = {}
        self._address = server_address(host, port)
        self._server = self._address.shown
        # Else a server that loads for long would greet before it is ready, for clients that wait no longer.
        patience = _LONG if connect_timeout is None else math.ceil(connect_timeout)
        self._headers = {"Prefer": f"wait={patience}"}
        if api_key:
            self._headers["Authorization"] = f"Api-Key {api_key}"
        self._resend = resend
        self._connect_timeout = connect_timeout
        self._max_size = max_size
        self._had_connection = False
        self._sessions = Sessions()

    def begin_anew(self) -> None:
        """Forget connection and sessions, which are another process's."""
        self._had_connection = False
        self._sessions = Sessions()

    def connect(self, call: Deadline | None = None) -> Steps[None]:
        """Wait for the server and take its handshake. Raises ConnectFailed.

        call: of the call for which there must be a connection.
        """
        connect = Deadline(self._connect_timeout)
        deadline = min(connect, call or connect, key=Deadline.left)
        level = logging.WARNING  # the first time; robots often start before their server, and then it takes a while
        for delay in _retry_delays():
            proxy = proxy_on_the_way(self._address)
            try:
                self.metadata = yield from self._handshake(proxy, deadline)
                break
            except PolicyError as error:
                yield Drop()
                raise ConnectFailed(f"{self._server} did not begin with a handshake: {error}") from error
            except IO_ERRORS as error:
                why = reason(error, self._max_size, proxy, self._address.host)
                if not may_pass(error):
                    raise ConnectFailed(f"cannot connect to {self._server}: {why}") from error
                if deadline.left() == 0:
                    raise ConnectFailed(
                        f"no policy server at {self._server} within {deadline.seconds:g} s: {why}"
                    ) from error
                logger.log(level, "waiting for the policy server at %s: %s", self._server, why)
                level = logging.INFO
                yield Pause(min(delay, deadline.left()))
        self._had_connection = True
        self._sessions.reconnected()

    def infer(self, observation: Mapping[str, Any], caller: object, call: Deadline) -> Steps[dict[str, Any]]:
        """Send an observation, return the reply. caller: the thread or task that asks.

        Raises PolicyError, ReplyLost, ReplyTimeout, ConnectFailed and CodecError.
        """
        frame = encode(dict(observation), Dialect.OPENPI)
        name = session_name(observation.get("session_id"))
        self._sessions.use(caller, name)
        value = _decoded((yield from self._reply_to(frame, self._resend, call)))
        reply = {"actions": value} if isinstance(value, np.ndarray) else _map(value)
        self._sessions.answered(name, reply)
        return reply

    def reset(self, session_id: object, caller: object, call: Deadline) -> Steps[None]:
        """End a session's episode on the server. Raises PolicyError, ReplyLost, ReplyTimeout, ConnectFailed.

        The message names the session, since after a reconnect the server cannot know it from the connection. Doing it
        twice is harmless, so it is always sent again where the reply got lost.
        """
        name = self._sessions.last_of(caller) if session_id is None else session_name(session_id)
        if not self._sessions.can_be_told_apart(name):
            raise PolicyError("a session without a session_id cannot be reset after calls in others: give it one")
        request: dict[str, object] = {"endpoint": "reset"}
        if name is not None:
            request["session_id"] = name
        reply = yield from self._reply_to(encode(request, Dialect.OPENPI), True, call)
        if reply != RESET_REPLY:
            raise PolicyError(reply if isinstance(reply, str) else "the reply to reset is not a text")
        self._sessions.ended(name)

    def no_turn(self, call: Deadline) -> ReplyTimeout:
        """The error of a call that other calls left no time for."""
        return ReplyTimeout(
            f"no reply from {self._server} within {call.seconds:g} s: other calls of this client took it"
        )

    def _handshake(self, proxy: str | None, deadline: Deadline) -> Steps[dict[str, Any]]:
        options = {
            "additional_headers": self._headers,
            "proxy": proxy,
            "compression": None,
            "max_size": self._max_size,
            "max_queue": 1,  # no server has a reason to send ahead
            "ping_interval": _PING_SECONDS,
            "ping_timeout": _PONG_SECONDS,
            "close_timeout": _CLOSE_SECONDS,
        }
        seconds = max(_SHORTEST_ATTEMPT, min(_ATTEMPT_SECONDS, deadline.left()))
        yield Open(self._address.url, seconds, options)
        logger.debug("connected to %s, which will send its handshake when it is ready", self._server)
        try:
            first = yield Receive(max(_SHORTEST_ATTEMPT, deadline.left()))
        except TimeoutError:
            raise TimeoutError("it accepted the connection but sent no handshake; it may still be loading") from None
        metadata = _map(_decoded(first))
        missing = HANDSHAKE.keys() - metadata.keys()
        if missing:
            raise PolicyError(f"its first message has no {', '.join(sorted(missing))}")
        return metadata

    def _reply_to(self, frame: bytes, resend: bool, call: Deadline) -> Steps[bytes | str]:
        if not (yield IsOpen()):
            if self._had_connection:
                logger.warning("the connection to %s was lost; connecting again", self._server)
            yield from self.connect(call)
        try:
            return (yield Exchange(frame, _seconds_for_reply(call)))
        except IO_ERRORS as error:
            if not resend or isinstance(error, TimeoutError) or is_answer_to_the_message(error):
                raise self._lost(error, call) from error
            why = reason(error, self._max_size)
            logger.warning("the connection to %s broke (%s); connecting and sending again", self._server, why)
        yield from self.connect(call)
        try:
            return (yield Exchange(frame, _seconds_for_reply(call)))
        except IO_ERRORS as error:
            raise self._lost(error, call) from error

    def _lost(self, error: Exception, call: Deadline) -> ReplyLost:
        doubt = "the server may or may not have acted on the request"
        if isinstance(error, TimeoutError):
            seconds = _REPLY_SECONDS if call.seconds == math.inf else call.seconds
            return ReplyTimeout(f"no reply from {self._server} within {seconds:g} s; {doubt}")
        why = reason(error, self._max_size)
        return ReplyLost(f"the connection to {self._server} broke before the reply: {why}; {doubt}")


def _seconds_for_reply(call: Deadline) -> float:
    return _REPLY_SECONDS if call.seconds == math.inf else call.left()


def _decoded(frame: bytes | str) -> object:
    if isinstance(frame, str):
        raise PolicyError(frame)
    try:
        return decode(frame)[0]
    except CodecError as error:
        raise PolicyError(f"the server's message cannot be decoded: {error}") from error


def _map(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PolicyError("the server's message is not a map")
    return value


def _retry_delays() -> Iterator[float]:
    delay = _FIRST_DELAY
    while True:
        yield delay
        delay = min(2 * delay, _LONGEST_DELAY)
