"""Whose episode is whose, over real connections and with the real tiny policy; and the store of sessions alone."""

import asyncio
import logging
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from engine.loop import EngineBusy
from policy_server.sessions import SessionInUse, Sessions
from tests.serving import Robot, get, observation, serving, until


def named(session_id: str | None, seed: int = 0) -> dict[str, object]:
    return observation(frames=4, seed=seed, session_id=session_id)


async def actions(robot: Robot, session_id: str | None, seed: int = 0) -> np.ndarray:
    reply = await robot.ask(named(session_id, seed))
    assert isinstance(reply, dict), reply
    return reply["actions"]


async def test_a_robot_that_reconnects_in_time_goes_on_with_its_window() -> None:
    async with serving() as (server, policy):
        async with await Robot.connect(server) as robot:
            unbroken = [await actions(robot, "unbroken", seed) for seed in (1, 2)]
        async with await Robot.connect(server) as robot:
            first = await actions(robot, "broken", 1)
        await until(lambda: server.sessions.waiting == 2)
        async with await Robot.connect(server) as robot:
            second = await actions(robot, "broken", 2)
    np.testing.assert_array_equal([first, second], unbroken)
    assert (unbroken[0] != unbroken[1]).any()
    assert "end id broken" not in policy.events


async def test_a_robot_that_stays_away_too_long_starts_anew() -> None:
    async with serving(session_ttl=0.2) as (server, policy):
        async with await Robot.connect(server) as robot:
            await actions(robot, "a", 1)
        await until(lambda: "end id a" in policy.events)
        assert server.sessions.waiting == 0
        async with await Robot.connect(server) as robot:
            late = await actions(robot, "a", 2)
            fresh = await actions(robot, "fresh", 2)
    np.testing.assert_array_equal(late, fresh)


async def test_a_new_id_on_a_connection_ends_the_old_episode_first() -> None:
    async with serving() as (server, policy), await Robot.connect(server) as robot:
        one = await actions(robot, "one", 1)
        await actions(robot, "two", 2)
        again = await actions(robot, "one", 1)
    assert policy.events == ["infer id one", "end id one", "infer id two", "end id two", "infer id one"]
    np.testing.assert_array_equal(again, one)


async def test_without_an_id_the_connection_is_the_episode() -> None:
    async with serving() as (server, policy), await Robot.connect(server) as one, await Robot.connect(server) as two:
        for robot in (one, two):
            await actions(robot, None)
        await one.close()
        await until(lambda: len(policy.events) == 3)
        assert server.sessions.waiting == 0
    assert policy.events == ["infer connection 1", "infer connection 2", "end connection 1"]


async def test_the_same_id_from_a_second_live_connection_is_refused_and_nobody_is_disturbed() -> None:
    async with serving() as (server, policy), await Robot.connect(server) as one, await Robot.connect(server) as two:
        await actions(one, "mine", 1)
        await actions(two, "other", 1)
        refusal = await two.ask(named("mine"))
        assert isinstance(refusal, str)
        assert "session_id" in refusal
        assert "'mine'" in refusal
        np.testing.assert_array_equal(await actions(one, "mine", 2), await actions(two, "other", 2))
        _, _, metrics = await get(server, "/metrics")
    assert 'dreamzero_requests_total{kind="infer",outcome="session_in_use"} 1.0' in metrics
    assert "end id other" not in policy.events[:4]


async def test_blocks_and_sessions_are_accounted_for_after_churn() -> None:
    async with serving(session_ttl=0) as (server, policy):
        before = policy.stats()
        for number in range(4):
            async with await Robot.connect(server) as robot:
                await actions(robot, f"episode {number}" if number % 2 else None)
                if number == 3:
                    await robot.ask({"endpoint": "reset"})
        await until(lambda: sum(event.startswith("end") for event in policy.events) == 4)
        await until(lambda: not server.engine.stats().running)
        after = policy.stats()
    assert after.sessions == before.sessions
    assert after.blocks_used == before.blocks_used
    assert after.blocks_free == before.blocks_free


