"""Robots behind the real nginx and HAProxy, each with the configuration that docs/lab.md tells a lab to use."""

import asyncio
import dataclasses
import json
import logging
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from websockets.exceptions import ConnectionClosed, InvalidStatus

from clients import AsyncPolicyClient, PolicyClient
from engine.policy import Chunk, Policy
from policy_server.server import PolicyServer
from policy_server.settings import ServerSettings
from protocol.messages import RESET_REPLY
from protocol.robot import HANDSHAKE, Observation
from tests.certificates import self_signed
from tests.field.proxy import Proxy, program
from tests.serving import SECONDS, Robot, WatchedPolicy, get, observation, serving, tiny_policy

KEY = "a-key-of-some-length"
PATHS = [f"/robots/{number}" for number in range(1, 17)]
FREQUENT_CHECKS = {"check inter 2s fall 2": "check inter 200ms fall 2"}


@dataclasses.dataclass(frozen=True)
class Lab:
    """A proxy to start, and what trusts it."""

    proxy: Proxy
    trusting: ssl.SSLContext

    async def get(self, address: str, path: str) -> tuple[int, str]:
        """Status and body of a GET through the proxy."""
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=self.trusting)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: policy.lab\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(SECONDS):
            head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
        return int(head.split()[1]), body


def make_lab(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    if program(kind) is None:
        pytest.skip(f"needs {kind}")
    certificate, key = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))  # as docs/lab.md tells robots to trust it
    return Lab(Proxy(kind, tmp_path, certificate, key), ssl.create_default_context(cafile=str(certificate)))


