"""Of too many pending connections, whoever waits the longest go, counts it, and says so without filling the log."""

from unittest.mock import Mock

import pytest

from policy_server.pending_connections import PendingConnections


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def warned(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """The fields of each warning so far."""
    return [record.fields for record in caplog.records if record.levelname == "WARNING"]  # type: ignore[attr-defined]


def test_who_has_been_there_the_longest_is_cut_off_and_counted() -> None:
    count = Mock()
    room = PendingConnections(2, count)
    first, second, third, fourth = connections = [Mock() for _ in range(4)]
    room.enter(first)
    room.enter(second)
    room.leave(first)
    room.enter(third)
    assert not count.called, "there was room"
    room.enter(fourth)
    assert [each.cut.call_count for each in connections] == [0, 1, 0, 0]
    assert count.call_count == 1


def test_a_connection_that_was_cut_off_and_is_then_lost_makes_no_room_twice() -> None:
    room = PendingConnections(1, Mock())
    first, second, third = (Mock() for _ in range(3))
    room.enter(first)
    room.enter(second)
    room.leave(first)  # as its end is noticed
    room.enter(third)
    assert second.cut.call_count == 1
    assert third.cut.call_count == 0


def test_a_minute_has_one_warning_with_all_that_were_cut_off_since_the_last(caplog: pytest.LogCaptureFixture) -> None:
    count, clock = Mock(), Clock()
    room = PendingConnections(1, count, clock)
    room.enter(Mock())
    assert warned(caplog) == []
    for _ in range(100):
        room.enter(Mock())
        clock.now += 0.5
    assert warned(caplog) == [{"times": 1, "room": 1}]
    clock.now = 1060.0
    for _ in range(3):
        room.enter(Mock())
    assert warned(caplog) == [{"times": 1, "room": 1}, {"times": 100, "room": 1}]
    clock.now += 60
    room.enter(Mock())
    assert warned(caplog)[2:] == [{"times": 3, "room": 1}]
    assert count.call_count == 104
