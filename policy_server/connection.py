"""One robot's conversation: receive, hand over, answer. Knows sessions and the wire, no model and no device."""

import asyncio
import logging
import secrets
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from engine.fair_queue import Peer
from engine.worker import EngineBusy, EngineStopped
from policy_server.http import Wishes
from policy_server.link import RobotLink
from policy_server.logs import LogBudget, log_event
from policy_server.metrics import Metrics
from policy_server.sessions import Gone, Session, SessionInUse, Sessions
from protocol.codec import CodecError, Dialect, Limits, encode
from protocol.messages import (
    RESET_REPLY,
    InferRequest,
    RequestError,
    ResetRequest,
    infer_reply,
    read_request,
    without_numbers,
)
from protocol.robot import ObservationSpec

if TYPE_CHECKING:  # which needs torch
    from engine.policy import Chunk

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# A 4-frame observation (2.1 MB) takes about a millisecond to decode; what is larger would keep pings waiting.
_LARGEST_DECODED_ON_EVENT_LOOP = 4 * 2**20
_LONGEST_CLOSE_REASON = 123  # bytes
_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.25
_MOST_WARNINGS = 32  # logged of one connection


class _RobotGone(Exception):
    """The robot left while its request was in the engine's hands."""


class _NotLoaded(Exception):
    """The policy could not be loaded: no request will ever be answered."""


@dataclass(frozen=True)
class ServerContext:
    """What a conversation uses of its server.

    loaded: done when calls are served, or with the reason why none will be.
    limits: on what a message may hold. spec: what an observation holds. handshake: what robots are told first.
    ping_interval, ping_timeout: see RobotLink.watch. debug: whether robots are sent tracebacks.
    drain_expired: done when the server stops and no longer waits for calls.
    """

    sessions: Sessions
    metrics: Metrics
    loaded: Future[dict[str, object]]
    limits: Limits
    spec: ObservationSpec
    handshake: dict[str, Any]
    ping_interval: float
    ping_timeout: float
    debug: bool
    drain_expired: asyncio.Future[None]


