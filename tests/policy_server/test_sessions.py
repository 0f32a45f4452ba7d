"""Whose episode is whose, over real connections and with the real tiny policy; and the store of sessions alone."""

import logging

import numpy as np
import pytest

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


@pytest.mark.slow
async def test_environments_that_share_a_connection_get_bit_for_bit_what_each_gets_alone() -> None:
    """Eight calls each: through the whole window and its restart."""
    names, calls = ("env 0", "env 1", "env 2"), range(8)
    async with serving() as (server, policy):
        alone = {}
        for number, name in enumerate(names):
            async with await Robot.connect(server) as robot:
                alone[name] = [await actions(robot, f"{name} alone", 100 * number + call) for call in calls]
        shared: dict[str, list[np.ndarray]] = {name: [] for name in names}
        async with await Robot.connect(server) as robot:
            for call in calls:
                for number, name in enumerate(names[:: 1 if call % 2 else -1]):
                    number = names.index(name)
                    shared[name].append(await actions(robot, name, 100 * number + call))
            assert not any(event.startswith("end id env") and "alone" not in event for event in policy.events)
    for name in names:
        np.testing.assert_array_equal(shared[name], alone[name])


async def test_a_reset_ends_the_episodes_it_names_and_no_others() -> None:
    async with (
        serving() as (server, policy),
        await Robot.connect(server) as robot,
        await Robot.connect(server) as other,
    ):
        for name in ("a", "b", "c"):
            await actions(robot, name)
        await actions(other, "d")
        for reset, ended in (
            ({"session_id": "b"}, ["b"]),
            ({"session_id": "unknown"}, []),
            ({"session_id": "d"}, []),
            ({"session_ids": None}, []),
            ({"session_ids": ["a", "d", "unknown", 5]}, ["a"]),
            ({}, ["c"]),  # the one used last
            ({}, []),
        ):
            before = len(policy.events)
            assert await robot.ask({"endpoint": "reset", **reset}) == "reset successful"
            await until(lambda: not server.engine.stats().running)
            await until(lambda: len(policy.events) >= before + len(ended))  # noqa: B023
            assert policy.events[before:] == [f"end id {name}" for name in ended]
        assert server.sessions.connected == 1


async def test_the_reply_tells_where_the_episode_stands() -> None:
    async def told(robot: Robot, session_id: str | None) -> tuple[int, str, bool]:
        reply = await robot.ask(named(session_id))
        assert list(reply["episode"]) == ["call", "window", "resumed"]
        return tuple(reply["episode"].values())

    async with serving() as (server, _):
        async with await Robot.connect(server) as robot:
            assert await told(robot, "a") == (1, "new", False)
            assert await told(robot, "a") == (2, "continued", False)
            await robot.ask({"endpoint": "reset", "session_id": "a"})
            assert await told(robot, "a") == (1, "reset", False)
            assert await told(robot, "b") == (1, "new", False)
        await until(lambda: server.sessions.waiting == 2)
        async with await Robot.connect(server) as robot:
            assert await told(robot, "a") == (2, "continued", True)
            assert await told(robot, "a") == (3, "continued", False)
            assert await told(robot, "gone with an earlier server") == (1, "new", False)


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
