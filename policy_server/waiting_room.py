"""Connections on which no robot's conversation has begun: there are only so many of them at once."""

from websockets.asyncio.server import ServerConnection


class WaitingRoom:
    """Connections that have said nothing yet, are in the opening handshake, or are answered over plain HTTP.

    A robot or a probe asks within milliseconds of connecting. So when the room is full, whoever has been there the
    longest is cut off, and neither robots nor probes are kept out by many who connect and ask nothing.

    most: connections that may be inside at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: dict[ServerConnection, None] = {}  # in the order in which they came

    def enter(self, connection: ServerConnection) -> None:
        """A connection was made."""
        self._inside[connection] = None
        if len(self._inside) > self._most:
            longest = next(iter(self._inside))
            self.leave(longest)
            longest.transport.abort()

    def leave(self, connection: ServerConnection) -> None:
        """Its conversation begins, or it is gone."""
        self._inside.pop(connection, None)
