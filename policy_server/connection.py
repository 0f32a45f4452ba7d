"""One robot's conversation: receive, hand over, answer. Knows sessions and the wire, no model and no device."""

import asyncio
import logging
import secrets
import time
import traceback
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from engine.embodiment import Observation
from engine.loop import EngineBusy, EngineStopped
from policy_server.logs import log_event
from policy_server.metrics import Metrics
from policy_server.sessions import SessionInUse, Sessions
from protocol.codec import CodecError, Dialect, Limits, encode
from protocol.messages import (
    RESET_REPLY,
    InferRequest,
    RequestError,
    ResetRequest,
    infer_reply,
    size_warnings,
)
from protocol.observation_spec import ObservationSpec
from protocol.request_reader import RequestReader

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# A 4-frame observation (2.1 MB) takes about a millisecond to decode; what is larger would keep pings waiting.
_LARGEST_DECODED_ON_EVENT_LOOP = 4 * 2**20


class _RobotGone(Exception):
    """The robot left while its request was in the engine's hands."""


@dataclass(frozen=True)
class Host:
    """What a conversation uses of its server.

    limits: on what a message may hold. spec: what an observation holds. handshake: what robots are told first.
    debug: whether robots are sent tracebacks.
    cut_short: done when the server stops and no longer waits for calls.
    """

    sessions: Sessions
    metrics: Metrics
    limits: Limits
    spec: ObservationSpec
    handshake: dict[str, Any]
    debug: bool
    cut_short: asyncio.Future[None]


class Conversation:
    """The life of one connection, one request at a time.

    Whatever is wrong with a request is answered in text, and the conversation goes on. It ends when the robot
    leaves, breaks the WebSocket protocol, does not read its replies, or the server closes it.

    name: of the connection, unique in its server.
    """

    def __init__(self, websocket: ServerConnection, name: str, host: Host) -> None:
        self._websocket = websocket
        self._name = name
        self._host = host
        self._closed = asyncio.ensure_future(websocket.wait_closed())
        self._reader = RequestReader(host.spec, host.limits)
        self._previous_total_ms: float | None = None
        self._size_was_warned_of = False
        self._kind = "unknown"
        self.idle = asyncio.Event()  # set while no request is being worked on
        self.idle.set()

    async def run(self) -> None:
        """Hold the conversation until it ends, then let go of the session."""
        try:
            await self._send(encode(self._host.handshake, Dialect.OPENPI))
            while not self._closed.done():
                frame = await self._websocket.recv()
                arrived_at = time.monotonic()
                self.idle.clear()
                await self._answer(frame)
                self.idle.set()
                self._previous_total_ms = 1e3 * (time.monotonic() - arrived_at)
        except (ConnectionClosed, _RobotGone):
            pass  # the server logs every end of a connection
        finally:
            self.idle.set()
            self._host.sessions.leave(self._name)

    async def _answer(self, frame: str | bytes) -> None:
        self._kind = "unknown"
        try:
            reply: str | bytes = await self._reply(frame)
            outcome = "ok"
        except _RobotGone:
            self._host.metrics.request(self._kind, "abandoned")
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
        self._host.metrics.request(self._kind, outcome)
        level = logging.DEBUG if outcome in ("ok", "error") else logging.INFO  # an error has its log line already
        detail = {} if isinstance(reply, bytes) else {"reply": reply}
        log_event(log, level, "request", connection=self._name, kind=self._kind, outcome=outcome, **detail)
        await self._send(reply)

    async def _reply(self, frame: str | bytes) -> str | bytes:
        self._host.metrics.received(len(frame))
        if isinstance(frame, str):
            raise RequestError("message", "a binary frame with one msgpack map", "a text frame")
        if len(frame) > _LARGEST_DECODED_ON_EVENT_LOOP:
            request = await asyncio.to_thread(self._reader.read, frame)
        else:
            request = self._reader.read(frame)
        if isinstance(request, ResetRequest):
            return await self._reset(request)
        return await self._infer(request)

    async def _infer(self, request: InferRequest) -> bytes:
        self._kind = "infer"
        self._warn_of_size(request)
        observation = Observation(views=request.views, state=request.state, prompt=request.prompt)
        timed = await self._result(self._host.sessions.infer(self._name, request.session_id, observation))
        self._host.metrics.call(timed)
        timing = {"infer_ms": 1e3 * timed.infer_seconds, "wait_ms": 1e3 * timed.wait_seconds}
        if self._previous_total_ms is not None:
            timing["prev_total_ms"] = self._previous_total_ms
        log_event(log, logging.DEBUG, "call", connection=self._name, **timing)
        return infer_reply(request, timed.chunk.actions, timing)

    async def _reset(self, request: ResetRequest) -> str:
        self._kind = "reset"
        ended = self._host.sessions.reset(self._name, request.session_id)
        if ended is not None:
            await self._result(ended)
        return RESET_REPLY

    async def _result(self, job: Future[Result]) -> Result:
        """The job's result; if the robot leaves first, the job is cancelled, which costs nothing if it still waits.

        Raises what the job raised, _RobotGone, or EngineStopped when the server does not wait any longer.
        """
        result = asyncio.wrap_future(job)
        await asyncio.wait((result, self._closed, self._host.cut_short), return_when=asyncio.FIRST_COMPLETED)
        if result.done():
            return result.result()
        result.cancel()
        if self._closed.done():
            raise _RobotGone
        raise EngineStopped("the server is shutting down and could not wait for this call")

    async def _send(self, reply: str | bytes) -> None:
        await self._websocket.send(reply)
        self._host.metrics.sent(len(reply))

    def _internal_error(self, error: Exception) -> str:
        """The robot learns the id under which the log has the traceback; with debug, the traceback too."""
        error_id = secrets.token_hex(4)
        fields = {"connection": self._name, "id": error_id}
        log.error("internal error", exc_info=error, extra={"fields": fields})
        text = f"internal error, id {error_id}"
        if self._host.debug:
            text += "\n" + "".join(traceback.format_exception(error))
        traceback.clear_frames(error.__traceback__)  # they and the error hold each other, and the images with them
        return text

    def _warn_of_size(self, request: InferRequest) -> None:
        if self._size_was_warned_of:
            return
        if warnings := size_warnings(request, self._host.handshake["image_resolution"]):
            self._size_was_warned_of = True
            log_event(log, logging.WARNING, "image size", connection=self._name, found="; ".join(warnings))
