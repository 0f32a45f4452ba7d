"""Connected robots that all ask as fast as they are answered, and what they and /healthz wait meanwhile."""

import asyncio
import functools
import http.client
import multiprocessing
import time
from multiprocessing.connection import Connection

from openpi_client import msgpack_numpy
from websockets.asyncio.client import connect

from benchmarks.serving.processes import (
    CALL_SECONDS_OF_A_GPU,
    StubPolicy,
    observation,
    percentiles,
    running,
    serve_ours,
)


def load_table(seconds: float) -> list[str]:
    """Markdown rows for 1, 8 and 64 robots against a stub of 50 ms a call."""
    rows = [
        f"| robots, {1e3 * CALL_SECONDS_OF_A_GPU:.0f} ms a call | calls/s | wait p50 / p95 / p99, ms | ideal wait, ms "
        "| /healthz p50 / p95 / p99, ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    stub = functools.partial(StubPolicy, CALL_SECONDS_OF_A_GPU)
    for robots in (1, 8, 64):
        with running(serve_ours, stub, max_queue=64) as (port, _):
            stop, probe = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(target=_probe, args=(probe, port))
            process.start()
            waits, elapsed = asyncio.run(_robots(port, robots, seconds))
            stop.send(None)
            healthz = stop.recv()
            process.join()
        ideal = 1e3 * CALL_SECONDS_OF_A_GPU * (robots - 1)
        rows.append(
            f"| {robots} | {len(waits) / elapsed:.1f} | {percentiles(waits)} | {ideal:.0f} | {percentiles(healthz)} |"
        )
    return rows


async def _robots(port: int, count: int, seconds: float) -> tuple[list[float], float]:
    """The waits that robots report, in seconds, and for how long they were collected."""
    frame = msgpack_numpy.packb(observation())
    waits: list[float] = []
    start, end = asyncio.Barrier(count + 1), asyncio.Event()

    async def robot() -> None:
        async with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as websocket:
            await websocket.recv()
            await start.wait()
            while not end.is_set():
                await websocket.send(frame)
                reply = msgpack_numpy.unpackb(await websocket.recv())
                waits.append(reply["server_timing"]["wait_ms"] / 1e3)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(robot())
        await start.wait()
        await asyncio.sleep(2 * CALL_SECONDS_OF_A_GPU * count)  # the first calls came in one burst
        waits.clear()
        started_at = time.monotonic()
        await asyncio.sleep(seconds)
        collected, elapsed = list(waits), time.monotonic() - started_at
        end.set()
    return collected, elapsed


def _probe(pipe: Connection, port: int) -> None:
    """Ask /healthz twenty times a second, from a process that does nothing else."""
    waited: list[float] = []
    while not pipe.poll(0.05):
        started_at = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b"OK\n"
        waited.append(time.perf_counter() - started_at)
        connection.close()
    pipe.send(waited)
