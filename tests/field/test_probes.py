"""What balancers, uptime probes and people send to the robots' port is answered in full, over TCP and over TLS."""

import asyncio
import http.client
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus

from clients import ConnectFailed, PolicyClient
from engine.policy import Policy
from policy_server.server import PolicyServer
from policy_server.settings import ServerSettings
from tests.certificates import self_signed
from tests.serving import SECONDS, Robot, observation, serving, tiny_policy

ALLOWED = "GET, HEAD, OPTIONS"


async def exchange(server: PolicyServer, request: bytes, half_close: bool = False, **options: object) -> bytes:
    """All that the server answers to these bytes, which is read when all are sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, **options)  # type: ignore[arg-type]
    writer.write(request)
    await writer.drain()
    if half_close:
        writer.write_eof()
    async with asyncio.timeout(SECONDS):
        answer = await reader.read()
    writer.close()
    return answer


def status_and_fields(answer: bytes) -> tuple[int, dict[str, str]]:
    """Of an answer, without what depends on the time."""
    lines = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines[1:])
    del fields["Date"]
    return int(lines[0].split()[1]), fields


async def test_head_is_get_without_the_body() -> None:
    async with serving() as (server, _):
        for path in ("/healthz", "/readyz", "/info", "/nothing", "/healthz?from=probe"):
            get = await exchange(server, f"GET {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
            head = await exchange(server, f"HEAD {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
            assert status_and_fields(head) == status_and_fields(get)
            assert int(status_and_fields(head)[1]["Content-Length"]) == len(get.partition(b"\r\n\r\n")[2]) > 0
            assert head.endswith(b"\r\n\r\n")


REQUEST_LINES = {
    "OPTIONS / HTTP/1.0": 200,  # HAProxy's `option httpchk`
    "OPTIONS /readyz HTTP/1.0": 200,
    "OPTIONS * HTTP/1.1": 200,
    "HEAD /healthz HTTP/1.0": 200,
    "GET http://policy.lab:8000/healthz HTTP/1.1": 200,
    "GET HTTPS://policy.lab/readyz?x=/y HTTP/1.1": 200,
    "GET http://policy.lab HTTP/1.1": 404,
    "GET http://[ HTTP/1.1": 404,
    "DELETE /healthz HTTP/1.1": 405,
    "TRACE / HTTP/1.1": 405,
}


@pytest.mark.parametrize("end_of_line", ["\r\n", "\n"])
async def test_requests_without_host_or_with_too_much_of_it(end_of_line: str) -> None:
    async with serving() as (server, _):
        for line, expected in REQUEST_LINES.items():
            status, fields = status_and_fields(await exchange(server, (line + 2 * end_of_line).encode()))
            assert status == expected, line
            assert (fields.get("Allow") == ALLOWED) == (line.startswith("OPTIONS") or status == 405), line


async def test_readiness_is_told_to_every_way_of_asking() -> None:
    proceed = threading.Event()

    def load(report: Callable[[str], None]) -> Policy:
        assert proceed.wait(SECONDS)
        return tiny_policy()

    async with PolicyServer(ServerSettings(port=0), load) as server:
        for method in ("GET", "HEAD", "OPTIONS"):
            for path, expected in {"/readyz": 503, "/healthz": 200}.items():
                answer = await exchange(server, f"{method} {path} HTTP/1.0\r\n\r\n".encode())
                assert status_and_fields(answer)[0] == expected, (method, path)
        proceed.set()
        await server.ready()
        assert status_and_fields(await exchange(server, b"OPTIONS /readyz HTTP/1.0\r\n\r\n"))[0] == 200


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
async def test_the_key_keeps_what_it_keeps_from_get(method: str) -> None:
    async with serving(api_key="a-key") as (server, _):
        for path, expected in {"/healthz": 200, "/readyz": 200, "/info": 401}.items():
            answer = await exchange(server, f"{method} {path} HTTP/1.1\r\n\r\n".encode())
            assert status_and_fields(answer)[0] == (200 if method == "OPTIONS" else expected)  # which tells nothing


BIG = b"\0\r\n" * 1_000_000


@pytest.fixture(params=["tcp", "tls"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Path], ssl.SSLContext | None]:
    """The server's settings, and what a client needs to talk to it."""
    if request.param == "tcp":
        return {}, None
    certificate, key = self_signed(tmp_path)
    return {"tls_cert": certificate, "tls_key": key}, ssl.create_default_context(cafile=str(certificate))


Transport = tuple[dict[str, Path], ssl.SSLContext | None]


def chunks() -> Iterator[bytes]:
    for start in range(0, len(BIG), 100_000):
        yield BIG[start : start + 100_000]


async def test_a_body_does_not_cost_the_client_its_answer(transport: Transport) -> None:
    settings, tls = transport

    def ask(port: int, method: str, body: bytes | Iterator[bytes]) -> tuple[int, str | None, bytes]:
        """What Python's own client gets, which sends all of a body before it reads."""
        if tls is None:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        else:
            client = http.client.HTTPSConnection("127.0.0.1", port, timeout=SECONDS, context=tls)
        client.request(method, "/healthz", body=body)
        response = client.getresponse()
        return response.status, response.getheader("Allow"), response.read()

    async with serving(**settings) as (server, _):
        for method in ("POST", "PUT", "PATCH"):
            for body in (b"x", BIG, chunks()):
                answer = await asyncio.to_thread(ask, server.port, method, body)
                assert answer == (405, ALLOWED, b"Answered are GET, HEAD, OPTIONS.\n")