class Conversation:
    """The life of one connection, one request at a time.

    Whatever is wrong with a request is answered in text, and the conversation goes on. It ends when the robot
    leaves, falls silent, breaks the WebSocket protocol, does not read its replies, or the server closes it.

    name: of the connection, unique in its server. peer: who the engine's queue takes it for. wishes: what its robot
    asked for when it connected.
    """

    def __init__(self, link: RobotLink, name: str, peer: Peer, context: ServerContext, wishes: Wishes) -> None:
        self._link = link
        self._name = name
        self._peer = peer
        self._context = context
        self._wishes = wishes
        self._closed = asyncio.ensure_future(link.wait_closed())
        self._previous_total_ms: float | None = None
        self._warned_of: set[str] = set()
        self._kind = "unknown"
        self._fruitless = 0  # requests in a row that brought no actions
        self._refusals = LogBudget(at_once=10, seconds=10.0)
        self.idle = asyncio.Event()  # set while no request is being worked on
        self.idle.set()

    async def run(self) -> None:
        """Hold the conversation until it ends, then let go of the sessions."""
        self._context.sessions.open(self._name, self._link)
        watch = asyncio.ensure_future(self._link.watch(self._context.ping_interval, self._context.ping_timeout))
        try:
            await self._until_loaded(self._wishes.greeting_within)
            await self._send(encode(self._context.handshake, Dialect.OPENPI))
            while not self._closed.done():
                frame = await self._link.recv()
                await self._until_loaded()
                arrived_at = time.monotonic()
                self.idle.clear()
                await self._answer(frame)
                self.idle.set()
                self._previous_total_ms = 1e3 * (time.monotonic() - arrived_at)
                await self._pause()
        except _NotLoaded as error:
            await self._link.close(CloseCode.INTERNAL_ERROR, close_reason(error))
        except EngineStopped:
            await self._link.close(CloseCode.GOING_AWAY)
        except (ConnectionClosed, _RobotGone, Gone):
            pass  # the server logs every end of a connection
        finally:
            self.idle.set()
            watch.cancel()
            self._context.sessions.leave(self._name)

    async def _until_loaded(self, within: float | None = None) -> None:
        """Return when calls are served, or after so many seconds. Raises _NotLoaded, EngineStopped and _RobotGone."""
        if self._context.loaded.done() and self._context.loaded.exception() is None:
            return
        try:
            async with asyncio.timeout(within):
                await self._result(self._context.loaded)
        except TimeoutError:
            pass
        except (EngineStopped, _RobotGone):
            raise
        except Exception as error:
            raise _NotLoaded(str(error)) from error

    async def _answer(self, frame: str | bytes) -> None:
        self._kind = "unknown"
        try:
            reply: str | bytes = await self._reply(frame)
            outcome = "ok"
        except (_RobotGone, Gone):
            self._context.metrics.request(self._kind, "abandoned")
            raise
        except (CodecError, RequestError) as error:
            reply, outcome = str(error), "bad_request"
        except SessionInUse as error:
            reply, outcome = str(error), "session_in_use"
        except EngineBusy as error:
            reply, outcome = f"busy: {error}; ask again later", "busy"
        except EngineStopped as error:
            reply, outcome = f"not served: {error}", "stopped"
        except Exception as error:
            reply, outcome = self._internal_error(error), "error"
        self._context.metrics.request(self._kind, outcome)
        if outcome == "ok":
            self._fruitless = int(self._kind == "reset")
        else:
            self._fruitless += 1
        self._log_request(outcome, {} if isinstance(reply, bytes) else {"reply": reply})
        await self._send(reply)

    async def _pause(self) -> None:
        """Take the next request a little later after one that brought no actions, and later with each in a row.

        Such requests cost next to nothing, so that a few robots that send nothing else would have the interpreter to
        themselves, which the engine's thread needs for each of its operations.
        """
        if self._fruitless:
            seconds = min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * self._fruitless)
            await asyncio.wait((self._closed,), timeout=seconds)

    def _log_request(self, outcome: str, detail: dict[str, object]) -> None:
        """Refused requests have a line each, as long as there are few of them."""
        fields = {"connection": self._name, "kind": self._kind, "outcome": outcome, **detail}
        if outcome in ("ok", "error"):  # an error has its line already
            log_event(log, logging.DEBUG, "request", **fields)
        else:
            self._refusals.log(log, "request", **fields)

    @property
    def refusals_left_out(self) -> int:
        """Refused requests that have no line in the log, and were not counted in one."""
        return self._refusals.left_out

    async def _reply(self, frame: str | bytes) -> str | bytes:
        self._context.metrics.received(len(frame))
        if isinstance(frame, str):
            raise RequestError("message", "a binary frame with one msgpack map", "a text frame")
        if len(frame) > _LARGEST_DECODED_ON_EVENT_LOOP:
            request = await asyncio.to_thread(read_request, frame, self._context.spec, self._context.limits)
        else:
            request = read_request(frame, self._context.spec, self._context.limits)
        if isinstance(request, ResetRequest):
            self._kind = "reset"
            await self._context.sessions.reset(self._name, request.session_ids)
            return RESET_REPLY
        return await self._infer(request)

    async def _infer(self, request: InferRequest) -> bytes:
        self._kind = "infer"
        session = await self._context.sessions.claim(self._name, request.session_id)
        chunk = await self._result(self._context.sessions.infer(session, request.observation, self._peer))
        self._context.metrics.call(chunk.seconds)
        warnings = [*request.warnings, *chunk.warnings]
        about = {"server_timing": self._timing(chunk), "episode": self._episode(session, chunk), "warnings": warnings}
        self._log_warnings(warnings)
        return infer_reply(request, chunk.actions, about, as_array=self._wishes.bare_array)

    async def _result(self, job: Future[Result]) -> Result:
        """The job's result; if the robot leaves first, the job is cancelled, which costs nothing if it still waits.

        Raises what the job raised, _RobotGone, or EngineStopped when the server does not wait any longer.
        """
        result = asyncio.wrap_future(job)
        await asyncio.wait((result, self._closed, self._context.drain_expired), return_when=asyncio.FIRST_COMPLETED)
        if result.done():
            return result.result()
        result.cancel()
        if self._closed.done():
            raise _RobotGone
        raise EngineStopped("the server is shutting down and could not wait for this call")

    async def _send(self, reply: str | bytes) -> None:
        await self._link.send(reply)
        self._context.metrics.sent(len(reply))

    def _timing(self, chunk: "Chunk") -> dict[str, float]:
        """Milliseconds by name. Clients average over replies, so each has the same names, but for the first."""
        timing = {f"{phase}_ms": 1e3 * seconds for phase, seconds in chunk.seconds.items()}
        if self._previous_total_ms is not None:
            timing["prev_total_ms"] = self._previous_total_ms
        log_event(log, logging.DEBUG, "call", connection=self._name, **timing)
        return timing

    def _episode(self, session: Session, chunk: "Chunk") -> dict[str, object]:
        """Where the episode stands after a call.

        call: its number in the episode. window: "continued", or why the call began a window: see engine.session.Window,
        and "reset" for the first call after one. resumed: whether the robot has just come back on another connection.
        """
        window = str(chunk.window)
        if window == "new" and session.after_reset:
            window = "reset"
        resumed = self._context.sessions.resumed(self._name, session)
        return {"call": chunk.call, "window": window, "resumed": resumed}

    def _internal_error(self, error: Exception) -> str:
        """The robot learns the id under which the log has the traceback; with debug, the traceback too."""
        error_id = secrets.token_hex(4)
        fields = {"connection": self._name, "id": error_id}
        log.error("internal error", exc_info=error, extra={"fields": fields})
        text = f"internal error, id {error_id}"
        if self._context.debug:
            text += "\n" + "".join(traceback.format_exception(error))
        traceback.clear_frames(error.__traceback__)  # they and the error hold each other, and the images with them
        return text

    def _log_warnings(self, warnings: Iterable[str]) -> None:
        """Each once a connection, whatever its numbers."""
        for warning in warnings:
            kind = without_numbers(warning)
            if kind not in self._warned_of and len(self._warned_of) < _MOST_WARNINGS:
                self._warned_of.add(kind)
                log_event(log, logging.WARNING, "observation", connection=self._name, found=warning)


def close_reason(error: BaseException) -> str:
    """What went wrong, as short as a closing frame wants it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.encode()[:_LONGEST_CLOSE_REASON].decode(errors="ignore")