@pytest.fixture(params=["nginx", "haproxy"])
def lab(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return make_lab(request.param, tmp_path, monkeypatch)


@pytest.fixture
def haproxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return make_lab("haproxy", tmp_path, monkeypatch)


@pytest.fixture
def nginx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return make_lab("nginx", tmp_path, monkeypatch)


async def test_unmodified_clients_pass_with_tls_path_and_key(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "policy_server")

    def episodes(url: str) -> None:
        theirs = WebsocketClientPolicy(url + "/robots/7", api_key=KEY)
        assert theirs.get_server_metadata() == HANDSHAKE
        assert theirs.infer(observation(frames=4))["actions"].shape == (24, 8)  # 2 MB
        with pytest.raises(RuntimeError, match="prompt"):
            theirs.infer(observation(prompt=None))
        theirs._ws.close()
        with PolicyClient(url + "/robots/7", api_key=KEY) as ours:
            assert ours.infer(observation())["actions"].shape == (24, 8)
            ours.reset()
        with pytest.raises(InvalidStatus) as refused:
            WebsocketClientPolicy(url + "/robots/7", api_key="wrong")
        assert refused.value.response.status_code == 401

    async with serving(api_key=KEY) as (server, _), lab.proxy.before([server.port] * 2) as address:
        await asyncio.to_thread(episodes, f"wss://{address}")
        async with AsyncPolicyClient(f"wss://{address}/robots/8", api_key=KEY) as client:
            await client.reset()
        assert await lab.get(address, "/healthz") == (200, "OK\n")
        assert (await lab.get(address, "/info"))[0] == 401
    opened = [record.fields for record in caplog.records if record.message == "connection open"]  # type: ignore[attr-defined]
    assert [each["path"] for each in opened] == ["/robots/7", "/robots/7", "/robots/8"]
    assert {each["forwarded_for"] for each in opened} == {"127.0.0.1"}


class TalkativePolicy(WatchedPolicy):
    """Its chunks are long: 15 MB."""

    def infer(self, session_id: str, observation: Observation) -> Chunk:
        chunk = super().infer(session_id, observation)
        return dataclasses.replace(chunk, actions=np.tile(chunk.actions, (20_000, 1)))


async def test_large_messages_pass_both_ways_whole(lab: Lab) -> None:
    policy = await asyncio.to_thread(TalkativePolicy)
    async with PolicyServer(ServerSettings(port=0), lambda report: policy) as server:  # type: ignore[arg-type, return-value]
        await server.ready()
        async with lab.proxy.before([server.port] * 2) as address:
            url = f"wss://{address}/robots/7"
            async with await Robot.connect(url, ssl=lab.trusting) as robot:
                actions = (await robot.ask(observation(frames=30)))["actions"]  # 15 MB
                assert actions.shape == (480_000, 8)
                np.testing.assert_array_equal(actions[:24], actions[-24:])
    policy.forget_all()


@pytest.mark.slow
async def test_pings_keep_an_idle_robot_connected_beyond_the_timeout_of_the_proxy(lab: Lab) -> None:
    short = {"nginx": {"read_timeout 1h": "read_timeout 2s"}, "haproxy": {"timeout tunnel 1h": "timeout tunnel 2s"}}
    edits = short[lab.proxy.kind]

    async def is_there_after(pause: float, robot: Robot) -> bool:
        await asyncio.sleep(pause)
        try:
            return await robot.ask({"endpoint": "reset"}) == RESET_REPLY
        except ConnectionClosed:
            return False

    async with (
        serving(ping_interval=0.5, ping_timeout=60) as (pinging, _),
        serving(ping_interval=60, ping_timeout=120) as (silent, _),
        lab.proxy.before([pinging.port, pinging.port], edits) as to_pinging,
        dataclasses.replace(lab.proxy, directory=_below(lab)).before([silent.port, silent.port], edits) as to_silent,
    ):
        robots = [
            await Robot.connect(f"wss://{address}/", ssl=lab.trusting, ping_interval=None)
            for address in (to_pinging, to_silent)
        ]
        assert await asyncio.gather(*(is_there_after(5, robot) for robot in robots)) == [True, False]
        for robot in robots:
            await robot.close()


def _below(lab: Lab) -> Path:
    directory = lab.proxy.directory / "other"
    directory.mkdir()
    return directory


async def eventually(found: Callable[[], Awaitable[object]], expected: object) -> None:
    """Return when what is found is what is expected; fail when it does not come to be."""
    async with asyncio.timeout(SECONDS):
        while await found() != expected:  # noqa: ASYNC110 (what is waited for belongs to other processes)
            await asyncio.sleep(0.05)


async def home(lab: Lab, url: str, servers: Sequence[PolicyServer], **options: object) -> int:
    """The index of the server that a robot reaches: it has a connection more while the robot is connected."""

    async def connections() -> list[str]:
        pages = [(await get(server, "/metrics"))[2] for server in servers]
        return [next(line for line in page.splitlines() if line.startswith("dreamzero_connections")) for page in pages]

    idle = await connections()
    async with await Robot.connect(url, ssl=lab.trusting, **options):
        busy = await connections()
    (found,) = [index for index, counts in enumerate(zip(idle, busy, strict=True)) if counts[0] != counts[1]]
    await eventually(connections, idle)
    return found


async def homes(lab: Lab, address: str, servers: Sequence[PolicyServer]) -> list[int]:
    """The server of each path's robot."""
    return [await home(lab, f"wss://{address}{path}", servers) for path in PATHS]


async def test_a_path_keeps_to_its_server_and_moves_only_while_that_is_down(lab: Lab) -> None:
    checks = {"nginx": {"fail_timeout=5s": "fail_timeout=1s"}, "haproxy": FREQUENT_CHECKS}[lab.proxy.kind]
    async with AsyncExitStack() as lasting:
        stays, _ = await lasting.enter_async_context(serving())
        async with serving() as (goes, _):
            port = goes.port
            address = await lasting.enter_async_context(lab.proxy.before([stays.port, port], checks))
            at_first = await homes(lab, address, (stays, goes))
            assert set(at_first) == {0, 1}
            of_stays, of_goes = (f"wss://{address}{PATHS[at_first.index(index)]}" for index in (0, 1))
            staying = await Robot.connect(of_stays, ssl=lab.trusting)
            moving = await asyncio.to_thread(PolicyClient, of_goes)
        await asyncio.to_thread(moving.reset)  # it finds its connection gone and makes another
        assert await staying.ask({"endpoint": "reset"}) == RESET_REPLY
        assert "\ndreamzero_connections 2.0\n" in (await get(stays, "/metrics"))[2]
        moving.close()
        await staying.close()

        async def answered() -> set[int]:
            return {(await lab.get(address, path))[0] for path in PATHS}

        await eventually(answered, {404})
        back, _ = await lasting.enter_async_context(serving(port=port))
        await eventually(lambda: home(lab, of_goes, (stays, back)), 1)
        assert await homes(lab, address, (stays, back)) == at_first


CHECK = """    option httpchk
    http-check send meth GET uri /readyz ver HTTP/1.1 hdr Host policy.lab
"""
OF_READINESS = {
    "documented": CHECK,
    "options": "    option httpchk /readyz\n",  # OPTIONS, HTTP/1.0, no Host
    "head": "    option httpchk HEAD /readyz HTTP/1.1\\r\\nHost:\\ policy.lab\n",
}
OF_LIFE = {
    "documented": CHECK.replace("/readyz", "/healthz"),
    "bare": "    option httpchk\n",
    "get": "    option httpchk GET /healthz\n",
}


async def served_by(lab: Lab, address: str) -> set[str]:
    """What the servers that are in use call their state."""
    answers = [await lab.get(address, f"/info?{number}") for number in range(12)]
    return {json.loads(body)["status"] if status == 200 else str(status) for status, body in answers}


@asynccontextmanager
async def one_of_two_loading(
    lab: Lab, check: str
) -> AsyncIterator[tuple[str, PolicyServer, PolicyServer, threading.Event]]:
    """The proxy before a server that is ready and one that loads until told otherwise."""
    proceed = threading.Event()

    def load(report: Callable[[str], None]) -> Policy:
        report("waiting for the test")
        assert proceed.wait(SECONDS)
        return tiny_policy()

    async with serving() as (ready, _), PolicyServer(ServerSettings(port=0), load) as loading:
        try:
            async with lab.proxy.before([ready.port, loading.port], {CHECK: check} | FREQUENT_CHECKS) as address:
                yield address, ready, loading, proceed
        finally:
            proceed.set()
            await loading.ready()


@pytest.mark.parametrize("check", OF_READINESS)
async def test_haproxy_sends_nobody_to_a_server_that_is_not_ready(haproxy: Lab, check: str) -> None:
    async with one_of_two_loading(haproxy, OF_READINESS[check]) as (address, ready, loading, proceed):
        await eventually(lambda: served_by(haproxy, address), {"ready"})
        proceed.set()
        await loading.ready()

        async def used() -> set[int]:
            return set(await homes(haproxy, address, (ready, loading)))

        await eventually(used, {0, 1})


@pytest.mark.parametrize("check", OF_LIFE)
async def test_haproxy_leaves_a_server_that_loads_its_robots_when_it_asks_for_life_alone(
    haproxy: Lab, check: str
) -> None:
    async with one_of_two_loading(haproxy, OF_LIFE[check]) as (address, *_):
        await asyncio.sleep(1)  # five checks
        assert await served_by(haproxy, address) == {"ready", "waiting for the test"}


async def test_a_robot_behind_a_proxy_without_the_upgrade_headers_is_told(nginx: Lab) -> None:
    edits = {
        "        proxy_set_header Upgrade $http_upgrade;\n": "",
        "        proxy_set_header Connection upgrade;\n": "",
        "        proxy_http_version 1.1;\n": "",
    }
    async with serving() as (server, _), nginx.proxy.before([server.port] * 2, edits) as address:
        with pytest.raises(InvalidStatus) as refused:
            await asyncio.to_thread(WebsocketClientPolicy, f"wss://{address}/robots/7")
    assert refused.value.response.status_code == 426
    assert b"proxy dropped its Upgrade header" in refused.value.response.body


@pytest.mark.skipif(sys.platform != "linux", reason="other addresses of loopback are Linux's")
async def test_a_client_without_a_path_keeps_to_its_server_by_its_address(lab: Lab) -> None:
    edits = {
        "nginx": {"hash $request_uri consistent": "hash $remote_addr consistent"},
        "haproxy": {"balance uri whole": "balance source"},
    }[lab.proxy.kind]
    robots = [(f"127.0.0.{number}", 0) for number in range(10, 26)]
    async with (
        serving() as (one, _),
        serving() as (two, _),
        lab.proxy.before([one.port, two.port], edits) as address,
    ):
        first = [await home(lab, f"wss://{address}", (one, two), local_addr=robot) for robot in robots]
        again = [await home(lab, f"wss://{address}", (one, two), local_addr=robot) for robot in robots]
    assert first == again
    assert set(first) == {0, 1}
