"""Whose turn it is: what waits for the engine, shared out fairly between those who ask."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(eq=False)
class Peer:
    """One of those who ask. host: what it shares with others that get one share together, such as their address.

    served: its last turn, by number; None before it has asked.
    """

    host: str = ""
    served: int | None = None


@dataclass(frozen=True, eq=False)
class _Place(Generic[Item]):
    number: int
    peer: Peer
    item: Item

    @property
    def order(self) -> tuple[int, int]:
        """Within a host: whoever was served longest ago, then whoever came first."""
        return self.peer.served or 0, self.number


class FairQueue(Generic[Item]):
    """Hosts take turns, and so do the peers of a host. Where there is no room, the host with the most there gives way.

    room: items that may wait. Not thread-safe.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._places: list[_Place[Item]] = []
        self._served: dict[str, int] = {}  # last turn of each host of which something waits
        self._turn = 0
        self._number = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, peer: Peer, item: Item) -> Item | None:
        """Have an item wait; the one that has to give way for it, perhaps itself, None where there is room."""
        if peer.served is None:
            peer.served = self._turn  # whoever comes anew does not overtake those who wait
        self._served.setdefault(peer.host, self._turn)
        self._number += 1
        self._places.append(_Place(self._number, peer, item))
        if len(self._places) <= self._room:
            return None
        waiting = Counter(place.peer.host for place in self._places)
        most = max(waiting.values())
        host = peer.host if waiting[peer.host] == most else max(waiting, key=lambda each: waiting[each])
        last = max((place for place in self._places if place.peer.host == host), key=lambda place: place.order)
        self._remove(lambda place: place is last)
        return last.item

    def pop(self) -> Item:
        """Take out the item whose turn it is. Raises ValueError where nothing waits."""
        first = min(self._places, key=lambda place: (self._served[place.peer.host], *place.order))
        self._turn += 1
        first.peer.served = self._served[first.peer.host] = self._turn
        self._remove(lambda place: place is first)
        return first.item

    def discard(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Take out all items of which this is true, whosever turn it is."""
        return self._remove(lambda place: unwanted(place.item))

    def _remove(self, unwanted: Callable[[_Place[Item]], bool]) -> list[Item]:
        removed = [place.item for place in self._places if unwanted(place)]
        self._places = [place for place in self._places if not unwanted(place)]
        waiting = {place.peer.host for place in self._places}
        self._served = {host: turn for host, turn in self._served.items() if host in waiting}
        return removed
