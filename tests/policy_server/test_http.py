"""Plain HTTP on the robots' port, and who may open a WebSocket: key, TLS, limits, start-up."""

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import InvalidStatus

from engine.policy import Policy
from engine.settings import EngineSettings
from policy_server.server import PolicyServer
from policy_server.settings import ServerSettings, SettingsError
from protocol.robot import HANDSHAKE, Observation
from tests.certificates import self_signed
from tests.serving import SECONDS, Robot, get, observation, serving, tiny_policy, until


async def test_alive_and_ready_are_told() -> None:
    async with serving() as (server, _):
        status, head, body = await get(server, "/healthz")
        assert (status, body) == (200, "OK\n")
        assert "Content-Type: text/plain" in head
        assert (await get(server, "/readyz"))[0] == 200
        assert (await get(server, "/healthz?from=probe"))[0] == 200


async def test_info_says_what_is_served() -> None:
    async with serving() as (server, _):
        status, head, body = await get(server, "/info")
    info = json.loads(body)
    assert status == 200
    assert "Content-Type: application/json" in head
    assert info["policy"]["checkpoint"] == "tiny"
    assert info["policy"]["device"] == "cpu"
    assert info["policy"]["attention_backend"]
    assert info["policy"]["sizes"]
    assert info["handshake"] == HANDSHAKE
    assert info["version"]
    assert info["status"] == "ready"


async def test_metrics_count_what_happened() -> None:
    async with serving() as (server, _), await Robot.connect(server) as robot:
        sent = observation(frames=4)
        await robot.ask(sent)
        await robot.ask(b"rubbish")
        await robot.ask({"endpoint": "reset"})
        await robot.ask(sent)
        status, head, body = await get(server, "/metrics")
    assert status == 200
    assert "version=0.0.4" in head
    families = list(text_string_to_metric_families(body))
    values = {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}
    assert values["dreamzero_requests_total", "infer", "ok"] == 2
    assert values["dreamzero_requests_total", "reset", "ok"] == 1
    assert values["dreamzero_requests_total", "unknown", "bad_request"] == 1
    assert values["dreamzero_queue_wait_seconds_count",] == 2
    phases = [values["dreamzero_inference_seconds_sum", phase] for phase in ("encode", "prefill", "denoise")]
    assert min(phases) > 0
    assert sum(phases) <= values["dreamzero_inference_seconds_sum", "total"]
    assert values["dreamzero_connections",] == 1
    assert values["dreamzero_sessions_connected",] == 1
    assert values["dreamzero_sessions_waiting",] == 0
    assert values["dreamzero_queue_depth",] == 0
    assert values["dreamzero_engine_sessions",] == 1
    assert values["dreamzero_kv_blocks", "used"] > 0
    assert values["dreamzero_kv_blocks", "free"] > 0
    for what in ("windows", "prompts", "images"):
        assert 0 < values["dreamzero_session_device_bytes", what] < values["dreamzero_session_most_device_bytes",]
    assert values["dreamzero_kv_block_bytes",] > 0
    assert values["dreamzero_kv_evictions_total",] >= 0
    assert values["dreamzero_received_bytes_total",] > 4e6
    assert 2 * 24 * 8 * 4 < values["dreamzero_sent_bytes_total",] < 4000


async def test_two_servers_count_apart() -> None:
    async with serving() as (one, _), serving() as (two, _), await Robot.connect(one) as robot:
        await robot.ask(b"rubbish")
        assert "bad_request" in (await get(one, "/metrics"))[2]
        assert "bad_request" not in (await get(two, "/metrics"))[2]


async def test_what_is_not_there_is_404_and_what_is_not_get_is_405() -> None:
    async with serving() as (server, _):
        assert (await get(server, "/secrets"))[0] == 404
        assert (await get(server, "/"))[0] == 404
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /healthz HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n")
        assert b" 405 " in await reader.readline()
        writer.close()


