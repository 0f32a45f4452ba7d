"""Robots that do not read, or send far ahead: what they may cost, and whom."""

import asyncio
import contextlib
import socket
import time

import pytest
from websockets.frames import Frame, Opcode

from policy_server.server import PolicyServer
from policy_server.settings import ServerSettings
from tests.policy_server.test_load import hold
from tests.serving import SECONDS, BigAnswers, Gate, Robot, observation, open_websocket, serving, until, wire


async def test_a_robot_that_does_not_read_is_cut_off_and_holds_nobody_up() -> None:
    settings = ServerSettings(port=0, write_timeout=1)
    async with PolicyServer(settings, lambda report: BigAnswers()) as server:  # type: ignore[arg-type, return-value]
        await server.ready()
        deaf = await asyncio.to_thread(open_websocket, server.port)
        deaf.sendall(Frame(Opcode.BINARY, wire.packb(observation())).serialize(mask=True))
        await until(lambda: server.sessions.connected == 1)
        async with await Robot.connect(server) as robot:
            started_at = time.monotonic()
            assert (await robot.ask(observation()))["actions"].shape == (2**20, 8)
            assert time.monotonic() - started_at < 0.9
            await until(lambda: server.sessions.connected == 1)
            assert time.monotonic() - started_at < SECONDS / 2
        deaf.close()


async def test_a_robot_that_pings_and_never_reads_is_cut_off() -> None:
    """Answers to pings are written by the library, past everything that waits for a robot to read."""
    settings = ServerSettings(port=0, write_timeout=0.5)
    async with PolicyServer(settings, lambda report: BigAnswers()) as server:  # type: ignore[arg-type, return-value]
        await server.ready()
        deaf = await asyncio.to_thread(open_websocket, server.port)
        pings = Frame(Opcode.PING, b"x" * 125).serialize(mask=True) * 1000

        def flood() -> None:
            while True:
                deaf.sendall(pings)

        async with asyncio.timeout(SECONDS):
            with pytest.raises((ConnectionError, BrokenPipeError)):
                await asyncio.to_thread(flood)
        deaf.close()


async def test_a_robot_that_does_not_wait_for_answers_is_read_no_further_than_two_messages_ahead() -> None:
    gate = Gate()
    size = 30 * 2**20
    async with serving(gate) as (server, _):
        robot = await asyncio.to_thread(open_websocket, server.port)
        robot.sendall(Frame(Opcode.BINARY, wire.packb(observation(prompt="hold"))).serialize(mask=True))
        await gate.entered()
        message = memoryview(Frame(Opcode.BINARY, bytes(size)).serialize(mask=True))
        robot.settimeout(2)
        sent = 0

        def flood() -> None:
            nonlocal sent
            while sent < 10 * size:
                at = sent % len(message)
                sent += robot.send(message[at : at + 2**20])

        with pytest.raises(TimeoutError):
            await asyncio.to_thread(flood)
        assert sent < 2.8 * size  # what the system's buffers hold comes on top of the two
        robot.close()
        gate.open()


@pytest.mark.parametrize("ahead", [3, 100])  # what fits between the two, and what does not
async def test_a_robot_that_vanishes_with_messages_sent_ahead_is_noticed_and_its_calls_cost_no_inference(
    ahead: int,
) -> None:
    gate = Gate()
    message = Frame(Opcode.BINARY, wire.packb(observation(2))).serialize(mask=True)

    def vanish(robot: socket.socket) -> None:
        assert robot.recv(2**16)  # what it was greeted with; unread, it would make a reset of the end
        robot.settimeout(1)
        with contextlib.suppress(TimeoutError):
            for _ in range(ahead):
                robot.sendall(message)
        robot.close()

    async with serving(gate) as (server, policy), await Robot.connect(server) as holding:
        await hold(holding, gate)
        robots = [await asyncio.to_thread(open_websocket, server.port) for _ in range(4)]
        await asyncio.gather(*(asyncio.to_thread(vanish, robot) for robot in robots))
        await until(lambda: len(server._conversations) == 1 and server.engine.stats().waiting == 0)
        gate.open()
        assert "actions" in await holding.reply()
    assert [event for event in policy.events if event.startswith("infer")] == ["infer connection 1"]


async def test_a_robot_that_does_not_read_does_not_hold_up_the_end() -> None:
    settings = ServerSettings(port=0, write_timeout=60, drain_timeout=0.5)
    async with PolicyServer(settings, lambda report: BigAnswers()) as server:  # type: ignore[arg-type, return-value]
        await server.ready()
        deaf = await asyncio.to_thread(open_websocket, server.port)
        deaf.sendall(Frame(Opcode.BINARY, wire.packb(observation())).serialize(mask=True))
        await until(lambda: server.sessions.connected == 1)
        told_at = time.monotonic()
    assert time.monotonic() - told_at < 15
    deaf.close()
