"""What the serving benchmark drives: servers in processes of their own, an observation, a machine's name."""

import asyncio
import contextlib
import ctypes
import http
import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from openpi_client import msgpack_numpy

CALL_SECONDS_OF_A_GPU = 0.05
CAMERAS = ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")


def observation(frames: int = 4, seed: int = 0) -> dict[str, object]:
    """An openpi-style message; 2.07 MB with four frames of 180x320 from three cameras."""
    rng = np.random.default_rng(seed)
    message: dict[str, object] = {
        f"observation/{camera}": rng.integers(0, 256, (frames, 180, 320, 3), np.uint8) for camera in CAMERAS
    }
    state = {"observation/joint_position": rng.uniform(-1, 1, 7), "observation/gripper_position": rng.uniform(0, 1, 1)}
    return message | state | {"prompt": "put the cup on the plate"}


@dataclass
class Chunk:
    actions: np.ndarray
    seconds: dict[str, float]
    window: str = "continued"
    call: int = 1
    warnings: tuple[str, ...] = ()


@dataclass
class NoStats:
    sessions: int = 0
    blocks_used: int = 0
    blocks_free: int = 0
    block_bytes: int = 0
    evictions: int = 0


class StubPolicy:
    """Answers after `seconds` of waiting, as a thread does whose work is on a GPU; no model."""

    slowest_call = 0.0

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._actions = np.zeros((24, 8), np.float32)

    def infer(self, session_id: str, seen: object) -> Chunk:
        if self._seconds:
            time.sleep(self._seconds)
        return Chunk(self._actions, {"denoise": self._seconds})

    def end_session(self, session_id: str) -> None: ...

    def stats(self) -> NoStats:
        return NoStats()

    def info(self) -> dict[str, object]:
        return {"checkpoint": "stub"}


class MarkedTinyPolicy:
    """The real tiny policy with one step; the last action of each reply is the joint state of its request.

    handed_out: a file of one float64, in which each call leaves what `allocated_mib` says then.
    """

    slowest_call = 0.0

    def __init__(self, handed_out: Path) -> None:
        import torch

        from engine.settings import EngineSettings
        from engine.startup import load_policy

        torch.set_num_threads(1)
        self._handed_out = np.memmap(handed_out, np.float64, "r+", shape=(1,))
        self._policy = load_policy(EngineSettings(steps=1, device="cpu"), lambda status: None)
        for name in ("end_session", "free_caches", "stats", "info"):
            setattr(self, name, getattr(self._policy, name))

    def infer(self, session_id: str, seen: Any) -> Chunk:
        chunk = self._policy.infer(session_id, seen)
        actions = chunk.actions.copy()
        actions[-1, :7] = seen.state["joint_position"]
        self._handed_out[0] = allocated_mib()
        return Chunk(actions, chunk.seconds)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def allocated_mib() -> float:
    """MiB that glibc's allocator has handed out to this process and not got back, all threads together."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return float(info.uordblks + info.hblkhd) / 2**20


def serve_ours(ready: Connection, make_policy: Callable[[], object], settings: dict[str, Any]) -> None:
    """Run this project's server until SIGTERM; send its port."""
    from policy_server.process import freeze_gc
    from policy_server.server import PolicyServer
    from policy_server.settings import ServerSettings

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        load: Any = lambda report: make_policy()  # noqa: E731
        async with PolicyServer(ServerSettings(**({"port": 0} | settings)), load) as server:
            await server.ready()
            freeze_gc()  # as `python -m policy_server` does
            ready.send(server.port)
            await stop.wait()

    asyncio.run(main())


def serve_plainly(ready: Connection, make_policy: Callable[[], Any], settings: dict[str, Any]) -> None:
    """Run a server of the usual kind until SIGTERM: decode, infer and encode in the connection's coroutine."""
    from websockets.asyncio.server import ServerConnection, serve
    from websockets.http11 import Request, Response

    policy = make_policy()

    async def converse(websocket: ServerConnection) -> None:
        packer = msgpack_numpy.Packer()
        await websocket.send(packer.pack({}))
        total = None
        async for frame in websocket:
            started_at = time.monotonic()
            seen = msgpack_numpy.unpackb(frame)
            infer_at = time.monotonic()
            chunk = policy.infer("the only one", seen)
            timing = {"infer_ms": 1e3 * (time.monotonic() - infer_at)}
            if total is not None:
                timing["prev_total_ms"] = 1e3 * total
            await websocket.send(packer.pack({"actions": chunk.actions, "server_timing": timing}))
            total = time.monotonic() - started_at

    def health(connection: ServerConnection, request: Request) -> Response | None:
        return connection.respond(http.HTTPStatus.OK, "OK\n") if request.path == "/healthz" else None

    async def main() -> None:
        options: dict[str, Any] = {"compression": None, "max_size": None, "process_request": health}
        async with serve(converse, "127.0.0.1", 0, **options) as server:
            ready.send(server.sockets[0].getsockname()[1])
            await server.serve_forever()

    asyncio.run(main())


@contextlib.contextmanager
def running(
    serve: Callable[..., None], make_policy: Callable[[], object], **settings: Any
) -> Iterator[tuple[int, int]]:
    """Port and process id of a server in a process of its own."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, make_policy, settings))
    process.start()
    try:
        if not here.poll(120):
            raise RuntimeError("the server did not start")
        yield here.recv(), process.pid or 0
    finally:
        process.terminate()
        process.join(30)


def percentiles(seconds: list[float]) -> str:
    """p50 / p95 / p99 in milliseconds."""
    return " / ".join(f"{value:.1f}" for value in 1e3 * np.percentile(seconds, (50, 95, 99)))


def machine() -> str:
    """CPU model and the number of cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"
