"""One client that asks for all there is, beside a robot that asks for what it needs."""

import asyncio
import contextlib
import logging
import time

import msgpack
import pytest
from websockets.exceptions import ConnectionClosed

from policy_server.logs import LogBudget
from policy_server.server import PolicyServer
from protocol.robot import Observation
from tests.serving import Gate, Robot, get, observation, serving, until

JUNK = msgpack.packb(7)


async def ask_without_end(robot: Robot, message: dict[str, object] | bytes) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            await robot.ask(message)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["addresses", "a proxy"])
async def test_a_robot_beside_greedy_connections_has_every_other_turn_and_is_never_refused(way: str) -> None:
    order: list[str] = []

    def note(session_id: str, seen: Observation) -> None:
        order.append(seen.prompt)

    def at(number: int) -> dict[str, object]:
        address = f"127.0.0.{number}"
        return (
            {"local_addr": (address, 0)} if way == "addresses" else {"additional_headers": {"X-Forwarded-For": address}}
        )

    async with serving(note, max_queue=4) as (server, _):
        greedy = [await Robot.connect(server, **at(2)) for _ in range(12)]
        asking = [asyncio.ensure_future(ask_without_end(each, observation(prompt="greedy"))) for each in greedy]
        async with await Robot.connect(server, **at(3)) as robot:
            await until(lambda: server.engine.stats().waiting == 4)
            order.clear()
            for _ in range(6):
                assert isinstance(await robot.ask(observation(prompt="robot")), dict)
        served = list(order)
        for each in greedy:
            await each.close()
        await asyncio.gather(*asking)
    assert served.count("robot") == 6
    assert len(served) <= 24, "a turn of twelve connections without turns is thirteen calls"


async def test_a_call_that_gives_way_is_told_busy_and_may_ask_again() -> None:
    gate = Gate()
    async with serving(gate, max_queue=2) as (server, _):
        held, first, second = [await Robot.connect(server) for _ in range(3)]
        await held.send(observation(prompt="hold"))
        await gate.entered()
        for number, each in enumerate((first, second), start=1):
            await each.send(observation())
            await until(lambda number=number: server.engine.stats().waiting == number)  # type: ignore[misc]
        other = await Robot.connect(server, local_addr=("127.0.0.2", 0))
        await other.send(observation())
        assert await second.reply() == "busy: 2 calls are waiting already; ask again later"
        gate.open()
        for each in (held, first, other):
            assert "actions" in await each.reply()
        assert "actions" in await second.ask(observation())
        for each in (held, first, second, other):
            await each.close()


@pytest.mark.parametrize("junk", [JUNK, b"", "text", {"endpoint": "reset"}])
async def test_requests_that_bring_no_actions_are_taken_slower_and_slower(
    junk: bytes | str | dict[str, object],
) -> None:
    """They cost nothing, so that a few connections could keep the interpreter from the engine's thread."""
    refused = not isinstance(junk, dict)
    async with serving() as (server, _), await Robot.connect(server) as robot:
        began = time.monotonic()
        for _ in range(30):
            assert isinstance(await robot.ask(junk), str)
        assert time.monotonic() - began >= (0.005 * 29 * 30 / 2 if refused else 0.005 * 29)
        # The robot is soon forgiven, and does not wait for its actions.
        for _ in range(2):
            assert isinstance(await robot.ask(observation()), dict)


async def test_refused_requests_cost_few_log_lines_and_none_is_uncounted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "policy_server")
    async with serving() as (server, _):
        async with await Robot.connect(server) as robot:
            for _ in range(40):
                await robot.ask(JUNK)
        await until(lambda: "connection close" in caplog.messages)
        assert await refusals(server) == 40
    fields = [(record.getMessage(), record.fields) for record in caplog.records if hasattr(record, "fields")]
    lines = [found for event, found in fields if event == "request"]
    (closed,) = [found for event, found in fields if event == "connection close"]
    assert 10 <= len(lines) < 20
    left_out = sum(int(found.get("left_out", 0)) for found in lines) + int(closed.get("refusals_left_out", 0))
    assert len(lines) + left_out == 40


@pytest.mark.slow
async def test_coming_and_going_fills_no_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is free to make as many connections and sessions as it likes, and each has lines of its own."""
    caplog.set_level(logging.INFO, "policy_server")
    monkeypatch.setattr("policy_server.server.LogBudget", lambda at_once, seconds: LogBudget(30, 1e6))
    async with serving() as (server, _):
        for number in range(20):
            async with await Robot.connect(server) as robot:
                await robot.ask(observation(session_id=f"episode {number}"))
        await until(lambda: server.sessions.waiting == 20)
    events = ("connection open", "connection close", "session start", "session end")
    assert len([event for event in caplog.messages if event in events]) == 30


async def refusals(server: PolicyServer) -> float:
    _, _, metrics = await get(server, "/metrics")
    (line,) = [line for line in metrics.splitlines() if 'outcome="bad_request"' in line and "_total" in line]
    return float(line.split()[-1])


def test_a_budget_of_lines_fills_up_again_with_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "test")
    now = 0.0
    budget = LogBudget(at_once=3, seconds=10, clock=lambda: now)

    def log(times: int) -> list[dict[str, object]]:
        caplog.clear()
        for number in range(times):
            budget.log(logging.getLogger("test"), "event", number=number)
        return [record.fields for record in caplog.records]  # type: ignore[attr-defined]

    assert log(5) == [{"number": 0}, {"number": 1}, {"number": 2}]
    assert budget.left_out == 2
    now = 10.0
    assert log(2) == [{"number": 0, "left_out": 2}]
    now = 1000.0
    assert log(4) == [{"number": 0, "left_out": 1}, {"number": 1}, {"number": 2}]
