"""Robots that come while the server loads are let in and wait for it, whatever client they run."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from clients import ConnectFailed, PolicyClient
from engine.policy import Policy
from policy_server import http
from policy_server.server import PolicyServer
from policy_server.settings import ServerSettings, SettingsError
from protocol.robot import HANDSHAKE
from tests.serving import SECONDS, Robot, get, observation, tiny_policy, until, wire


@asynccontextmanager
async def loading(
    fail: Exception | None = None, **settings: Any
) -> AsyncIterator[tuple[PolicyServer, Callable[[], None]]]:
    """A server that loads until the second value is called, and then fails or serves the tiny policy."""
    proceed = threading.Event()

    def load(report: Callable[[str], None]) -> Policy:
        report("loading weights")
        assert proceed.wait(SECONDS + 60)
        if fail is not None:
            raise fail
        return tiny_policy()

    async with PolicyServer(ServerSettings(**{"port": 0} | settings), load) as server:
        await until(lambda: server.engine.not_ready == "loading weights")
        try:
            yield server, proceed.set
        finally:
            proceed.set()


@pytest.mark.slow
async def test_clients_that_come_20_seconds_early_get_actions() -> None:
    """openpi's own, and ours: each blocks in its constructor until the handshake has come."""

    def drive(client_class: type) -> np.ndarray:
        client = client_class("127.0.0.1", server.port)
        return client.infer(observation())["actions"]

    async with loading() as (server, proceed):
        robots = [asyncio.create_task(asyncio.to_thread(drive, each)) for each in (WebsocketClientPolicy, PolicyClient)]
        await until(lambda: len(server._conversations) == 2)
        assert (await get(server, "/readyz"))[0] == 503
        await asyncio.sleep(20)
        assert (await get(server, "/readyz"))[0] == 503
        assert not any(robot.done() for robot in robots)
        proceed()
        for actions in await asyncio.gather(*robots):
            assert actions.shape == (24, 8)
        assert (await get(server, "/readyz"))[0] == 200


async def test_the_handshake_comes_when_the_server_is_ready_and_pings_are_answered_meanwhile() -> None:
    async with loading() as (server, proceed), connect(server.url, compression=None) as websocket:
        async with asyncio.timeout(SECONDS):
            await (await websocket.ping())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await websocket.recv()
        proceed()
        assert wire.unpackb(await websocket.recv()) == HANDSHAKE


async def test_a_long_load_does_not_hold_the_handshake_up_but_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Isaac Lab-Arena gives up on a handshake after 30 s, and waits for its first reply without limit."""
    monkeypatch.setattr(http, "GREETING_SECONDS", 0.1)
    async with loading() as (server, proceed), await Robot.connect(server) as robot:
        assert robot.handshake == HANDSHAKE
        await robot.send(observation())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await robot.websocket.recv()
        proceed()
        assert (await robot.reply())["actions"].shape == (24, 8)


async def test_our_own_client_waits_until_the_server_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "GREETING_SECONDS", 0.01)
    async with loading() as (server, proceed):
        in_time = asyncio.create_task(
            asyncio.to_thread(PolicyClient, "127.0.0.1", server.port, connect_timeout=SECONDS)
        )
        with pytest.raises(ConnectFailed):
            await asyncio.to_thread(PolicyClient, "127.0.0.1", server.port, connect_timeout=0.5)
        assert not in_time.done()
        proceed()
        (await in_time).close()


@pytest.mark.parametrize("greeting", [20.0, 0.01])
async def test_a_load_that_fails_is_told_to_who_waits(greeting: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "GREETING_SECONDS", greeting)
    reason = "checkpoint: no such directory: " + "/deep" * 40 + "\nand a second line"
    async with loading(fail=SettingsError(reason)) as (server, proceed), connect(server.url) as websocket:
        if greeting < 1:
            await websocket.recv()
            await websocket.send(wire.packb(observation()))
        await until(lambda: len(server._conversations) == 1)
        proceed()
        with pytest.raises(ConnectionClosed) as closed:
            async with asyncio.timeout(SECONDS):
                await websocket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
        assert closed.value.rcvd.reason == reason[:123]
        with pytest.raises(InvalidStatus) as refused:
            await Robot.connect(server)
        assert refused.value.response.status_code == 503


async def test_who_waits_counts_where_connections_are_limited() -> None:
    async with loading(max_connections=1) as (server, proceed), connect(server.url) as waiting:
        await until(lambda: len(server._conversations) == 1)
        with pytest.raises(InvalidStatus) as refused:
            await Robot.connect(server)
        assert refused.value.response.status_code == 503
        await waiting.close()
        await until(lambda: not server._conversations)
        proceed()
        async with await Robot.connect(server) as robot:
            assert "actions" in await robot.ask(observation())


@pytest.mark.parametrize("asked", [False, True])
async def test_a_stop_while_loading_is_told_with_1001(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "GREETING_SECONDS", 0.01)
    async with loading() as (server, proceed), connect(server.url) as websocket:
        await websocket.recv()
        if asked:
            await websocket.send(wire.packb(observation()))
        async with asyncio.timeout(SECONDS):
            stopping = asyncio.create_task(server.stop())
            with pytest.raises(ConnectionClosed) as closed:
                await websocket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
        proceed()
        await stopping
