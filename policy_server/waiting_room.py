"""Connections on which no robot's conversation has begun: there are only so many of them at once."""

import logging
import time
from collections.abc import Callable

from websockets.asyncio.server import ServerConnection

from policy_server.logs import log_event

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_WARNINGS = 60.0


class WaitingRoom:
    """Connections that have said nothing yet, are in the opening handshake, or are answered over plain HTTP.

    A robot or a probe asks within milliseconds of connecting. So when the room is full, whoever has been there the
    longest is cut off, and many who connect and ask nothing keep out neither robots nor probes. Only where more than
    `most` strangers connect between a probe's connecting and its answer, or a robot's and the end of its opening
    handshake, is that one the longest there and cut off itself.

    most: connections that may be inside at once. count: called for each that is cut off. clock: seconds.
    """

    def __init__(self, most: int, count: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._count = count
        self._clock = clock
        self._inside: dict[ServerConnection, None] = {}  # in the order in which they came
        self._cut = 0  # since the last warning
        self._quiet_until = -float("inf")

    def enter(self, connection: ServerConnection) -> None:
        """A connection was made."""
        self._inside[connection] = None
        if len(self._inside) > self._most:
            longest = next(iter(self._inside))
            self.leave(longest)
            longest.transport.abort()
            self._note_cut()

    def leave(self, connection: ServerConnection) -> None:
        """Its conversation begins, or it is gone."""
        self._inside.pop(connection, None)

    def _note_cut(self) -> None:
        """Count one that was cut off; warn, but once a minute at most, of all since the last warning."""
        self._count()
        self._cut += 1
        now = self._clock()
        if now >= self._quiet_until:
            event = "waiting room is full, connections that asked for nothing were cut off"
            log_event(log, logging.WARNING, event, cut=self._cut, room=self._most)
            self._cut, self._quiet_until = 0, now + _SECONDS_BETWEEN_WARNINGS
