"""Servers, robots and policies for the tests. `python -m tests.serving SECONDS` serves a slowed policy."""

import asyncio
import functools
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import numpy as np
import openpi_client.msgpack_numpy as wire
import torch
from websockets.asyncio.client import ClientConnection, connect

from engine.policy import Chunk, Policy, PolicyStats
from engine.session import Window
from engine.settings import EngineSettings
from engine.startup import load_policy
from policy_server.server import PolicyServer
from policy_server.settings import ServerSettings
from protocol.robot import Observation

SECONDS = 30  # a bound for what takes a second or two on a machine that is not busy

Before = Callable[[str, Observation], None]


@functools.cache
def tiny_policy() -> Policy:
    """The real built-in policy, with one denoising step; one for the whole test run."""
    torch.set_num_threads(1)  # two threads on two busy cores wait for each other most of the time
    return load_policy(EngineSettings(checkpoint="tiny", device="cpu", steps=1), lambda status: None)


class WatchedPolicy:
    """The real tiny policy. What is asked of it is written down; `before` runs ahead of every call, on its thread."""

    def __init__(self, before: Before | None = None) -> None:
        self._policy = tiny_policy()
        self._before = before
        self.events: list[str] = []

    def infer(self, session_id: str, observation: Observation) -> Chunk:
        self.events.append(f"infer {session_id}")
        if self._before is not None:
            self._before(session_id, observation)
        return self._policy.infer(session_id, observation)

    def end_session(self, session_id: str) -> None:
        self.events.append(f"end {session_id}")
        self._policy.end_session(session_id)

    @property
    def slowest_call(self) -> float:
        return self._policy.slowest_call

    def free_caches(self) -> None:
        self._policy.free_caches()

    def stats(self) -> PolicyStats:
        return self._policy.stats()

    def info(self) -> dict[str, object]:
        return self._policy.info()

    def forget_all(self) -> None:
        """Leave the shared policy as it was found."""
        for event in self.events:
            self._policy.end_session(event.split(" ", 1)[1])


class Gate:
    """Holds calls whose prompt is "hold" inside the engine until `open` is called."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self, session_id: str, observation: Observation) -> None:
        if observation.prompt == "hold":
            self._entered.set()
            assert self._opened.wait(SECONDS)

    async def entered(self) -> None:
        """Return once a call is held."""
        assert await asyncio.to_thread(self._entered.wait, SECONDS)

    def open(self) -> None:
        self._opened.set()


@asynccontextmanager
async def serving(before: Before | None = None, **settings: Any) -> AsyncIterator[tuple[PolicyServer, WatchedPolicy]]:
    """A ready server of the real tiny policy on a free port."""
    policy = await asyncio.to_thread(WatchedPolicy, before)
    async with PolicyServer(ServerSettings(**{"port": 0} | settings), lambda report: policy) as server:  # type: ignore[arg-type, return-value]
        await server.ready()
        yield server, policy
    assert server.engine.join(SECONDS)
    policy.forget_all()


class Robot:
    """A plain WebSocket client that speaks openpi's msgpack."""

    def __init__(self, websocket: ClientConnection, handshake: dict[str, object]) -> None:
        self.websocket = websocket
        self.handshake = handshake

    @classmethod
    async def connect(cls, server: PolicyServer | str, **options: Any) -> Self:
        url = server if isinstance(server, str) else server.url
        websocket = await connect(url, **{"compression": None, "max_size": None} | options)
        return cls(websocket, wire.unpackb(await websocket.recv()))

    async def ask(self, message: dict[str, object] | bytes | str) -> Any:
        """The reply: what was unpacked from a binary frame, or the text of an error."""
        await self.send(message)
        return await self.reply()

    async def send(self, message: dict[str, object] | bytes | str) -> None:
        await self.websocket.send(wire.packb(message) if isinstance(message, dict) else message)

    async def reply(self) -> Any:
        async with asyncio.timeout(SECONDS):
            reply = await self.websocket.recv()
        return reply if isinstance(reply, str) else wire.unpackb(reply)

    async def close(self) -> None:
        await self.websocket.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def observation(frames: int = 1, seed: int = 0, **changes: object) -> dict[str, object]:
    """An openpi-style message: no endpoint, no session id. A change to None leaves the key out."""
    rng = np.random.default_rng(seed)
    message: dict[str, object] = {
        f"observation/{camera}": rng.integers(0, 256, (frames, 180, 320, 3), np.uint8)
        for camera in ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")
    }
    message["observation/joint_position"] = rng.uniform(-0.5, 0.5, 7)
    message["observation/gripper_position"] = rng.uniform(0, 1, 1)
    message["prompt"] = "put the cup on the plate"
    named = {name.replace("__", "/"): value for name, value in changes.items()}
    return {key: value for key, value in (message | named).items() if value is not None}


async def get(server: PolicyServer, path: str, **headers: str) -> tuple[int, str, str]:
    """Status, header lines and body of a GET over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    lines = [f"GET {path} HTTP/1.1", "Host: test", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode())
    async with asyncio.timeout(SECONDS):
        answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), head, body


async def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; fail when it does not come to hold."""
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 (what is waited for belongs to others, which set no event)
            await asyncio.sleep(0.01)


class BigAnswers:
    """Replies too large for the buffers between server and robot; no model is needed to fill them."""

    slowest_call = 0.0

    def infer(self, session_id: str, each: Observation) -> Chunk:
        return Chunk(np.zeros((2**20, 8), np.float32), {}, torch.zeros(16, 2, 8, 16), Window.CONTINUED, 1)

    def end_session(self, session_id: str) -> None: ...

    def info(self) -> dict[str, object]:
        return {}


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
