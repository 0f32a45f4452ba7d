"""A server that is slow, broken or hostile makes the policy clients neither wait nor fill memory without bound."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from websockets.frames import Opcode

from clients import ConnectFailed, PolicyClient, PolicyError, ReplyLost, ReplyTimeout, client_protocol
from protocol.codec import Dialect, encode
from protocol.robot import HANDSHAKE
from tests.clients.blocking_client import both_clients, observation
from tests.clients.hostile_server import HostileServer, Talk, frame, silence, upgrade
from tests.clients.wire_server import WireServer, spec_answer

Connect = Callable[..., Any]
NOT_HTTP = r"within 1 s: timed out|did not receive a valid HTTP response|speaks another protocol"
HANDSHAKE_FRAME = frame(encode(HANDSHAKE, Dialect.OPENPI))


async def slow_answer(message: dict[str, Any], dialect: Dialect) -> Any:
    """The answer, half a second late in the session "slow"."""
    if message.get("session_id") == "slow":
        await asyncio.sleep(0.5)
    return spec_answer(message, dialect)


@both_clients
def test_a_reply_that_comes_too_late_never_answers_the_next_call(connect: Connect) -> None:
    assert issubclass(ReplyTimeout, (TimeoutError, ReplyLost))
    with WireServer(slow_answer) as server, connect(server.url, resend=True) as client:
        with pytest.raises(ReplyTimeout, match=rf"no reply from {server.url} within 0\.1 s; the server may or may not"):
            client.infer(observation(1, session_id="slow"), timeout=0.1)
        assert client.infer(observation(2), timeout=10)["actions"][0, 0] == 2
        with pytest.raises(ReplyTimeout, match=r"within 0\.1 s"):
            client.reset(session_id="slow", timeout=0.1)
        time.sleep(0.6)
        assert client.infer(observation(3))["actions"][0, 0] == 3
        assert len(server.messages) == 4  # none was sent twice
        assert len(server.headers) == 3


@both_clients
def test_a_reply_is_not_waited_for_without_end(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_protocol, "_REPLY_SECONDS", 0.1)
    with WireServer(slow_answer) as server, connect(server.url) as client, pytest.raises(ReplyTimeout, match=r"0\.1 s"):
        client.infer(observation(1, session_id="slow"))


@both_clients
def test_a_server_that_reads_nothing_cannot_hold_a_call(connect: Connect) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await upgrade(reader, writer)
        writer.write(HANDSHAKE_FRAME)
        cast(asyncio.Transport, writer.transport).pause_reading()
        await silence()

    with HostileServer(talk) as server, connect("127.0.0.1", server.port) as client:
        start = time.monotonic()
        with pytest.raises(ReplyTimeout, match=r"within 0\.5 s"):
            client.infer(observation(more=np.zeros(48 * 2**20, np.uint8)), timeout=0.5)
        assert time.monotonic() - start < 30


@both_clients
def test_the_timeout_holds_for_connecting_again(connect: Connect) -> None:
    with WireServer() as server:
        client = connect(server.url)
    with pytest.raises(ConnectFailed, match=r"no policy server at .* within 0\.3 s: connection refused"):
        client.infer(observation(), timeout=0.3)
    client.close()


def test_the_timeout_holds_for_waiting_for_another_threads_call() -> None:
    with WireServer(slow_answer) as server, PolicyClient(server.url) as client:
        other = threading.Thread(target=client.infer, args=(observation(1, session_id="slow"),))
        other.start()
        while not server.messages:
            time.sleep(0.01)
        with pytest.raises(ReplyTimeout, match="other calls of this client"):
            client.infer(observation(2), timeout=0.05)
        other.join()
        assert len(server.messages) == 1
        assert len(server.headers) == 1


@both_clients
def test_a_reply_over_the_limit_breaks_the_connection_and_says_so(connect: Connect) -> None:
    with (
        WireServer(lambda message, dialect: bytes(20_000)) as server,
        connect(server.url, max_size=10_000, resend=True) as client,
    ):
        with pytest.raises(ReplyLost, match=r"larger than the 10000 bytes allowed \(max_size\)"):
            client.infer(observation())
        assert len(server.messages) == 1


@both_clients
def test_a_handshake_over_the_limit_is_refused(connect: Connect) -> None:
    too_large = bytes(client_protocol.LARGEST_REPLY + 1)
    with (
        WireServer(first_frame=too_large) as server,
        pytest.raises(ConnectFailed, match=r"larger than the 16777216 bytes allowed \(max_size\)"),
    ):
        connect(server.url)


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await silence()


async def says_nothing_after_the_upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await upgrade(reader, writer)
    await silence()


async def drips_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for byte in b"HTTP/1.1 101 Switching Protocols\r\n" * 100:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.05)


async def drips_its_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await upgrade(reader, writer)
    for byte in HANDSHAKE_FRAME:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.05)


async def drips_pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await upgrade(reader, writer)
    writer.write(frame(b"\x81", fin=False))
    while True:
        writer.write(frame(b"a", Opcode.CONT, fin=False))
        await asyncio.sleep(0.05)


async def pours_empty_pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await upgrade(reader, writer)
    writer.write(frame(b"\x81", fin=False))
    while True:
        writer.write(1000 * frame(b"", Opcode.CONT, fin=False))
        await writer.drain()


async def pours_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\n")
    while True:
        writer.write(b"Header: value\r\n" * 1000)
        await writer.drain()


async def sends_garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def pours_garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(bytes(2**16))
        await writer.drain()


async def breaks_the_protocol(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await upgrade(reader, writer)
    writer.write(b"\xff" * 20)
    await reader.read(100)


@both_clients
@pytest.mark.parametrize(
    ("talk", "why"),
    [
        (says_nothing, r"within 1 s: timed out"),
        (drips_http, r"within 1 s: timed out"),
        (says_nothing_after_the_upgrade, r"within 1 s: it accepted the connection but sent no handshake"),
        (drips_its_handshake, r"within 1 s: it accepted the connection but sent no handshake"),
        (drips_pieces, r"within 1 s: it accepted the connection but sent no handshake"),
        (pours_empty_pieces, r"cannot connect to .*: .*(pieces|fragments)"),
        (sends_garbage, r"cannot connect to .*: did not receive a valid HTTP response"),
        (pours_headers, NOT_HTTP),
        (pours_garbage, NOT_HTTP),
        (breaks_the_protocol, r"cannot connect to .*: its message breaks the WebSocket protocol"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_handshake_fails_in_time_and_says_why(connect: Connect, talk: Talk, why: str) -> None:
    with HostileServer(talk) as server:
        start = time.monotonic()
        with pytest.raises(ConnectFailed, match=why):
            connect("127.0.0.1", server.port, connect_timeout=1 if "within 1 s" in why else 30)
        assert time.monotonic() - start < 30


@both_clients
@pytest.mark.parametrize("first", [{}, {"hello": 1}, {"actions": np.zeros((24, 8))}, [1], 7], ids=repr)
def test_a_first_message_that_is_no_handshake_is_refused(connect: Connect, first: object) -> None:
    with (
        WireServer(first_frame=encode(first, Dialect.OPENPI)) as server,
        pytest.raises(
            ConnectFailed, match=r"did not begin with a handshake: .*(not a map|has no action_space, image_res)"
        ),
    ):
        connect(server.url)


@both_clients
def test_pieces_without_end_are_no_reply(connect: Connect) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await upgrade(reader, writer)
        writer.write(HANDSHAKE_FRAME)
        await reader.read(100)
        writer.write(frame(b"\x81", fin=False))
        while True:
            writer.write(1000 * frame(b"", Opcode.CONT, fin=False))
            await writer.drain()

    with (
        HostileServer(talk) as server,
        connect("127.0.0.1", server.port) as client,
        pytest.raises(ReplyLost, match=r"pieces|fragments"),
    ):
        client.infer(observation())


@both_clients
@pytest.mark.parametrize("connect_timeout", [None, 30])
def test_the_handshake_is_waited_for_on_one_connection(
    connect: Connect, connect_timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_protocol, "_ATTEMPT_SECONDS", 0.5)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await upgrade(reader, writer)
        await asyncio.sleep(1.5)  # loading, for longer than an attempt may take
        writer.write(HANDSHAKE_FRAME)
        await silence()

    with HostileServer(talk) as server:
        with connect("127.0.0.1", server.port, connect_timeout=connect_timeout) as client:
            assert client.get_server_metadata() == HANDSHAKE
        assert server.connections == 1


@both_clients
def test_a_link_that_dies_while_the_server_loads_is_noticed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_protocol, "_PING_SECONDS", 0.2)
    monkeypatch.setattr(client_protocol, "_PONG_SECONDS", 0.2)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await upgrade(reader, writer)
        if server.connections == 1:
            await silence()  # answers no ping
        writer.write(HANDSHAKE_FRAME)
        await silence()

    with HostileServer(talk) as server:
        connect("127.0.0.1", server.port).close()
        assert server.connections == 2
    assert "the link is dead, no ping was answered" in caplog.text


@both_clients
def test_a_load_that_fails_is_told_with_its_reason(connect: Connect) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await upgrade(reader, writer)
        writer.write(frame((1011).to_bytes(2, "big") + b"the checkpoint has no weights", Opcode.CLOSE))
        await reader.read(100)

    with HostileServer(talk) as server, pytest.raises(ConnectFailed, match="the checkpoint has no weights"):
        connect("127.0.0.1", server.port)


@both_clients
def test_a_proxy_before_a_server_that_is_not_up_is_a_reason_to_wait(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server.connections == 1:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            return
        await upgrade(reader, writer)
        writer.write(HANDSHAKE_FRAME)
        await silence()

    with HostileServer(talk) as server:
        connect("127.0.0.1", server.port).close()
    waits = [record for record in caplog.records if "waiting for the policy server" in record.message]
    assert [record.levelno for record in waits] == [logging.WARNING]
    assert "HTTP 502 Bad Gateway" in waits[0].message


@both_clients
def test_a_text_without_end_is_cut_by_the_limit(connect: Connect) -> None:
    with (
        WireServer(lambda message, dialect: "no " * 3000) as server,
        connect(server.url, max_size=10_000) as client,
        pytest.raises(PolicyError, match=r"^no no"),
    ):
        client.infer(observation())
