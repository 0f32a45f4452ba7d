"""Ten robots at work under TLS while others do what they can to spoil it: nobody notices, and nothing is left over."""

import asyncio
import contextlib
import gc
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from websockets.exceptions import WebSocketException

from benchmarks.serving.processes import allocated_mib
from policy_server.server import PolicyServer
from tests.certificates import self_signed
from tests.serving import Robot, observation, serving, until, wire

ROBOTS = 10
CALLS = 2
SILENT = 40
LEFT_OVER_MIB = 16  # one message of a robot is 2 MB, and none may stay


def call(seed: int, step: int) -> dict[str, object]:
    return observation(4, 100 * seed + step, session_id=f"robot {seed}")


class Theft:
    """Calls and resets under the ids of robots that are at work. claimed: set by each once it has its session."""

    def __init__(self) -> None:
        self.claimed = [asyncio.Event() for _ in range(ROBOTS)]
        self.tried = asyncio.Event()
        self.replies: list[object] = []

    async def run(self, server: PolicyServer, tls: ssl.SSLContext) -> None:
        async with await Robot.connect(server, ssl=tls) as robot:
            for seed, claimed in enumerate(self.claimed):
                await claimed.wait()
                self.replies.append(await robot.ask(call(seed, 0)))
                await robot.ask({"endpoint": "reset", "session_id": f"robot {seed}"})
        self.tried.set()


async def episode(server: PolicyServer, tls: ssl.SSLContext, seed: int, theft: Theft | None = None) -> list[np.ndarray]:
    async with await Robot.connect(server, ssl=tls) as robot:
        actions = []
        for step in range(CALLS):
            actions.append((await robot.ask(call(seed, step)))["actions"])
            if theft is not None:
                theft.claimed[seed].set()
        if theft is not None:
            await theft.tried.wait()
        assert await robot.ask({"endpoint": "reset", "session_id": f"robot {seed}"}) == "reset successful"
        return actions


async def vandal(server: PolicyServer, tls: ssl.SSLContext, seed: int) -> None:
    """Broken messages, broken frames, calls that nobody waits for, and sudden ends."""
    rng = np.random.default_rng(seed)
    valid = wire.packb(observation(1, seed))
    while True:
        with contextlib.suppress(WebSocketException, OSError):
            robot = await Robot.connect(server, ssl=tls)
            try:
                for _ in range(5):
                    assert isinstance(await robot.ask(valid[: rng.integers(1, len(valid))]), str)
                await robot.send(observation(1, seed))
                robot.websocket.transport.write(rng.bytes(200))
                await asyncio.sleep(0.05)
            finally:
                robot.websocket.transport.abort()


@contextlib.asynccontextmanager
async def silent(server: PolicyServer, tls: ssl.SSLContext) -> AsyncIterator[None]:
    """Connections that say nothing, half of them not even what TLS begins with."""
    opened = [
        await asyncio.open_connection("127.0.0.1", server.port, ssl=tls if number % 2 else None)
        for number in range(SILENT)
    ]
    yield
    for _, writer in opened:
        writer.transport.abort()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
async def test_every_reply_under_attack_is_what_it_would_be_alone_and_nothing_is_left_over(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    tls = ssl.create_default_context(cafile=str(cert))
    left = []
    async with serving(tls_cert=cert, tls_key=key) as (server, _):
        alone = [await episode(server, tls, seed) for seed in range(ROBOTS)]
        for _ in range(2):  # what is made once, in the first, is there to stay
            theft = Theft()
            vandals = [asyncio.create_task(vandal(server, tls, seed)) for seed in (1000, 1001)]
            async with silent(server, tls):
                thief = asyncio.create_task(theft.run(server, tls))
                beside = await asyncio.gather(*(episode(server, tls, seed, theft) for seed in range(ROBOTS)))
                await thief
            ended_early = [task for task in vandals if task.done()]
            for task in vandals:
                task.cancel()
            await asyncio.gather(*vandals, return_exceptions=True)
            assert ended_early == []
            np.testing.assert_array_equal(beside, alone)
            assert len(theft.replies) == ROBOTS
            assert all("in use by another connection" in str(reply) for reply in theft.replies)
            await until(lambda: server.sessions.connected == 0 and server.engine.stats().waiting == 0)
            await until(lambda: not server.engine.stats().running)
            gc.collect()
            left.append((descriptors(), allocated_mib()))
        await until(lambda: descriptors() <= left[0][0])
    assert left[1][1] - left[0][1] < LEFT_OVER_MIB
