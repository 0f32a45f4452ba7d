"""Connections that ask for nothing and file descriptors that run out disturb neither a start nor a robot."""

import asyncio
import contextlib
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.certificates import self_signed
from tests.process import TINY, server
from tests.serving import SECONDS, Robot, observation, serving, until


@contextlib.asynccontextmanager
async def silent(port: int, number: int) -> AsyncIterator[list[socket.socket]]:
    """So many connections on which nothing is said."""
    made: list[socket.socket] = []

    def connect() -> None:
        made.extend(socket.create_connection(("127.0.0.1", port), timeout=SECONDS) for _ in range(number))

    try:
        await asyncio.to_thread(connect)
        yield made
    finally:
        for each in made:
            each.close()


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def computing_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_tls_handshakes_in_progress_have_room_for_so_many_and_keep_nobody_out(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    trusting = ssl.create_default_context(cafile=str(cert))
    async with serving(max_connections=2, handshake_timeout=60, tls_cert=cert, tls_key=key) as (policy_server, _):
        before = descriptors(os.getpid())
        async with (
            await Robot.connect(policy_server, ssl=trusting) as first,
            silent(policy_server.port, 120) as strangers,
        ):
            own = len(strangers) + 2  # the robot's two ends
            await until(lambda: 32 <= descriptors(os.getpid()) - before - own <= 34)
            async with await Robot.connect(policy_server, ssl=trusting) as second:
                for robot in (first, second):
                    assert "actions" in await robot.ask(observation())
            await until(lambda: policy_server.sessions.connected == 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", policy_server.port, ssl=trusting)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n")
        metrics = (await reader.read()).decode()
        writer.close()
        cut = int(float(metrics.split("\ndreamzero_pending_cut_total ")[1].split()[0]))
        assert 88 <= cut <= 91
        await until(lambda: descriptors(os.getpid()) <= before + 2)


@pytest.mark.slow
async def test_silent_connections_beyond_all_bounds_end_no_start_under_tls(tmp_path: Path) -> None:
    """With no more descriptors than the settings need, while it loads and after."""
    cert, key = self_signed(tmp_path)
    trusting = ssl.create_default_context(cafile=str(cert))
    options = ("--tls-cert", str(cert), "--tls-key", str(key), "--max-connections", "32", "--handshake-timeout", "60")
    with server(*TINY, *options) as running:
        url = running.url()
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (720, 720))
        async with silent(int(url.rsplit(":", 1)[1]), 800):
            await asyncio.to_thread(running.line, "ready")
            async with await Robot.connect(url, ssl=trusting, open_timeout=SECONDS) as robot:
                assert "actions" in await robot.ask(observation())
        running.process.terminate()
        assert await asyncio.to_thread(running.end) == 0
    assert len(running.log) < 30, "".join(running.log)


async def test_the_limit_on_open_files_is_raised_to_what_the_settings_need() -> None:
    with server(*TINY, "--max-connections", "100", open_files=(100, 900)) as running:
        running.url()
        assert resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE) == (856, 900)
        running.process.terminate()
        assert await asyncio.to_thread(running.end) == 0


async def test_connections_that_the_system_has_no_descriptors_for_are_a_bad_setting() -> None:
    with server(*TINY, "--max-connections", "600", open_files=(100, 900)) as running:
        assert await asyncio.to_thread(running.end) == 2
    (line,) = running.log
    assert "max-connections: 1200 connections need 1856 open files, and the system allows 900" in line


@pytest.mark.slow
async def test_running_out_of_descriptors_costs_a_line_a_minute_and_no_robot_anything() -> None:
    with server(*TINY) as running:
        url = running.url()
        port = int(url.rsplit(":", 1)[1])
        await asyncio.to_thread(running.line, "ready")
        pid = running.process.pid
        async with await Robot.connect(url) as robot:
            assert "actions" in await robot.ask(observation())
            kept = resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid) + 1, 20000))
            async with silent(port, 30):
                await asyncio.to_thread(running.line, "cannot accept connections")
                computed = computing_seconds(pid)
                await asyncio.sleep(3)
                assert computing_seconds(pid) - computed < 1, "it waits for descriptors, and does not ask without end"
                assert "actions" in await robot.ask(observation())
            resource.prlimit(pid, resource.RLIMIT_NOFILE, kept)
            async with await Robot.connect(url, open_timeout=SECONDS) as second:
                assert "actions" in await second.ask(observation())
        running.process.terminate()
        assert await asyncio.to_thread(running.end) == 0
    assert len([line for line in running.log if "cannot accept" in line]) == 1
    assert len(running.log) < 30, "".join(running.log)
