"""Listening, start-up order, draining: the parts of a server put together."""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import itertools
import logging
import socket
import ssl
import time
from functools import partial
from typing import Any, Self, cast

from pydantic import TypeAdapter
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from engine.fair_queue import Peer
from engine.robot.embodiment import EmbodimentError
from engine.robot.embodiment_file import read_embodiment
from engine.settings import EngineSettings
from engine.video.recorder import Recorder
from engine.worker import EngineWorker, LoadPolicy
from policy_server.connection import Conversation, ServerContext, close_reason
from policy_server.descriptors import TooFewDescriptors, raise_limit
from policy_server.http import HttpHandler, asking_host, proxy_fields, wishes
from policy_server.link import RobotLink
from policy_server.logs import LogBudget, log_event
from policy_server.metrics import Metrics
from policy_server.origin import admits
from policy_server.pending_connections import PendingConnections
from policy_server.sessions import Sessions, episode_name
from policy_server.settings import ServerSettings, SettingsError
from protocol.codec import Limits

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_SECONDS = 2.0
_THREAD_END_SECONDS = 1.0
# Reading from a robot stops when it has sent more messages than this ahead of the one in work. A robot waits for each
# answer; memory belongs to those who do.
_MESSAGES_AHEAD = 1
_LEAST_PENDING = 32


