"""Many robots at once: order, bounds, robots that leave, that do not read and that fall silent."""

import asyncio
import gc
import socket
import weakref
from concurrent.futures import Future

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from engine.fair_queue import Peer
from engine.policy import Chunk
from policy_server.server import PolicyServer
from policy_server.sessions import Session
from policy_server.settings import ServerSettings
from protocol.robot import Observation
from tests.serving import BigAnswers, Gate, Robot, get, observation, open_websocket, serving, until, wire


async def test_robots_at_once_get_bit_for_bit_what_each_gets_alone() -> None:
    async def episode(server: PolicyServer, seed: int, start: asyncio.Barrier | None = None) -> list[np.ndarray]:
        async with await Robot.connect(server) as robot:
            if start is not None:
                await start.wait()
            return [(await robot.ask(observation(4, seed + step)))["actions"] for step in (0, 10)]

    async with serving() as (server, policy):
        alone = [await episode(server, seed) for seed in range(3)]
        policy.events.clear()
        start = asyncio.Barrier(3)
        together = await asyncio.gather(*(episode(server, seed, start) for seed in range(3)))
    np.testing.assert_array_equal(together, alone)
    callers = [event.split()[-1] for event in policy.events if event.startswith("infer")]
    assert len(set(callers[:3])) == 3, "calls of different robots must have alternated for this test to mean anything"


async def hold(robot: Robot, gate: Gate) -> None:
    await robot.send(observation(prompt="hold"))
    await gate.entered()


async def test_calls_are_served_in_the_order_they_came_and_overflow_is_answered_at_once() -> None:
    gate = Gate()
    order: list[str] = []

    def note(session_id: str, each: Observation) -> None:
        order.append(each.prompt)
        gate(session_id, each)

    async with serving(note, max_queue=2) as (server, _):
        robots = [await Robot.connect(server) for _ in range(4)]
        await hold(robots[0], gate)
        for number in (1, 2):
            await robots[number].send(observation(prompt=str(number)))
            await until(lambda number=number: server.engine.stats().waiting == number)  # type: ignore[misc]
        refused = await robots[3].ask(observation(prompt="3"))
        assert isinstance(refused, str)
        assert refused.startswith("busy")
        _, _, metrics = await get(server, "/metrics")
        assert "dreamzero_queue_depth 2.0" in metrics
        assert 'dreamzero_requests_total{kind="infer",outcome="busy"} 1.0' in metrics
        gate.open()
        for number in (0, 1, 2):
            assert "actions" in await robots[number].reply()
        assert "actions" in await robots[3].ask(observation(prompt="3"))
        for robot in robots:
            await robot.close()
    assert order == ["hold", "1", "2", "3"]


async def test_waiting_time_is_told() -> None:
    gate = Gate()
    async with serving(gate) as (server, _), await Robot.connect(server) as one, await Robot.connect(server) as two:
        await hold(one, gate)
        await two.send(observation())
        await until(lambda: server.engine.stats().waiting == 1)
        await asyncio.sleep(0.3)
        gate.open()
        await one.reply()
        timing = (await two.reply())["server_timing"]
        _, _, metrics = await get(server, "/metrics")
    assert timing["wait_ms"] >= 300
    assert 'dreamzero_queue_wait_seconds_bucket{le="0.25"} 1.0' in metrics


@pytest.mark.parametrize("politely", [True, False])
async def test_a_robot_that_leaves_while_queued_costs_no_inference(politely: bool) -> None:
    gate = Gate()
    async with (
        serving(gate) as (server, policy),
        await Robot.connect(server) as one,
        await Robot.connect(server) as two,
    ):
        await hold(one, gate)
        await two.send(observation())
        await until(lambda: server.engine.stats().waiting == 1)
        if politely:
            await two.close()
        else:
            two.websocket.transport.abort()
        await until(lambda: server.engine.stats().waiting == 0)
        gate.open()
        assert "actions" in await one.reply()
        assert "actions" in await one.ask(observation())
        _, _, metrics = await get(server, "/metrics")
    assert "infer connection 2" not in policy.events
    assert 'outcome="abandoned"} 1.0' in metrics


async def test_a_robot_that_leaves_while_its_call_runs_costs_nobody_else_anything() -> None:
    gate = Gate()
    async with (
        serving(gate) as (server, policy),
        await Robot.connect(server) as one,
        await Robot.connect(server) as two,
    ):
        await hold(one, gate)
        await two.send(observation())
        await until(lambda: server.engine.stats().waiting == 1)
        one.websocket.transport.abort()
        await until(lambda: server.sessions.connected == 1)
        gate.open()
        assert "actions" in await two.reply()
    assert policy.events[:3] == ["infer connection 1", "end connection 1", "infer connection 2"]