RESTS = [
    b"Content-Length: 5\r\n\r\nab",  # the rest never comes
    b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nTrailer: x\r\n\r\n",
    b"Content-Length: 100000\r\nExpect: 100-continue\r\n\r\n",
    b"Content-Length: -1\r\n\r\n",
    b"Content-Length: " + 5000 * b"9" + b"\r\n\r\n",
    b"Content-Length: a lot\r\n\r\nabc",
    b"CONTENT-LENGTH:5\r\nContent-Length: 5\r\n\r\n12345",
]


async def test_a_body_that_does_not_end_or_is_not_one_is_answered_all_the_same(transport: Transport) -> None:
    settings, tls = transport
    async with serving(**settings) as (server, _):
        posts = [exchange(server, b"POST / HTTP/1.1\r\nHost: test\r\n" + rest, ssl=tls) for rest in RESTS]
        gets = [exchange(server, b"GET /healthz HTTP/1.1\r\n" + rest, ssl=tls) for rest in RESTS]
        answers = await asyncio.gather(*posts, *gets)
    statuses = [status_and_fields(answer)[0] for answer in answers]
    assert statuses == [405] * len(RESTS) + [200] * len(RESTS)


async def test_who_sends_a_body_without_end_is_cut_off_and_disturbs_nobody() -> None:
    async def send_on(writer: asyncio.StreamWriter) -> None:
        chunk = b"200000\r\n" + bytes(0x200000) + b"\r\n"
        while True:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(0.01)  # so that the robot has the machine to itself most of the time

    async with serving() as (server, _), await Robot.connect(server) as robot:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        sending = asyncio.ensure_future(send_on(writer))
        async with asyncio.timeout(SECONDS):
            assert b" 405 " in await reader.readline()
            with pytest.raises(ConnectionError):
                await sending
        writer.close()
        assert "actions" in await robot.ask(observation())


async def test_a_request_with_a_body_opens_no_websocket() -> None:
    handshake = (
        b"GET / HTTP/1.1\r\nHost: test\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    )
    async with serving() as (server, _):
        answer = await exchange(server, handshake + b"Content-Length: 5\r\n\r\n12345")
        assert status_and_fields(answer)[0] == 426
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(handshake + b"Content-Length: 0\r\n\r\n")  # which is none
        assert b" 101 " in await reader.readline()
        writer.close()


async def test_an_answer_reaches_who_sends_no_more_and_who_has_sent_too_much() -> None:
    health = b"GET /healthz HTTP/1.0\r\n\r\n"
    async with serving() as (server, _):
        assert (await exchange(server, health, half_close=True)).endswith(b"\r\n\r\nOK\n")
        post = b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc"
        assert status_and_fields(await exchange(server, post, half_close=True))[0] == 405
        assert (await exchange(server, health + health)).endswith(b"\r\n\r\nOK\n")
        assert (await exchange(server, b"GET /healthz HTT", half_close=True)) == b""
        assert b" 431 " in await exchange(server, b"GET / HTTP/1.1\r\nA: " + 70_000 * b"a")


async def test_a_request_may_come_byte_by_byte() -> None:
    async with serving() as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for byte in b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n":
            writer.write(bytes([byte]))
            await asyncio.sleep(0.001)
        assert b" 405 " in await reader.readline()
        writer.close()


async def test_a_robot_whose_proxy_drops_the_upgrade_learns_so() -> None:
    async with serving() as (server, _):
        for lost in (b"Sec-WebSocket-Key: x\r\n", b"Sec-WebSocket-Key: x\r\nConnection: close\r\n"):
            answer = await exchange(server, b"GET /robots/7 HTTP/1.0\r\n" + lost + b"\r\n")
            assert status_and_fields(answer)[0] == 426
            assert b"proxy" in answer
        with pytest.raises(InvalidStatus):  # the library's own answers arrive as ever
            await Robot.connect(server, subprotocols=["a"], additional_headers={"Sec-WebSocket-Version": "8"})


CURL: list[tuple[list[str], int]] = [
    (["-I", "/healthz"], 200),
    (["-I", "/"], 404),
    (["-X", "OPTIONS", "/"], 200),
    (["-d", "x", "/"], 405),
    (["-X", "POST", "/"], 405),
    (["-F", "file=@/dev/null", "/info"], 405),
    (["-T", "-", "/"], 405),
    (["--http2", "/readyz"], 200),
    (["-0", "/healthz"], 200),
    (["-H", "Host:", "/healthz"], 200),
    (["-A", "ELB-HealthChecker/2.0", "/readyz"], 200),
    (["-A", "kube-probe/1.34", "-H", "Connection: close", "-H", "Accept: */*", "/readyz"], 200),
]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_curl_gets_an_answer_to_whatever_an_administrator_types(transport: Transport) -> None:
    settings = transport[0]

    def curl(arguments: list[str], url: str) -> subprocess.CompletedProcess[str]:
        command = ["curl", "-q", "-sSk", "--noproxy", "*", "-m", str(SECONDS), "-o", "/dev/null", "-w", "%{http_code}"]
        given = [*command, *arguments[:-1], url + arguments[-1]]
        return subprocess.run(given, input="a body", capture_output=True, text=True, check=False)

    async with serving(**settings) as (server, _):
        url = server.url.replace("ws", "http", 1)
        for arguments, expected in CURL:
            done = await asyncio.to_thread(curl, arguments, url)
            assert (done.returncode, done.stdout, done.stderr) == (0, str(expected), ""), arguments


async def test_tls_to_a_server_without_it_fails_at_once_with_the_reason() -> None:
    async with serving() as (server, _):
        with pytest.raises(ConnectFailed, match="a server without TLS is reached by ws://"):
            await asyncio.to_thread(PolicyClient, "https://127.0.0.1", server.port, connect_timeout=SECONDS)
