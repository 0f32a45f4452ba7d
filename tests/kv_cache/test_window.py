"""Window arithmetic against lists of frame numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.window import Overflow, WindowPolicy


@st.composite
def policies(draw: st.DrawFn) -> WindowPolicy:
    capacity = draw(st.integers(1, 12))
    return WindowPolicy(capacity, draw(st.sampled_from(Overflow)), draw(st.integers(0, capacity - 1)))


@given(policy=policies(), data=st.data())
def test_sliding_keeps_the_sinks_and_the_newest(policy: WindowPolicy, data: st.DataObject) -> None:
    room = policy.capacity - policy.sink_frames
    resident: list[int] = []
    seen = 0
    for incoming in data.draw(st.lists(st.integers(1, room), max_size=20)):
        current = list(range(seen, seen + incoming))
        seen += incoming
        leaving = policy.leaving(len(resident), incoming)
        resident = [frame for index, frame in enumerate(resident) if index not in leaving] + current

        everything = list(range(seen))
        sinks = everything[: policy.sink_frames]
        expected = everything if seen <= policy.capacity else sinks + everything[policy.sink_frames :][-room:]
        assert resident == expected
        assert len(resident) <= policy.capacity


@given(policy=policies(), seen=st.integers(0, 40))
def test_only_reset_at_boundary_restarts(policy: WindowPolicy, seen: int) -> None:
    assert policy.restarts(seen) == (policy.overflow is Overflow.RESET and seen >= policy.capacity)


def test_dreamzero_restarts_at_its_fifth_call() -> None:
    policy, start_frame, restarts = WindowPolicy(9), 0, []
    for call in range(9):
        if call == 0 or policy.restarts(start_frame):
            restarts.append(call)
            start_frame = 1
        start_frame += 2
    assert restarts == [0, 4, 8]


def test_more_frames_at_once_than_the_window_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="3 frames at once"):
        WindowPolicy(4, Overflow.SLIDE, sink_frames=2).leaving(4, 3)


@pytest.mark.parametrize(("capacity", "sinks"), [(0, 0), (3, 3), (3, -1)])
def test_windows_that_cannot_move_are_refused(capacity: int, sinks: int) -> None:
    with pytest.raises(ValueError, match="cannot keep"):
        WindowPolicy(capacity, sink_frames=sinks)
