"""Many robots at once: order, bounds, robots that leave, that do not read and that fall silent."""

import asyncio
import contextlib
import gc
import socket
import time
import weakref
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from engine.fair_queue import Peer
from engine.policy import Chunk
from engine.session import Window
from policy_server.server import PolicyServer
from policy_server.sessions import Session
from policy_server.settings import ServerSettings
from protocol.robot import Observation
from tests.serving import SECONDS, Gate, Robot, get, observation, serving, until, wire


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


class BigAnswers:
    """Replies too large for the buffers between server and robot; no model is needed to fill them."""

    slowest_call = 0.0

    def infer(self, session_id: str, each: Observation) -> Chunk:
        return Chunk(np.zeros((2**20, 8), np.float32), {}, torch.zeros(16, 2, 8, 16), Window.CONTINUED, 1)

    def end_session(self, session_id: str) -> None: ...

    def info(self) -> dict[str, object]:
        return {}


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


def open_websocket(port: int) -> socket.socket:
    """A socket past the opening handshake, with a small buffer, which nobody reads from."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(SECONDS)
    sock.connect(("127.0.0.1", port))
    sock.sendall(
        b"GET / HTTP/1.1\r\nHost: test\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    received = b""
    while b"\r\n\r\n" not in received:
        received += sock.recv(1)
    return sock


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