async def test_while_loading_the_server_is_alive_and_says_what_it_waits_for() -> None:
    proceed = threading.Event()

    def load(report: Callable[[str], None]) -> Policy:
        report("loading weights")
        assert proceed.wait(SECONDS)
        return tiny_policy()

    async with PolicyServer(ServerSettings(port=0), load) as server:
        await until(lambda: server.engine.not_ready == "loading weights")
        assert (await get(server, "/healthz"))[0] == 200
        status, head, body = await get(server, "/readyz")
        assert status == 503
        assert "loading weights" in body
        assert "Retry-After" in head
        assert json.loads((await get(server, "/info"))[2])["policy"] is None
        assert (await get(server, "/metrics"))[0] == 200
        proceed.set()
        await server.ready()
        assert (await get(server, "/readyz"))[0] == 200


async def test_three_calls_in_a_row_without_device_memory_end_readiness_until_one_succeeds() -> None:
    def before(session_id: str, each: Observation) -> None:
        if each.prompt == "too much":
            raise torch.OutOfMemoryError("CUDA out of memory")

    async with serving(before) as (server, _), await Robot.connect(server) as robot:
        for failed in range(3):
            assert (await get(server, "/readyz"))[0] == 200, failed
            assert (await robot.ask(observation(prompt="too much"))).startswith("internal error")
        status, _, body = await get(server, "/readyz")
        assert status == 503
        assert "device memory" in body
        assert "actions" in await robot.ask(observation())
        assert (await get(server, "/readyz"))[0] == 200


async def test_one_robot_too_many_is_turned_away_and_let_in_when_another_left() -> None:
    async with serving(max_connections=1) as (server, _):
        async with await Robot.connect(server):
            with pytest.raises(InvalidStatus) as refused:
                await Robot.connect(server)
            assert refused.value.response.status_code == 503
            assert (await get(server, "/healthz"))[0] == 200
        await until(lambda: server.sessions.connected == 0)
        async with await Robot.connect(server):
            pass


async def test_who_connects_and_asks_nothing_is_cut_off() -> None:
    async with serving(handshake_timeout=0.2) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTT")
        async with asyncio.timeout(SECONDS):
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        writer.close()


async def test_many_who_connect_and_ask_nothing_keep_nobody_out() -> None:
    async with serving(max_connections=2, handshake_timeout=60) as (server, _):
        async with await Robot.connect(server) as first:
            silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(36)]
            for reader, _ in silent[:4]:  # the 32 that came last have taken all the room there is
                async with asyncio.timeout(SECONDS):
                    with contextlib.suppress(ConnectionResetError):
                        assert await reader.read() == b""
            assert "\ndreamzero_pending_cut_total 5.0\n" in (await get(server, "/metrics"))[2]  # who asks came last
            async with await Robot.connect(server) as second:
                for robot in (first, second):
                    assert "actions" in await robot.ask(observation())
        for _, writer in silent:
            writer.close()


async def test_who_connects_and_asks_nothing_does_not_hold_up_the_end() -> None:
    async with serving(handshake_timeout=60) as (server, _):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await get(server, "/healthz")  # so that the first connection has been accepted
        told_at = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - told_at < 10
    writer.close()


KEY = "a-key-of-some-length"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Api-Key wrong"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": "Bearer"},
        {"Authorization": KEY},
        {"Authorization": f"Api-Key {KEY} "[:-2]},
        {"Authorization": "Api-Key schl\u00fcssel"},
    ],
)
async def test_without_the_key_only_liveness_is_told(headers: dict[str, str]) -> None:
    async with serving(api_key=KEY) as (server, _):
        for path, expected in {"/healthz": 200, "/readyz": 200, "/metrics": 401, "/info": 401, "/other": 401}.items():
            assert (await get(server, path, **headers))[0] == expected, path
        for path in ("/", "/healthz"):
            with pytest.raises(InvalidStatus) as refused:
                await Robot.connect(server.url + path, additional_headers=headers)
            assert refused.value.response.status_code == 401


@pytest.mark.parametrize("scheme", ["Api-Key", "Bearer", "bearer"])
async def test_with_the_key_everything_is_open(scheme: str) -> None:
    """openpi-client says Api-Key, RoboLab and Prometheus say Bearer."""
    async with serving(api_key=KEY) as (server, _):
        header = {"Authorization": f"{scheme} {KEY}"}
        for path in ("/metrics", "/info"):
            assert (await get(server, path, **header))[0] == 200
        async with await Robot.connect(server, additional_headers=header):
            pass