class PolicyServer:
    """A server around one policy. `async with` listens at once and loads meanwhile; leaving it drains.

    load: makes the policy, see EngineWorker. Everything is as `settings` say.
    """

    def __init__(self, settings: ServerSettings, load: LoadPolicy) -> None:
        self.settings = settings
        self._recorder: Recorder | None = None
        if settings.engine.save_video is not None:
            self._recorder = Recorder(settings.engine.save_video, episode_name)
        self.engine = EngineWorker(load, max_queue=settings.max_queue, recorder=self._recorder)
        # Whoever connects, names sessions and leaves, over and over, does not fill the disk.
        self._comings_and_goings = LogBudget(at_once=1000, seconds=0.1)
        self.sessions = Sessions(self.engine, settings.session_ttl, settings.max_sessions, self._comings_and_goings)
        self._conversations: dict[str, Conversation] = {}
        self._names = map(str, itertools.count(1))
        self._metrics = Metrics(
            self.engine.stats,
            {
                "connections": ("Robots connected.", lambda: len(self._conversations)),
                "sessions_connected": ("Sessions of connected robots.", lambda: self.sessions.connected),
                "sessions_waiting": ("Sessions kept for a robot's return.", lambda: self.sessions.waiting),
            },
        )
        # Room for all robots to come back at once, and for probes beside few robots.
        self._most_pending = max(_LEAST_PENDING, settings.max_connections)
        self._pending = PendingConnections(self._most_pending, self._metrics.pending_cut)
        self._http_handler = HttpHandler(
            api_key=settings.api_key,
            admits_origin=partial(admits, allowed=settings.origins, is_loopback=settings.is_loopback),
            not_ready=lambda: self.engine.not_ready,
            refuses=self._refuses,
            metrics=self._metrics.exposition,
            info=self._describe,
        )

    async def __aenter__(self) -> Self:
        """Listen, and begin to load. Raises SettingsError when port, certificate or embodiment cannot be used."""
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """See __aenter__."""
        settings = self.settings
        _keep_freed_memory()
        try:
            raise_limit(settings.max_connections + self._most_pending)
        except TooFewDescriptors as error:
            raise SettingsError(f"max-connections: {error}") from error
        try:
            embodiment = read_embodiment(settings.engine.embodiment)
        except EmbodimentError as error:
            raise SettingsError(str(error)) from error
        if self._recorder is not None:
            try:
                self._recorder.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingsError(f"save-video: cannot make {self._recorder.directory}: {error.strerror}") from error
        max_message_bytes = settings.max_message_mib * 2**20
        tls = _tls(settings)
        self._context = ServerContext(
            sessions=self.sessions,
            metrics=self._metrics,
            loaded=self.engine.loaded,
            limits=Limits(max_array_bytes=max_message_bytes),
            spec=embodiment.observation_spec,
            handshake=embodiment.handshake,
            ping_interval=settings.ping_interval,
            ping_timeout=settings.ping_timeout,
            debug=settings.debug,
            drain_expired=asyncio.get_running_loop().create_future(),
        )
        try:
            self._listener: Server = await serve(
                self._converse,
                **_where(settings),
                process_request=self._process_request,
                create_connection=cast(
                    type[ServerConnection],
                    partial(RobotLink, write_timeout=settings.write_timeout, pending=self._pending),
                ),
                compression=None,
                ssl=tls,
                ssl_handshake_timeout=settings.handshake_timeout if tls else None,
                max_size=max_message_bytes,
                max_queue=_MESSAGES_AHEAD,
                open_timeout=settings.handshake_timeout,
                ping_interval=None,  # see RobotLink.watch
                close_timeout=_CLOSE_TIMEOUT_SECONDS,
                server_header=None,
                logger=_websockets_logger(),
            )
        except (OSError, ValueError) as error:  # a ValueError: what can be no host's name
            reason = error.strerror if isinstance(error, OSError) else "it is no host's name"
            raise SettingsError(f"cannot listen on {settings.host!a:.300} port {settings.port}: {reason}") from error
        if not settings.is_loopback and settings.api_key is None:
            log_event(log, logging.WARNING, "open to the network without an API key", host=settings.host)
        if settings.host == "::" and not socket.has_dualstack_ipv6():
            log_event(log, logging.WARNING, "this system listens on IPv6 alone; robots with IPv4 cannot connect")
        log_event(log, logging.INFO, "listening", url=self.url)
        self.engine.start()

    @property
    def port(self) -> int:
        """The port listened on."""
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Where robots connect."""
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"{'wss' if self.settings.tls_cert else 'ws'}://{host}:{self.port}"

    async def ready(self) -> dict[str, object]:
        """The policy's `info()`, once calls are served. Raises what loading the policy raised."""
        return await asyncio.wrap_future(self.engine.loaded)

    async def engine_ended(self) -> None:
        """Return once the engine's thread has ended in order. Raises what it died of."""
        await asyncio.wrap_future(self.engine.finished)

    @property
    def engine_error(self) -> BaseException | None:
        """What the engine's thread died of; None while it lives and after an orderly end."""
        finished = self.engine.finished
        return finished.exception() if finished.done() else None

    async def stop(self) -> bool:
        """Answer the calls already accepted, within the drain timeout, then close every connection.

        With code 1001, or 1011 if the engine died. What is left of the time is for recordings not yet written.
        Returns whether every accepted call got its result.
        """
        deadline = time.monotonic() + self.settings.drain_timeout
        self._listener.close(close_connections=False)
        self.engine.stop(drain=True)
        drained = await self._all_idle(self.settings.drain_timeout)
        if not drained:
            log_event(log, logging.WARNING, "calls not done in time", drain_timeout=self.settings.drain_timeout)
            self.engine.stop(drain=False)
            self._context.drain_expired.set_result(None)
            await self._all_idle(_CLOSE_TIMEOUT_SECONDS)
        code = CloseCode.GOING_AWAY if self.engine_error is None else CloseCode.INTERNAL_ERROR
        await self._close_all(code, close_reason(self.engine_error) if self.engine_error is not None else "")
        with contextlib.suppress(TimeoutError):  # of connections that have not said yet what they want
            await asyncio.wait_for(self._listener.wait_closed(), _CLOSE_TIMEOUT_SECONDS)
        self.sessions.close()
        records = self._recorder is not None and self.engine.loaded.done() and self.engine_error is None
        patience = max(_THREAD_END_SECONDS, deadline - time.monotonic()) if records else _THREAD_END_SECONDS
        if not await asyncio.to_thread(self.engine.join, patience) and records:
            log_event(log, logging.WARNING, "recordings not written in time", drain_timeout=self.settings.drain_timeout)
            self.engine.stop(drain=False)
        log_event(log, logging.INFO, "stopped")
        return drained and self.engine_error is None

    async def _all_idle(self, within: float) -> bool:
        """Whether every conversation comes to a point where no answer is owed, within so many seconds."""
        try:
            async with asyncio.timeout(within):
                for conversation in list(self._conversations.values()):
                    await conversation.idle.wait()
        except TimeoutError:
            return False
        return True

    async def _close_all(self, code: int, reason: str) -> None:
        connections = list(self._listener.all_connections)
        closing = [asyncio.ensure_future(websocket.close(code, reason)) for websocket in connections]
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_TIMEOUT_SECONDS)
        for websocket in connections:
            websocket.transport.abort()  # does nothing where the closing handshake has been done

    def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        return self._http_handler.answer(request)

    def _refuses(self) -> str | None:
        if self.engine.loaded.done() and self.engine.loaded.exception() is not None:
            return self.engine.not_ready
        if len(self._conversations) >= self.settings.max_connections:
            return f"{self.settings.max_connections} robots are connected already"
        return None

    def _describe(self) -> dict[str, object]:
        loaded = self.engine.loaded
        return {
            "version": importlib.metadata.version("dreamzero-policy-server"),
            "status": self.engine.not_ready or "ready",
            "settings": TypeAdapter(EngineSettings).dump_python(self.settings.engine, mode="json"),
            "policy": loaded.result() if loaded.done() and loaded.exception() is None else None,
            "handshake": self._context.handshake,
        }

    async def _converse(self, websocket: ServerConnection) -> None:
        link = cast(RobotLink, websocket)
        self._pending.leave(link)
        name = next(self._names)
        peer = websocket.remote_address
        fields = {"peer": f"{peer[0]}:{peer[1]}" if peer else ""} | proxy_fields(websocket.request)
        self._comings_and_goings.log(log, "connection open", connection=name, **fields)
        wished = wishes(cast(Request, websocket.request))
        if self.settings.reply == "array":
            wished = dataclasses.replace(wished, bare_array=True)
        asker = Peer(asking_host(websocket))
        conversation = self._conversations[name] = Conversation(link, name, asker, self._context, wished)
        try:
            await conversation.run()
            await websocket.close()
        finally:
            del self._conversations[name]
            ended: dict[str, object] = {"code": websocket.close_code, "reason": websocket.close_reason}
            if conversation.refusals_left_out:
                ended["refusals_left_out"] = conversation.refusals_left_out
            self._comings_and_goings.log(log, "connection close", connection=name, **ended)


def _where(settings: ServerSettings) -> dict[str, Any]:
    """Where to listen, in the library's words. Raises OSError when an address of both families cannot be listened on.

    Left to itself, asyncio takes IPv6 alone where "::" is asked for, which most programs take for every address.
    """
    if settings.host == "::" and socket.has_dualstack_ipv6():
        address = (settings.host, settings.port)
        return {"sock": socket.create_server(address, family=socket.AF_INET6, dualstack_ipv6=True)}
    return {"host": settings.host, "port": settings.port}


def _tls(settings: ServerSettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise SettingsError(
            f"tls-cert, tls-key: cannot use {settings.tls_cert} with {settings.tls_key}: {error}"
        ) from error
    return context


def _keep_freed_memory() -> None:
    """Have the allocator reuse the memory of one observation for the next.

    glibc gives a freed block of megabytes back to the system, and each observation then pays for zeroed pages anew,
    a sixth of its time on the wire. Once a block of nearly 32 MiB has been freed, blocks below that size are kept.
    """
    bytearray(31 * 2**20)


def _websockets_logger() -> logging.Logger:
    """The library's own lines repeat ours; its errors are wanted."""
    logger = logging.getLogger("policy_server.websockets")
    logger.setLevel(logging.ERROR)
    return logger
