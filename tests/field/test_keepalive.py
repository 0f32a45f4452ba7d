"""A robot is gone when its link is, not when it is busy; and a link that died in silence gives its session up."""

import asyncio
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from websockets.frames import Frame, Opcode

from policy_server import link
from tests.policy_server.test_load import open_websocket
from tests.serving import Gate, Robot, observation, serving, until, wire

ROOT = Path(__file__).parents[2]
SILENCE = 75

# Each makes a call, is deaf for a while, and makes another on the same connection.
ROBOTS = {
    "an asyncio client that computes": """
        import asyncio
        from websockets.asyncio.client import connect
        async def main():
            async with connect(url, compression=None, max_size=None, ping_interval=60, ping_timeout=600) as websocket:
                await websocket.recv()
                for call in range(2):
                    await websocket.send(frame)
                    check(await websocket.recv())
                    if call == 0:
                        time.sleep(silence)
        asyncio.run(main())
    """,
    "a stopped process": """
        from openpi_client.websocket_client_policy import WebsocketClientPolicy
        client = WebsocketClientPolicy(url)
        for call in range(2):
            client._ws.send(frame)
            check(client._ws.recv())
            if call == 0:
                print("stop me", flush=True)
                sys.stdin.readline()
    """,
    "a client that answers pings only when it receives": """
        from websockets.client import ClientProtocol
        from websockets.uri import parse_uri
        import socket
        protocol = ClientProtocol(parse_uri(url), max_size=None)
        where = parse_uri(url)
        sock = socket.create_connection((where.host, where.port))
        protocol.send_request(protocol.connect())
        def receive():
            while True:
                for data in protocol.data_to_send():
                    sock.sendall(data)
                for event in protocol.events_received():
                    if getattr(event, "opcode", None) in (1, 2):
                        return event.data
                protocol.receive_data(sock.recv(2**16))
        receive()
        for call in range(2):
            protocol.send_binary(frame)
            check(receive())
            if call == 0:
                time.sleep(silence)
    """,
}
COMMON = """
    import sys, time
    from tests.serving import observation, wire
    url, silence = sys.argv[1], float(sys.argv[2])
    frame = wire.packb(observation(session_id=sys.argv[3]))
    def check(reply):
        reply = wire.unpackb(reply)
        print("call", reply["episode"]["call"], flush=True)
"""


async def robot_process(kind: str, url: str) -> list[str]:
    """Run a robot to its end; the lines that it printed."""
    program = textwrap.dedent(COMMON) + textwrap.dedent(ROBOTS[kind])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, url, str(SILENCE), kind,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    lines = []
    async for line in process.stdout:
        if line == b"stop me\n":
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(SILENCE)
            process.send_signal(signal.SIGCONT)
            process.stdin.write(b"go on\n")
        else:
            lines.append(line.decode().strip())
    assert await process.wait() == 0
    return lines


@pytest.mark.slow
async def test_75_seconds_of_silence_lose_nobody() -> None:
    """With the defaults; the second call continues the episode, on the connection of the first."""
    async with serving() as (server, policy):
        printed = await asyncio.gather(*(robot_process(kind, server.url) for kind in ROBOTS))
    assert printed == [["call 1", "call 2"]] * len(ROBOTS)
    assert sum(event.startswith("end") for event in policy.events) == 0


async def test_an_observation_that_uploads_for_longer_than_the_timeout_is_taken() -> None:
    """Bytes that arrive are life; pings are not answered meanwhile."""
    async with serving(ping_interval=0.1, ping_timeout=2) as (server, policy):
        slow = await asyncio.to_thread(open_websocket, server.port)
        message = Frame(Opcode.BINARY, wire.packb(observation())).serialize(mask=True)
        step = len(message) // 30 + 1
        for start in range(0, len(message), step):
            slow.sendall(message[start : start + step])
            await asyncio.sleep(0.1)
        await until(lambda: policy.events == ["infer connection 1"])
        slow.close()


async def test_a_robot_from_which_nothing_at_all_comes_is_cut_off_in_the_end() -> None:
    async with serving(ping_interval=0.1, ping_timeout=0.3, session_ttl=0) as (server, policy):
        silent = await asyncio.to_thread(open_websocket, server.port)
        silent.sendall(Frame(Opcode.BINARY, wire.packb(observation())).serialize(mask=True))
        async with await Robot.connect(server) as robot:
            await until(lambda: "end connection 1" in policy.events)
            assert "actions" in await robot.ask(observation())
        silent.close()


async def test_the_kernel_finds_out_about_machines_that_are_gone() -> None:
    async with serving() as (server, _), await Robot.connect(server):
        (connection,) = server._listener.all_connections
        tcp = connection.transport.get_extra_info("socket")
        assert tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000


@asynccontextmanager
async def cable(port: int) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """A port that leads to another until it is cut, after which nothing passes and nobody is told."""
    cut = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            if not cut.is_set():
                writer.write(data)

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, far_writer))
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))

    listener = await asyncio.start_server(lead, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1], cut
    finally:
        for writer in writers:
            writer.transport.abort()
        listener.close()


async def test_a_link_that_died_in_silence_gives_its_session_to_who_comes_with_the_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "PROBE_SECONDS", 0.5)
    async with serving() as (server, policy), cable(server.port) as (port, cut):
        lost = await Robot.connect(f"ws://127.0.0.1:{port}", ping_interval=None)
        assert (await lost.ask(observation(session_id="a")))["episode"]["call"] == 1
        async with await Robot.connect(server) as stranger:
            assert "is in use by another connection" in await stranger.ask(observation(session_id="a"))
            for session_id in ("b", "c"):
                assert "actions" in await lost.ask(observation(session_id=session_id))
            cut.set()
            reply = await stranger.ask(observation(session_id="a"))
            assert reply["episode"] == {"call": 2, "window": "continued", "resumed": True}
            assert not any(event.startswith("end") for event in policy.events)
            assert server.sessions.waiting == 2, "what else the dead one held is free as well"
            assert await stranger.ask({"endpoint": "reset", "session_id": "b"}) == "reset successful"
            reply = await stranger.ask(observation(session_id="b"))
            assert reply["episode"] == {"call": 1, "window": "reset", "resumed": False}
        lost.websocket.transport.abort()


async def test_the_waiting_call_of_a_link_that_died_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PROBE_SECONDS", 0.5)
    gate = Gate()
    async with serving(gate) as (server, _), cable(server.port) as (port, cut):
        lost = await Robot.connect(f"ws://127.0.0.1:{port}", ping_interval=None)
        await lost.ask(observation(session_id="a"))
        async with await Robot.connect(server) as other, await Robot.connect(server) as back:
            await other.send(observation(prompt="hold"))
            await gate.entered()
            await lost.send(observation(session_id="a"))
            await until(lambda: server.engine.stats().waiting == 1)
            cut.set()
            await back.send(observation(session_id="a"))
            await until(lambda: len(server._conversations) == 2 and server.engine.stats().waiting == 1)
            gate.open()
            assert (await back.reply())["episode"] == {"call": 2, "window": "continued", "resumed": True}
            await other.reply()
        lost.websocket.transport.abort()


async def test_a_robot_whose_call_is_in_work_keeps_its_session() -> None:
    """It answers pings while it waits."""
    async with serving() as (server, _), await Robot.connect(server) as robot, await Robot.connect(server) as other:
        await robot.send(observation(session_id="a"))
        await until(lambda: server.engine.stats().running or server.sessions.connected == 1)
        assert "is in use" in await other.ask(observation(session_id="a"))
        assert (await robot.reply())["episode"]["call"] == 1
