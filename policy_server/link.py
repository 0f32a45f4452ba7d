"""The link to one robot: what it may cost, and when it is dead.

Neither memory nor a shutdown may depend on the good will of who connects; nor may a robot be taken for gone because it
is busy: simulators compute for minutes, and some libraries answer pings only while their user waits for a message.
"""

import asyncio
import contextlib
import logging
import select
import socket
from typing import Any

from websockets.exceptions import ConnectionClosed

from policy_server.http_connection import HttpConnection
from policy_server.logs import log_event
from policy_server.pending_connections import PendingConnections

log = logging.getLogger(__name__)

PROBE_SECONDS = 3.0
"""How long a robot may take to show a sign of life when somebody else comes with its session's id."""

_LOOK_SECONDS = 1.0

# The kernel at the other end answers for a process that is stopped or busy, and does not for a machine that is gone.
_TCP_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 120_000}


class RobotLink(HttpConnection):
    """A connection that is pending at first, hears any byte as a sign of life, and is aborted when it is dead.

    write_timeout: seconds that what was written to it may stay unread. That covers what the library writes by itself,
    too: answers to pings pile up without a limit otherwise, and closing handshakes wait for ever behind a full buffer.
    """

    def __init__(self, *arguments: Any, write_timeout: float, pending: PendingConnections, **options: Any) -> None:
        """Made by asyncio when it has accepted a connection, in a task that lasts until the TLS handshake's end."""
        super().__init__(*arguments, **options)
        self._write_timeout = write_timeout
        self._pending = pending
        self._accepting = asyncio.current_task()
        self._is_made = False
        self._cut_off: asyncio.TimerHandle | None = None
        self._heard = asyncio.Event()
        self._heard_at = self.loop.time()
        pending.enter(self)
        if self._accepting is not None:
            self._accepting.add_done_callback(self._accepted)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody connected, with TLS after its handshake."""
        super().connection_made(transport)
        self._is_made = True
        tcp = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # a system that knows less
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _TCP_KEEPALIVE.items():
                if hasattr(socket, name):
                    tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        """Bytes arrived: part of a message perhaps, which may take longer than any ping."""
        self._heard.set()
        self._heard_at = self.loop.time()
        super().data_received(data)

    def pause_writing(self) -> None:
        """The transport's buffer is full: the robot has so long to read some of it."""
        super().pause_writing()
        self._cut_off = self.loop.call_later(self._write_timeout, self._abort, "robot does not read what it is sent")

    def resume_writing(self) -> None:
        """The robot reads again."""
        super().resume_writing()
        self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and so is what was unread."""
        super().connection_lost(exc)
        self._pending.leave(self)
        self._stop_timer()
        self._let_go()

    def cut(self) -> None:
        """End the connection at once, in the middle of its TLS handshake if need be."""
        if self._is_made:
            self.transport.abort()
        elif self._accepting is not None:
            self._accepting.cancel()

    async def watch(self, interval: float, patience: float) -> None:
        """Ping every `interval` seconds until the link ends, which it does after `patience` seconds without a byte.

        While nothing is read, because messages of this robot wait to be worked on, nothing can be heard. Then the
        system is asked, every second, whether the robot is still there; it knows once something was sent to a robot
        whose own last bytes find no room here.

        patience: more than the interval.
        """
        with contextlib.suppress(ConnectionClosed):
            pinged_at = self.loop.time()
            while True:
                await asyncio.sleep(min(interval, _LOOK_SECONDS))
                now = self.loop.time()
                if self.transport.is_reading():
                    if now - self._heard_at > patience:
                        self._abort("robot is silent")
                        return
                    if now - pinged_at < interval:
                        continue
                elif self._is_hung_up():
                    self._abort("robot vanished")
                    return
                pinged_at = now
                await self.ping()

    async def is_alive(self) -> bool:
        """Whether the robot shows a sign of life within PROBE_SECONDS, asked by a ping."""
        if not self.transport.is_reading():
            return not self._is_hung_up()
        self._heard.clear()
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self.ping()
                await self._heard.wait()
        except (TimeoutError, ConnectionClosed):
            return False
        return True

    def _is_hung_up(self) -> bool:
        """Whether the robot's machine has ended the connection, whatever of it is still to be read."""
        if self.transport.is_closing():
            return True
        asked = select.poll()
        asked.register(self.transport.get_extra_info("socket"), getattr(select, "POLLRDHUP", 0))  # and for errors
        return bool(asked.poll(0))

    def _let_go(self) -> None:
        """Free what was received of a message now, not at some garbage collection.

        The library's reader of bytes ends in a generator and, but for polite ends, an error that hold each other, and
        with them up to three times the message.
        """
        self.protocol.parser.close()
        for error in (self.protocol.parser_exc, self.protocol.handshake_exc, self.connection_exc):
            each: BaseException | None = error
            while each is not None:
                each.__traceback__ = None
                each = each.__cause__ or each.__context__

    def _accepted(self, accepting: asyncio.Task[Any]) -> None:
        if not self._is_made:  # the TLS handshake failed
            self._pending.leave(self)

    def _stop_timer(self) -> None:
        if self._cut_off is not None:
            self._cut_off.cancel()

    def _abort(self, event: str) -> None:
        log_event(log, logging.WARNING, event, peer=str(self.remote_address))
        self.transport.abort()