async def test_images_are_let_go_with_their_call_not_at_the_next_garbage_collection() -> None:
    """With a model's objects in the process a full collection is rare; observations held for it would pile up."""
    gate = Gate()
    seen: list[tuple[str, weakref.ref]] = []

    def before(session_id: str, each: Observation) -> None:
        gate(session_id, each)
        if each.prompt == "fail":
            raise ValueError

    async with serving(before, max_queue=1) as (server, _):
        infer = server.sessions.infer

        def watched(session: Session, each: Observation, peer: Peer) -> Future[Chunk]:
            seen.append((each.prompt, weakref.ref(each)))
            return infer(session, each, peer)

        server.sessions.infer = watched  # type: ignore[method-assign]
        one, two, three = [await Robot.connect(server) for _ in range(3)]
        gc.collect()
        gc.disable()
        try:
            for prompt in ("answered", "fail"):
                await one.ask(observation(prompt=prompt))
            await hold(one, gate)
            await two.send(observation(prompt="left while queued"))
            await until(lambda: server.engine.stats().waiting == 1)
            assert str(await three.ask(observation(prompt="refused"))).startswith("busy")
            for robot in (two, one):
                robot.websocket.transport.abort()
            await until(lambda: server.sessions.connected == 1)
            gate.open()
            assert "actions" in await three.ask(observation(prompt="last"))
            await three.close()
            await until(lambda: server.sessions.connected == 0)
            kept = [prompt for prompt, reference in seen if reference() is not None]
        finally:
            gc.enable()
    assert [prompt for prompt, _ in seen] == ["answered", "fail", "hold", "left while queued", "refused", "last"]
    assert kept == []


def begun(payload: bytes, sent: int) -> bytes:
    return Frame(Opcode.BINARY, payload).serialize(mask=True)[:sent]


@pytest.mark.parametrize(
    "received",
    [
        None,  # not even a handshake
        b"",
        begun(bytes(2**22), 2**21),
        begun(b"x", 100) * 2 + begun(bytes(2**22), 2**21),  # read no further than two ahead
        begun(bytes(2**26), 2**16),  # too large a message
        b"\xff" * 100,
        begun(b"x", 100) + Frame(Opcode.CLOSE, b"").serialize(mask=True),
    ],
    ids=["connected", "shaken hands", "half a message", "two ahead", "too large", "no frame", "polite"],
)
async def test_what_was_received_is_let_go_with_its_connection_not_at_the_next_garbage_collection(
    received: bytes | None,
) -> None:
    async with PolicyServer(ServerSettings(port=0), lambda report: BigAnswers()) as server:  # type: ignore[arg-type, return-value]
        await server.ready()
        if received is None:
            sock = socket.create_connection(("127.0.0.1", server.port))
            sock.sendall(b"GET / HT")
        else:
            sock = await asyncio.to_thread(open_websocket, server.port)
            await asyncio.to_thread(sock.sendall, received)
        links = server._pending._inside if received is None else server._listener.all_connections
        await until(lambda: len(links) == 1)
        (link,) = links
        protocol = weakref.ref(link.protocol)
        del link
        gc.collect()
        gc.disable()
        try:
            sock.close()
            await until(lambda: protocol() is None)
        finally:
            gc.enable()


async def test_garbage_from_some_does_not_disturb_another() -> None:
    """Random frames, random bytes below the WebSocket layer and sudden ends, all around one robot's episode."""
    rng = np.random.default_rng(0)
    valid = wire.packb(observation(observation__joint_position=None))[:600]
    stop = False

    async def vandal(server: PolicyServer) -> int:
        frames = 0
        while not stop:
            robot = await Robot.connect(server)
            try:
                for _ in range(20):
                    broken = bytearray(valid)
                    for place in rng.integers(0, len(valid), 3):
                        broken[place] = rng.integers(0, 256)
                    assert isinstance(await robot.ask(bytes(broken) if rng.random() < 0.9 else rng.bytes(50)), str)
                    frames += 1
                robot.websocket.transport.write(rng.bytes(200))
                await asyncio.sleep(0.05)
            except ConnectionClosed:
                pass
            robot.websocket.transport.abort()
        return frames

    async with serving() as (server, _):
        async with await Robot.connect(server) as robot:
            alone = [(await robot.ask(observation(4, seed)))["actions"] for seed in range(2)]
        vandals = [asyncio.ensure_future(vandal(server)) for _ in range(3)]
        async with await Robot.connect(server) as robot:
            beside = [(await robot.ask(observation(4, seed)))["actions"] for seed in range(2)]
        stop = True
        assert sum(await asyncio.gather(*vandals)) > 50
    np.testing.assert_array_equal(beside, alone)
