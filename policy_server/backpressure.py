"""What a connection may cost: neither memory nor a shutdown may depend on the good will of who connects."""

import asyncio
import logging
from typing import Any

from policy_server.http_connection import HttpConnection
from policy_server.logs import log_event
from policy_server.waiting_room import WaitingRoom

log = logging.getLogger(__name__)


class BoundedConnection(HttpConnection):
    """A connection that begins in a waiting room, and is aborted when what was written to it stays unread.

    write_timeout: seconds that it may stay so. That covers what the library writes by itself, too: answers to pings
    pile up without a limit otherwise, and its own pings and its closing handshake wait for ever behind a full buffer.
    """

    def __init__(self, *arguments: Any, write_timeout: float, waiting_room: WaitingRoom, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._write_timeout = write_timeout
        self._waiting_room = waiting_room
        self._cut_off: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody connected, with TLS after its handshake."""
        super().connection_made(transport)
        self._waiting_room.enter(self)

    def pause_writing(self) -> None:
        """The transport's buffer is full: the robot has so long to read some of it."""
        super().pause_writing()
        self._cut_off = self.loop.call_later(self._write_timeout, self._abort)

    def resume_writing(self) -> None:
        """The robot reads again."""
        super().resume_writing()
        self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and so is what was unread."""
        super().connection_lost(exc)
        self._waiting_room.leave(self)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._cut_off is not None:
            self._cut_off.cancel()

    def _abort(self) -> None:
        log_event(log, logging.WARNING, "robot does not read what it is sent", peer=str(self.remote_address))
        self.transport.abort()