async def test_one_line_is_logged_per_start_and_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "policy_server")
    async with serving() as (server, _):
        async with await Robot.connect(server) as robot:
            await actions(robot, "a")
            await robot.ask(named("a"))
            await robot.ask({"endpoint": "reset"})
        await until(lambda: "connection close" in caplog.messages)
    assert [message for message in caplog.messages if "listen" not in message] == [
        "connection open",
        "session start",
        "session end",
        "connection close",
        "stopped",
    ]


class RecordingEngine:
    """Writes down what sessions ask of it, and may be too busy."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.busy = False

    def infer(self, key: str, seen: object) -> Future[Any]:
        if self.busy:
            raise EngineBusy
        self.events.append(f"infer {key}")
        return Future()

    def end_session(self, key: str) -> Future[None]:
        self.events.append(f"end {key}")
        return Future()


def store(ttl: float = 60) -> tuple[Sessions, RecordingEngine]:
    engine = RecordingEngine()
    return Sessions(engine, ttl), engine  # type: ignore[arg-type]


def infer(sessions: Sessions, connection: str, session_id: str | None) -> None:
    sessions.infer(connection, session_id, None)  # type: ignore[arg-type]


async def test_an_id_cannot_be_mistaken_for_a_connection_without_one() -> None:
    sessions, engine = store()
    infer(sessions, "1", None)
    infer(sessions, "2", "connection 1")
    infer(sessions, "3", "1")
    assert len(set(engine.events)) == 3


async def test_a_request_without_id_stays_with_the_episode_of_its_connection() -> None:
    sessions, engine = store()
    infer(sessions, "1", "a")
    infer(sessions, "1", None)
    assert engine.events == ["infer id a"] * 2


async def test_a_refused_id_changes_nothing() -> None:
    sessions, engine = store()
    infer(sessions, "1", "a")
    infer(sessions, "2", "b")
    with pytest.raises(SessionInUse):
        infer(sessions, "2", "a")
    infer(sessions, "2", "b")
    assert engine.events == ["infer id a", "infer id b", "infer id b"]


async def test_a_session_that_never_reached_the_engine_is_not_ended_there_nor_kept() -> None:
    """Else a robot could fill the queue with ends, which are never refused, while its calls are."""
    sessions, engine = store()
    engine.busy = True
    for number in range(3):
        with pytest.raises(EngineBusy):
            infer(sessions, "1", f"{number}")
    sessions.leave("1")
    assert engine.events == []
    assert (sessions.connected, sessions.waiting) == (0, 0)


async def test_a_reset_lets_go_of_the_id() -> None:
    sessions, engine = store()
    infer(sessions, "1", "a")
    assert sessions.reset("1") is not None
    assert sessions.reset("1") is None
    infer(sessions, "2", "a")
    assert engine.events == ["infer id a", "end id a", "infer id a"]


async def test_a_reset_that_names_its_episode_finds_it_after_a_reconnect() -> None:
    sessions, engine = store(ttl=0.05)
    infer(sessions, "1", "a")
    sessions.leave("1")
    assert sessions.reset("2", "a") is not None
    await asyncio.sleep(0.1)
    assert engine.events == ["infer id a", "end id a"]
    assert sessions.waiting == 0


async def test_a_reset_leaves_the_episode_of_another_live_connection_alone() -> None:
    sessions, engine = store()
    infer(sessions, "1", "a")
    infer(sessions, "2", "b")
    sessions.reset("2", "a")
    infer(sessions, "1", "a")
    assert engine.events == ["infer id a", "infer id b", "end id b", "infer id a"]


async def test_a_kept_session_ends_once_and_not_after_its_robot_is_back() -> None:
    sessions, engine = store(ttl=0.05)
    infer(sessions, "1", "a")
    sessions.leave("1")
    infer(sessions, "2", "a")
    await asyncio.sleep(0.1)
    assert "end id a" not in engine.events
    sessions.leave("2")
    sessions.leave("2")
    assert sessions.waiting == 1
    await asyncio.sleep(0.1)
    assert engine.events.count("end id a") == 1
    assert sessions.waiting == 0


async def test_closing_forgets_without_a_word() -> None:
    sessions, engine = store(ttl=0.05)
    infer(sessions, "1", "a")
    sessions.leave("1")
    sessions.close()
    await asyncio.sleep(0.1)
    assert engine.events == ["infer id a"]
