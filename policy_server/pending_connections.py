"""Connections on which no robot's conversation has begun: there are only so many of them at once."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from policy_server.logs import RareEvent

log = logging.getLogger(__name__)


class Pending(Protocol):
    """A connection of which nobody knows yet what it wants."""

    def cut(self) -> None:
        """End it at once, wherever its opening stands."""


class PendingConnections:
    """Connections in the TLS handshake, that have said nothing yet, in the opening handshake, or answered over HTTP.

    A robot or a probe asks within milliseconds of connecting. So when the room is full, whoever has been there the
    longest is cut off, and many who connect and ask nothing keep out neither robots nor probes. Only where more than
    `most` others connect between a probe's connecting and its answer, or a robot's and the end of its opening
    handshake, is that one the longest there and cut off itself.

    most: connections that may be inside at once. count: called for each that is cut off. clock: seconds.
    """

    def __init__(self, most: int, count: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._count = count
        self._inside: dict[Pending, None] = {}  # in the order in which they came
        event = "too many pending connections: those that asked for nothing the longest were cut off"
        self._warning = RareEvent(log, logging.WARNING, event, clock)

    def enter(self, connection: Pending) -> None:
        """A connection was accepted."""
        self._inside[connection] = None
        if len(self._inside) > self._most:
            longest = next(iter(self._inside))
            self.leave(longest)
            longest.cut()
            self._count()
            self._warning.happened(room=self._most)

    def leave(self, connection: Pending) -> None:
        """Its conversation begins, or it is gone."""
        self._inside.pop(connection, None)
