"""The policy clients where the environment names a proxy."""

import asyncio
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest

from clients import ConnectFailed
from tests.clients.blocking_client import both_clients, observation
from tests.clients.hostile_server import HostileServer, silence
from tests.clients.wire_server import WireServer

Connect = Callable[..., Any]
HOST = "robot-server.example"


class Proxy:
    """Talks as an HTTP proxy that takes every name for this machine. asked: the CONNECT lines."""

    def __init__(self, status: str = "200 OK") -> None:
        self.asked: list[str] = []
        self.status = status

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head.split("\r\n")[0])
        writer.write(f"HTTP/1.1 {self.status}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        if self.status.startswith("200"):
            port = int(head.split()[1].rpartition(":")[2])
            back, forth = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.wait(
                [asyncio.create_task(pump(reader, forth)), asyncio.create_task(pump(back, writer))],
                return_when=asyncio.FIRST_COMPLETED,
            )
            forth.transport.abort()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()


@pytest.fixture(autouse=True)
def no_proxy_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@both_clients
def test_the_way_leads_through_the_proxy(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    with HostileServer(proxy := Proxy()) as at, WireServer() as server:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{at.port}")
        with connect(HOST, server.port) as client:
            assert client.infer(observation(1))["actions"][0, 0] == 1
        assert proxy.asked == [f"CONNECT {HOST}:{server.port} HTTP/1.1"]


@both_clients
def test_a_proxy_that_refuses_is_named_without_its_password(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    with HostileServer(Proxy("403 Forbidden")) as at:
        monkeypatch.setenv("https_proxy", f"http://robot:secret@127.0.0.1:{at.port}")
        with pytest.raises(ConnectFailed) as refused:
            connect(HOST, 8000)
        assert str(refused.value) == (
            f"cannot connect to ws://{HOST}:8000: the proxy answered HTTP 403 Forbidden "
            f"(through the proxy http://127.0.0.1:{at.port} of the environment; NO_PROXY={HOST} avoids it)"
        )


@both_clients
def test_a_proxy_that_cannot_reach_the_server_yet_is_asked_again(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HostileServer(proxy := Proxy("503 Service Unavailable")) as at:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{at.port}")
        with pytest.raises(ConnectFailed, match=r"within 0\.5 s: the proxy answered HTTP 503"):
            connect(HOST, 8000, connect_timeout=0.5)
        assert len(proxy.asked) > 1


@both_clients
def test_a_proxy_that_is_down_or_silent_is_named(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silence()

    with HostileServer(talk) as at:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{at.port}")
        with pytest.raises(ConnectFailed, match=rf"timed out.*through the proxy http://127\.0\.0\.1:{at.port}"):
            connect(HOST, 8000, connect_timeout=0.3)
    with pytest.raises(ConnectFailed, match=rf"connection refused .*through the proxy http://127\.0\.0\.1:{at.port}"):
        connect(HOST, 8000, connect_timeout=0.3)


@both_clients
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_this_machine_is_reached_without_the_proxy(
    connect: Connect, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HostileServer(proxy := Proxy("403 Forbidden")) as at, WireServer() as server:
        for name in ("HTTP_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{at.port}")
        with connect(host, server.port) as client:
            client.infer(observation())
        assert proxy.asked == []


@both_clients
def test_no_proxy_is_obeyed(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", ".invalid")
    with pytest.raises(ConnectFailed) as refused:
        connect("no-such-host.invalid", 8000, connect_timeout=0.3)
    assert "proxy" not in str(refused.value)


@both_clients
@pytest.mark.skipif(importlib.util.find_spec("python_socks") is not None, reason="python-socks is installed")
def test_a_proxy_that_needs_a_package_is_named(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOCKS_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(ConnectFailed, match=r"python-socks .*\(through the proxy socks5://127\.0\.0\.1:1 "):
        connect(HOST, 8000)
