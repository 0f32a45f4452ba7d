"""One robot beside others that want the server for themselves: what its calls cost it, beside what they cost alone."""

import asyncio
import functools
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np
from openpi_client import msgpack_numpy
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from benchmarks.serving.processes import (
    CALL_SECONDS_OF_A_GPU,
    StubPolicy,
    observation,
    percentiles,
    running,
    serve_ours,
)

ROBOT, CROWD = "127.0.0.2", "127.0.0.3"  # to the server they are two machines


def crowd_table(seconds: float) -> list[str]:
    """Markdown rows; seconds: for each kind of company."""
    rows = [
        "| one robot, 50 ms a call, beside | calls/s | a call p50 / p95 / p99, ms | median, of alone |",
        "| --- | --- | --- | --- |",
    ]
    alone = 0.0
    for name, count, behave in COMPANY:
        with running(serve_ours, functools.partial(StubPolicy, CALL_SECONDS_OF_A_GPU)) as (port, _):
            stop, crowd = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(target=_crowd, args=(crowd, port, count, behave))
            process.start()
            stop.recv()  # they are all there
            took = asyncio.run(_robot(port, seconds))
            stop.send(None)
            process.join()
        median = float(np.median(took))
        alone = alone or median
        rows.append(f"| {name} | {len(took) / seconds:.1f} | {percentiles(took)} | {median / alone:.2f} |")
    return rows


async def _robot(port: int, seconds: float) -> list[float]:
    """Seconds of each call, after the first."""
    frame, took = msgpack_numpy.packb(observation()), []
    async with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None, local_addr=(ROBOT, 0)) as websocket:
        await websocket.recv()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            started_at = time.monotonic()
            await websocket.send(frame)
            assert isinstance(await websocket.recv(), bytes)
            took.append(time.monotonic() - started_at)
    return took[1:]


async def _send_junk(websocket: ClientConnection) -> None:
    """Send what is refused, as fast as it is."""
    junk = msgpack_numpy.packb({**observation(), "prompt": None})
    while True:
        await websocket.send(junk)
        await websocket.recv()


async def _be_greedy(websocket: ClientConnection) -> None:
    """Ask again as soon as there is an answer."""
    frame = msgpack_numpy.packb(observation())
    while True:
        await websocket.send(frame)
        await websocket.recv()


async def _be_silent(websocket: ClientConnection) -> None:
    await websocket.wait_closed()


COMPANY: tuple[tuple[str, int, Callable[[ClientConnection], Awaitable[None]]], ...] = (
    ("nobody", 0, _be_silent),
    ("100 silent connections of another machine", 100, _be_silent),
    ("4 connections of another machine that send what is refused", 4, _send_junk),
    ("100 robots of another machine that ask without a pause", 100, _be_greedy),
)


def _crowd(pipe: Connection, port: int, count: int, behave: Callable[[ClientConnection], Awaitable[None]]) -> None:
    """Connect `count` times and have each connection behave so until the pipe says stop."""

    async def one(arrived: asyncio.Barrier) -> None:
        async with connect(
            f"ws://127.0.0.1:{port}", compression=None, max_size=None, local_addr=(CROWD, 0)
        ) as websocket:
            await websocket.recv()
            await arrived.wait()
            with suppress(ConnectionClosed):
                await behave(websocket)

    async def all_of_them() -> None:
        arrived = asyncio.Barrier(count + 1)
        tasks = [asyncio.ensure_future(one(arrived)) for _ in range(count)]
        await arrived.wait()
        pipe.send(None)
        await asyncio.to_thread(pipe.recv)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(all_of_them())