async def test_the_real_openpi_client_gets_in_with_its_key() -> None:
    async with serving(api_key=KEY) as (server, _):
        client = await asyncio.to_thread(WebsocketClientPolicy, "127.0.0.1", server.port, KEY)
        assert client.get_server_metadata() == HANDSHAKE
        await asyncio.to_thread(client._ws.close)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return self_signed(tmp_path)


async def test_tls_serves_wss_and_https(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    trusting = ssl.create_default_context(cafile=str(cert))
    async with serving(tls_cert=cert, tls_key=key) as (server, _):
        assert server.url.startswith("wss://127.0.0.1:")
        async with await Robot.connect(server, ssl=trusting) as robot:
            assert robot.handshake == HANDSHAKE
            assert isinstance(await robot.ask(observation(prompt=None)), str)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: test\r\n\r\n")
        assert b" 200 " in await reader.readline()
        writer.close()
        with pytest.raises(Exception):  # noqa: B017, PT011 (ws:// to a TLS port: which error is the client's affair)
            await Robot.connect(server.url.replace("wss", "ws"), open_timeout=5)


async def test_who_does_not_finish_the_tls_handshake_is_cut_off(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    async with serving(tls_cert=cert, tls_key=key, handshake_timeout=0.2) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(SECONDS):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here that takes IPv4 too")
async def test_the_address_of_everything_takes_ipv4_and_ipv6() -> None:
    async with serving(host="::", api_key=KEY) as (server, _):
        for host in ("127.0.0.1", "[::1]"):
            headers = {"Authorization": f"Api-Key {KEY}"}
            async with await Robot.connect(f"ws://{host}:{server.port}", additional_headers=headers) as robot:
                assert robot.handshake == HANDSHAKE
        with pytest.raises(SettingsError, match=f"port {server.port}: Address already in use"):
            await PolicyServer(ServerSettings(host="::", port=server.port), lambda report: tiny_policy()).start()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_where_the_system_gives_ipv6_alone_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    async with serving(host="::", api_key=KEY) as (server, _):
        headers = {"Authorization": f"Api-Key {KEY}"}
        async with await Robot.connect(f"ws://[::1]:{server.port}", additional_headers=headers) as robot:
            assert robot.handshake == HANDSHAKE
        with pytest.raises(ConnectionRefusedError):
            await Robot.connect(f"ws://127.0.0.1:{server.port}", additional_headers=headers)
    assert [message for message in caplog.messages if "IPv6 alone" in message]


async def test_an_unusable_certificate_is_a_bad_setting(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    key.write_text("no key")
    with pytest.raises(SettingsError, match=r"key\.pem"):
        await PolicyServer(ServerSettings(port=0, tls_cert=cert, tls_key=key), lambda report: tiny_policy()).start()


async def test_a_port_in_use_is_a_bad_setting() -> None:
    async with serving() as (server, _):
        with pytest.raises(SettingsError, match=f"port {server.port}"):
            await PolicyServer(ServerSettings(port=server.port), lambda report: tiny_policy()).start()


@pytest.mark.parametrize("host", ["\udcff", "a..b", "a" * 64 + ".example", "\0", "a" * 300])
async def test_what_can_be_no_host_is_a_bad_setting(host: str) -> None:
    with pytest.raises(SettingsError, match=r"^cannot listen on '[ -~]+ port 0: it is no host's name$"):
        await PolicyServer(ServerSettings(host=host, port=0), lambda report: tiny_policy()).start()


@pytest.mark.parametrize(
    ("settings", "warned"),
    [({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "api_key": KEY}, False), ({"host": "127.0.0.1"}, False)],
)
async def test_an_open_door_to_the_network_is_warned_of(
    settings: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "policy_server")
    async with serving(**settings):
        pass
    assert ("open to the network without an API key" in caplog.messages) == warned


async def test_info_tells_the_settings_whatever_their_types(tmp_path: Path) -> None:
    engine = EngineSettings(save_video=tmp_path, velocity_thresholds=(0.9,), velocity_countdowns=(3,), kv_bytes=2**29)
    async with serving(engine=engine) as (server, _):
        status, _, body = await get(server, "/info")
    told = json.loads(body)["settings"]
    assert status == 200
    assert (told["save_video"], told["velocity_thresholds"], told["kv_bytes"]) == (str(tmp_path), [0.9], 2**29)
