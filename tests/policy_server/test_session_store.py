"""Whose a session is and when it ends, told by what reaches the engine; connections are looked at, not opened."""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from engine.fair_queue import Peer
from engine.worker import EngineBusy
from policy_server.logs import LogBudget
from policy_server.sessions import Gone, SessionInUse, Sessions


class RecordingEngine:
    """Writes down what sessions ask of it, and may be too busy."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.busy = False

    def infer(self, key: str, seen: object, peer: object) -> Future[Any]:
        if self.busy:
            raise EngineBusy
        self.events.append(f"infer {key}")
        return Future()

    def end_session(self, key: str) -> Future[None]:
        self.events.append(f"end {key}")
        return Future()


@dataclass
class FakeLink:
    """One that answers a probe or does not."""

    alive: bool = True
    is_cut: bool = False

    async def is_alive(self) -> bool:
        await asyncio.sleep(0)
        return self.alive

    def cut(self) -> None:
        self.is_cut = True


class Store(Sessions):
    """Sessions over a recording engine, with connections that open when they are first used."""

    def __init__(self, ttl: float = 60, most: int = 128) -> None:
        self.engine = RecordingEngine()
        super().__init__(self.engine, ttl, most, LogBudget(1000, 0.1))  # type: ignore[arg-type]

    async def call(self, connection: str, session_id: str | None, *, open: bool = True) -> None:
        if open and connection not in self._connections:
            self.open(connection, FakeLink())
        self.infer(await self.claim(connection, session_id), None, Peer())  # type: ignore[arg-type]


async def test_an_id_cannot_be_mistaken_for_a_connection_without_one() -> None:
    sessions = Store()
    await sessions.call("1", None)
    await sessions.call("2", "connection 1")
    await sessions.call("3", "1")
    assert len(set(sessions.engine.events)) == 3


async def test_requests_without_an_id_are_an_episode_of_their_own() -> None:
    sessions = Store()
    for session_id in (None, "a", None, "a"):
        await sessions.call("1", session_id)
    assert sessions.engine.events == ["infer connection 1", "infer id a"] * 2
    await sessions.reset("1", None)
    await sessions.call("1", None)
    assert sessions.engine.events[4:] == ["end id a", "infer connection 1"]
    await sessions.reset("1", None)
    await sessions.call("1", None)
    assert sessions.engine.events[6:] == ["end connection 1", "infer connection 1"]


async def test_a_refused_id_changes_nothing() -> None:
    sessions = Store()
    await sessions.call("1", "a")
    await sessions.call("2", "b")
    with pytest.raises(SessionInUse):
        await sessions.call("2", "a")
    await sessions.call("2", "b")
    assert sessions.engine.events == ["infer id a", "infer id b", "infer id b"]


async def test_a_session_that_never_reached_the_engine_is_not_ended_there_nor_kept() -> None:
    """Else a robot could fill the queue with ends, which are never refused, while its calls are."""
    sessions = Store()
    sessions.engine.busy = True
    for number in range(3):
        with pytest.raises(EngineBusy):
            await sessions.call("1", f"{number}")
    sessions.leave("1")
    assert sessions.engine.events == []
    assert (sessions.connected, sessions.waiting) == (0, 0)


async def test_a_reset_lets_go_of_the_id() -> None:
    sessions = Store()
    await sessions.call("1", "a")
    await sessions.reset("1", None)
    await sessions.reset("1", None)
    await sessions.call("2", "a")
    assert sessions.engine.events == ["infer id a", "end id a", "infer id a"]


async def test_a_reset_that_names_its_episode_finds_it_after_a_reconnect() -> None:
    sessions = Store(ttl=0.05)
    await sessions.call("1", "a")
    sessions.leave("1")
    sessions.open("2", FakeLink())
    await sessions.reset("2", ["a"])
    await asyncio.sleep(0.1)
    assert sessions.engine.events == ["infer id a", "end id a"]
    assert sessions.waiting == 0


async def test_a_reset_leaves_the_episode_of_another_live_connection_alone() -> None:
    sessions = Store()
    await sessions.call("1", "a")
    await sessions.call("2", "b")
    await sessions.reset("2", ["a"])
    await sessions.call("1", "a")
    assert sessions.engine.events == ["infer id a", "infer id b", "infer id a"]


async def test_a_kept_session_ends_once_and_not_after_its_robot_is_back() -> None:
    sessions = Store(ttl=0.05)
    await sessions.call("1", "a")
    sessions.leave("1")
    await sessions.call("2", "a")
    await asyncio.sleep(0.1)
    assert "end id a" not in sessions.engine.events
    sessions.leave("2")
    assert sessions.waiting == 1
    await asyncio.sleep(0.1)
    assert sessions.engine.events.count("end id a") == 1
    assert sessions.waiting == 0


async def test_closing_forgets_without_a_word() -> None:
    sessions = Store(ttl=0.05)
    await sessions.call("1", "a")
    sessions.leave("1")
    sessions.close()
    await asyncio.sleep(0.1)
    assert sessions.engine.events == ["infer id a"]


async def test_of_more_sessions_than_a_connection_may_keep_the_least_recently_used_ends() -> None:
    sessions = Store(most=3)
    for session_id in ("a", "b", "c", "a", "d"):
        await sessions.call("1", session_id)
    await sessions.call("2", "e")
    assert [event for event in sessions.engine.events if event.startswith("end")] == ["end id b"]
    assert sessions.connected == 4


async def test_of_more_sessions_than_may_wait_for_their_robots_the_one_that_waited_longest_ends() -> None:
    sessions = Store(most=1)
    for number in range(6):
        await sessions.call(f"{number}", f"{number}")
    assert sessions.waiting == 0
    for number in (1, 0, 2, 3):
        sessions.leave(f"{number}")
    await sessions.call("back", "0")
    sessions.leave("back")
    assert not [event for event in sessions.engine.events if event.startswith("end")]
    for number in (4, 5):
        sessions.leave(f"{number}")
    assert [event for event in sessions.engine.events if event.startswith("end")] == ["end id 1", "end id 2"]
    assert (sessions.connected, sessions.waiting) == (0, 4)


async def test_a_connection_that_was_open_before_is_no_returning_robot() -> None:
    """Robot 1 resets, a stranger uses its id for one call and leaves: the call of robot 1 that follows begins anew."""
    sessions = Store()
    await sessions.call("1", "a")
    await sessions.reset("1", None)
    await sessions.call("2", "a")
    sessions.leave("2")
    await sessions.call("1", "a")
    assert sessions.engine.events == ["infer id a", "end id a"] * 2 + ["infer id a"]
    sessions.leave("1")
    await sessions.call("3", "a")
    assert sessions.engine.events[4:] == ["infer id a"] * 2, "one that comes later is"


async def test_sessions_that_come_back_count_for_what_a_connection_may_keep() -> None:
    sessions = Store(most=2)
    for session_id in ("a", "b"):
        await sessions.call("1", session_id)
    sessions.leave("1")
    for session_id in ("c", "d", "a", "b"):
        await sessions.call("2", session_id)
    assert [event for event in sessions.engine.events if event.startswith("end")] == ["end id c", "end id d"]
    assert (sessions.connected, sessions.waiting) == (2, 0)


async def test_a_dead_connection_gives_up_all_its_sessions_to_who_comes_with_one_of_their_ids() -> None:
    sessions, link = Store(), FakeLink()
    sessions.open("1", link)
    for session_id in ("a", "b"):
        await sessions.call("1", session_id)
    with pytest.raises(SessionInUse):
        await sessions.call("2", "a")
    link.alive = False
    claims = await asyncio.gather(*(sessions.call(name, "a") for name in ("2", "3")), return_exceptions=True)
    assert [type(claim) for claim in claims] == [type(None), SessionInUse], "two at once: one gets it, which is alive"
    assert link.is_cut
    await sessions.call("2", "b")
    assert sessions.engine.events == ["infer id a", "infer id b", "infer id a", "infer id b"]
    with pytest.raises(Gone):
        await sessions.call("1", "c", open=False)
    sessions.leave("1")
    assert (sessions.connected, sessions.waiting) == (2, 0)


async def test_a_reset_reaches_the_episode_of_a_dead_connection() -> None:
    """Clients reset at start; the one that was lost began the episode."""
    sessions, link = Store(), FakeLink()
    sessions.open("1", link)
    await sessions.call("1", "a")
    sessions.open("2", FakeLink())
    await sessions.reset("2", ["a"])
    link.alive = False
    assert sessions.engine.events == ["infer id a"]
    await sessions.reset("2", ["a"])
    await sessions.call("2", "a")
    assert sessions.engine.events == ["infer id a", "end id a", "infer id a"]


async def test_the_first_answer_after_a_reconnect_says_so_whatever_became_of_calls_before() -> None:
    sessions = Store()
    await sessions.call("1", "a")
    sessions.leave("1")
    await sessions.call("2", "a")
    session = await sessions.claim("2", "a")
    assert not sessions.resumed("1", session)
    assert [sessions.resumed("2", session) for _ in range(2)] == [True, False]
