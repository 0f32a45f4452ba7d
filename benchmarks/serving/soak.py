"""Robots that come, go, stumble and vandalise, for minutes, against the real tiny policy. Nothing may add up."""

import asyncio
import functools
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from openpi_client import msgpack_numpy
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from benchmarks.serving.processes import MarkedTinyPolicy, observation, running, serve_ours

ROBOTS = 6
SESSION_TTL_SECONDS = 2.0


@dataclass
class Soak:
    """What happened so far."""

    port: int
    ends_at: float
    happened: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def running(self) -> bool:
        """Whether there is time for more."""
        return time.monotonic() < self.ends_at

    def connect(self) -> connect:
        """A connection as robots make it."""
        return connect(f"ws://127.0.0.1:{self.port}", compression=None, max_size=None)


def soak_table(seconds: float) -> list[str]:
    """Markdown rows: what happened, memory, blocks. Raises AssertionError on a wrong reply or a lost block."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(np.dtype(np.float64).itemsize)
        make_policy = functools.partial(MarkedTinyPolicy, Path(file.name))
        with running(serve_ours, make_policy, session_ttl=SESSION_TTL_SECONDS, max_queue=4) as (port, process_id):
            soak = Soak(port, time.monotonic() + seconds)
            handed_out = np.memmap(file.name, np.float64, "r", shape=(1,))
            before, memory, after = asyncio.run(_drive(soak, process_id, handed_out))
    moments, resident, allocated = np.array(memory).T
    fifths = np.minimum(5 * moments / seconds, 4).astype(int)
    assert not soak.wrong, soak.wrong[:5]
    assert after == before, f"KV blocks and sessions before {before}, after {after}"
    return [
        f"| soak of {seconds:.0f} s, {ROBOTS} robots | |",
        "| --- | --- |",
        *(f"| {name} | {count} |" for name, count in sorted(soak.happened.items())),
        "| wrong replies | 0 |",
        f"| KV blocks used, sessions: before and after | {before} and {after} |",
        *(
            f"| {name}, mean of each fifth of the time, MiB "
            f"| {', '.join(f'{values[fifths == fifth].mean():.0f}' for fifth in range(5))} |"
            for name, values in (("memory that is handed out", allocated), ("resident memory", resident))
        ),
    ]


async def _drive(
    soak: Soak, process_id: int, handed_out: np.ndarray
) -> tuple[list[float], list[tuple[float, float, float]], list[float]]:
    """What is held before, then second by second the time, resident and handed-out MiB, and what is held after."""
    before = await _held(soak.port)
    memory: list[tuple[float, float, float]] = []
    started_at = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(ROBOTS):
            group.create_task(_robot(soak, random.Random(number)))
        group.create_task(_vandal(soak, random.Random(-1)))
        while soak.running():
            await asyncio.sleep(1)
            memory.append((time.monotonic() - started_at, _resident_mib(process_id), float(handed_out[0])))
    await asyncio.sleep(SESSION_TTL_SECONDS + 5)  # until every session has ended
    return before, memory, await _held(soak.port)


async def _robot(soak: Soak, random: random.Random) -> None:
    """Episodes with and without an id, resets, patience and the lack of it."""
    while soak.running():
        session_id = random.choice([None, f"episode {random.randrange(1000)}"])
        try:
            async with soak.connect() as websocket:
                await websocket.recv()
                calls = random.randrange(1, 5)
                while calls and await _call(soak, websocket, session_id, random):
                    calls -= 1
                if not calls and random.random() < 0.3:
                    await websocket.send(msgpack_numpy.packb({"endpoint": "reset"}))
                    reply = await websocket.recv()
                    if reply != "reset successful":
                        soak.wrong.append(f"to a reset: {reply!r}")
                    soak.happened["resets"] += 1
        except ConnectionClosed:
            soak.wrong.append("a connection was closed on a robot that did nothing wrong")


async def _call(soak: Soak, websocket: ClientConnection, session_id: str | None, random: random.Random) -> bool:
    """Ask once and check the reply's mark; or lose patience. Whether the connection is still there."""
    message = observation(random.choice([1, 4]), seed=random.randrange(2**32))
    if session_id is not None:
        message["session_id"] = session_id
    await websocket.send(msgpack_numpy.packb(message))
    if random.random() < 0.2:
        await asyncio.sleep(random.random())
        websocket.transport.abort()
        soak.happened["calls abandoned"] += 1
        return False
    reply = await websocket.recv()
    if isinstance(reply, str):
        known = next((kind for kind in ("busy", "session_id") if reply.startswith(kind)), None)
        if known is None:
            soak.wrong.append(reply)
        soak.happened[f"refused: {known}"] += 1
        await asyncio.sleep(random.random())
        return True
    marks = msgpack_numpy.unpackb(reply)["actions"][-1, :7]
    if not np.array_equal(marks, np.asarray(message["observation/joint_position"], np.float32)):
        soak.wrong.append("a reply to another request")
    soak.happened["calls answered and right"] += 1
    return True


async def _vandal(soak: Soak, random: random.Random) -> None:
    """Broken messages, broken WebSocket frames, half requests, sudden ends."""
    valid = msgpack_numpy.packb(observation(1))
    while soak.running():
        try:
            async with soak.connect() as websocket:
                await websocket.recv()
                for _ in range(5):
                    broken = bytearray(valid)
                    for _ in range(3):
                        broken[random.randrange(500)] = random.randrange(256)
                    await websocket.send(bytes(broken[: random.choice([500, len(broken)])]))
                    await websocket.recv()
                    soak.happened["broken messages"] += 1
                websocket.transport.write(random.randbytes(50))
                await asyncio.sleep(0.1)
                websocket.transport.abort()
        except ConnectionClosed:
            pass
        _, writer = await asyncio.open_connection("127.0.0.1", soak.port)
        writer.write(
            random.choice([b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n"])
        )
        await asyncio.sleep(0.1)
        writer.transport.abort()
        soak.happened["sudden ends below WebSocket"] += 1


async def _held(port: int) -> list[float]:
    """KV blocks in use and the engine's sessions."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    names = ('dreamzero_kv_blocks{state="used"} ', "dreamzero_engine_sessions ")
    return [float(line.removeprefix(name)) for name in names for line in lines if line.startswith(name)]


def _resident_mib(process_id: int) -> float:
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024
