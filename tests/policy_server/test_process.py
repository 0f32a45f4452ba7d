"""`python -m policy_server` as a supervisor sees it: its lines, its signals, its exit codes, its manners under load."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from websockets.exceptions import ConnectionClosed

from policy_server.server import PolicyServer
from policy_server.settings import ServerSettings
from protocol.robot import Observation
from tests.process import ENVIRONMENT, LOADING, TINY, server
from tests.serving import SECONDS, Gate, Robot, WatchedPolicy, observation


async def test_one_line_says_that_it_is_ready_where_and_what_the_weights_are() -> None:
    with server(*TINY) as running:
        url = running.url()
        line = running.line("ready")
        assert url in line
        assert '"tiny" has synthetic weights, not trained ones' in line
        async with await Robot.connect(url) as robot:
            assert (await robot.ask(observation()))["actions"].shape == (24, 8)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_the_running_and_the_waiting_call_be_answered_then_closes_with_1001(number: int) -> None:
    with server("1.5", *TINY, module="tests.light_server") as running:
        url = running.url()
        running.line("ready")
        robots = [await Robot.connect(url) for _ in range(3)]
        for robot in robots[:2]:
            await robot.send(observation())
        await asyncio.sleep(0.5)
        running.process.send_signal(number)
        running.process.send_signal(number)  # an echo, as supervisors send it, not a second order
        for robot in robots[:2]:
            assert (await robot.reply())["actions"].shape == (24, 8)
        for robot in robots:
            with pytest.raises(ConnectionClosed) as closed:
                await robot.websocket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001
        assert await asyncio.to_thread(running.end) == 0
        assert "Traceback" not in "".join(running.log)
        assert running.log[-1].endswith(" stopped\n")


async def test_draining_ends_at_its_timeout_and_says_so() -> None:
    with server("60", "--drain-timeout", "0.5", *TINY, module="tests.light_server") as running:
        url = running.url()
        running.line("ready")
        async with await Robot.connect(url) as robot:
            await robot.send(observation())
            await asyncio.sleep(0.5)
            told_at = time.monotonic()
            running.process.terminate()
            assert "shutting down" in await robot.reply()
            assert await asyncio.to_thread(running.end) == 1
            assert 0.4 < time.monotonic() - told_at < 10
    assert "calls not done in time" in "".join(running.log)


async def test_a_second_order_ends_the_process_at_once() -> None:
    with server("60", *TINY, module="tests.light_server") as running:
        url = running.url()
        running.line("ready")
        async with await Robot.connect(url) as robot:
            await robot.send(observation())
            await asyncio.sleep(0.5)
            running.process.terminate()
            await asyncio.sleep(1)
            assert running.process.poll() is None
            running.process.terminate()
            assert await asyncio.to_thread(running.end, 5) == 128 + signal.SIGTERM


async def test_a_signal_while_loading_is_obeyed() -> None:
    with server(*TINY) as running:
        running.url()
        running.process.terminate()
        assert await asyncio.to_thread(running.end, 10) == 0


NAMESPACES = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_signal_while_modules_are_imported_is_obeyed_by_a_containers_first_process_too(
    is_first: bool, number: int
) -> None:
    if is_first and (shutil.which("unshare") is None or subprocess.run([*NAMESPACES, "true"]).returncode != 0):
        pytest.skip("no process namespaces here")
    command = [sys.executable, "-v", "-m", "policy_server", *TINY]  # -v: each import is told
    with subprocess.Popen(
        [*(NAMESPACES if is_first else ()), *command], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        assert any("policy_server.process" in line or "numpy" in line for line in lines)
        target = process.pid
        if is_first:
            target = int(Path(f"/proc/{target}/task/{target}/children").read_text().split()[0])
        os.kill(target, number)
        assert not any("listening" in line for line in lines)
        assert process.wait(SECONDS) == 0


async def test_what_cannot_be_loaded_is_said_in_one_line_with_exit_code_2() -> None:
    with server("--checkpoint", "/no/such/checkpoint", "--port", "0") as running:
        assert await asyncio.to_thread(running.end, LOADING) == 2
    (line,) = [line for line in running.log if "ERROR" in line]
    assert "/no/such/checkpoint" in line
    assert "Traceback" not in "".join(running.log)


async def test_a_port_in_use_is_said_in_one_line_with_exit_code_2() -> None:
    with server("0", *TINY, module="tests.light_server") as first:
        port = first.url().rsplit(":", 1)[1]
        with server("--port", port) as second:
            assert await asyncio.to_thread(second.end) == 2
    (line,) = second.log
    assert f"port {port}" in line
    assert "in use" in line


async def test_the_engines_death_ends_the_process_with_its_reason() -> None:
    with server("die", *TINY, module="tests.light_server") as running:
        url = running.url()
        running.line("ready")
        async with await Robot.connect(url) as robot:
            assert "the engine died" in await robot.ask(observation())
            with pytest.raises(ConnectionClosed) as closed:
                await robot.websocket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1011
        assert await asyncio.to_thread(running.end) == 1
    assert [line for line in running.log if "ERROR" in line and "DeviceLost" in line]


async def test_an_engine_that_dies_while_draining_is_no_orderly_stop() -> None:
    gate = Gate()

    def before(session_id: str, asked: Observation) -> None:
        gate(session_id, asked)
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    policy = await asyncio.to_thread(WatchedPolicy, before)
    server = PolicyServer(ServerSettings(port=0), lambda report: policy)  # type: ignore[arg-type, return-value]
    await server.start()
    await server.ready()
    async with await Robot.connect(server) as robot:
        await robot.send(observation(prompt="hold"))
        await gate.entered()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0.05)
        gate.open()
        assert await robot.reply() == "not served: the engine died"
        assert await stopping is False
    assert isinstance(server.engine_error, torch.AcceleratorError)


async def test_during_a_long_call_pings_and_healthz_are_answered() -> None:
    """The engine computes all the while, in a process of its own, as it does in a lab."""
    with server("5", *TINY, module="tests.light_server") as running:
        url = running.url()
        running.line("ready")
        robots = [await Robot.connect(url, ping_interval=None) for _ in range(4)]
        await robots[0].send(observation(4))
        answered = asyncio.ensure_future(robots[0].websocket.recv())
        rounds = 0
        while not answered.done():
            async with asyncio.timeout(SECONDS):
                for robot in robots:
                    await (await robot.websocket.ping())
                reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: test\r\n\r\n")
                assert b" 200 " in await reader.readline()
                writer.close()
            rounds += 1
            await asyncio.sleep(0.05)
        assert rounds >= 3, "the loop that answers does not wait for the call"
        for robot in robots:
            await robot.close()


SERVE = """
import gc, sys
from collections import deque
from policy_server.process import freeze_gc

loaded = [[] for _ in range(400_000)]
gc.collect()
if sys.argv[1] == "kept":
    freeze_gc()
full = gc.get_stats()[2]["collections"]
recent = deque(maxlen=5_000)
for _ in range(90_000):
    connection = []
    connection.append(connection)
    recent.append(connection)
print(gc.get_stats()[2]["collections"] - full)
"""


@pytest.mark.parametrize(("how", "least", "most"), [("kept", 4, 100), ("seen", 0, 0)])
def test_full_collections_come_early_once_what_is_loaded_is_out_of_sight(how: str, least: int, most: int) -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", SERVE, how], capture_output=True, text=True, timeout=60, cwd=root)
    assert run.returncode == 0, run.stderr
    assert least <= int(run.stdout) <= most
