"""Calls that do not come back: noticed on another thread, told to whoever asks, and the end of the process."""

import asyncio
import threading
import time

import pytest
import torch
from websockets.exceptions import ConnectionClosed

from engine import watchdog
from engine.device_faults import is_lost
from engine.worker import EngineHung, EngineStopped, EngineWorker
from tests.engine.scripted import SECONDS, Gate, ScriptedPolicy, call, hold
from tests.process import TINY, server
from tests.serving import Robot, observation, until


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TICK_SECONDS": 0.01, "DOUBT_SECONDS": 0.05, "HUNG_SECONDS": 1.0}.items():
        monkeypatch.setattr(watchdog, name, value)


def worker_of(policy: ScriptedPolicy) -> EngineWorker:
    worker = EngineWorker(lambda report: policy, max_queue=4)  # type: ignore[arg-type, return-value]
    worker.start()
    worker.loaded.result(SECONDS)
    return worker


async def test_a_call_that_never_ends_ends_the_engine_though_its_thread_cannot_be_joined() -> None:
    gate = Gate()
    worker = worker_of(ScriptedPolicy(gate, slowest_call=0.01))
    held = hold(worker, gate)
    waiting = call(worker, "a")
    await until(lambda: worker.not_ready is not None)
    assert worker.not_ready == "a call has been running for 0 s, the slowest before it took 0.0 s"
    assert isinstance(worker.finished.exception(SECONDS), EngineHung)
    for future in (held, waiting):
        with pytest.raises(EngineStopped, match="the engine died"):
            future.result(SECONDS)
    with pytest.raises(EngineStopped):
        call(worker, "late")
    assert not worker.join(0)
    gate.opened.set()  # should it come back after all, it finds nothing to do
    assert worker.join(SECONDS)
    assert isinstance(worker.finished.exception(0), EngineHung)


async def test_a_call_that_is_slow_and_ends_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "HUNG_SECONDS", 60.0)
    gate = Gate()
    worker = worker_of(ScriptedPolicy(gate, slowest_call=0.01))
    held = hold(worker, gate)
    await until(lambda: worker.not_ready is not None)
    gate.opened.set()
    held.result(SECONDS)
    call(worker, "a").result(SECONDS)
    assert worker.not_ready is None
    worker.stop(drain=True)
    assert worker.join(SECONDS)


@pytest.mark.parametrize("slowest", [0.0, 60.0])
def test_what_may_take_that_long_is_not_doubted(slowest: float) -> None:
    """Where no call has been made, as without a warm-up, the first one may compile for as long as it wants."""
    gate = Gate()
    worker = worker_of(ScriptedPolicy(gate, slowest_call=slowest))
    held = hold(worker, gate)
    time.sleep(1.2)
    assert worker.not_ready is None
    gate.opened.set()
    held.result(SECONDS)
    worker.stop(drain=True)
    assert worker.join(SECONDS)


async def test_a_server_whose_device_hangs_says_so_and_leaves_with_1() -> None:
    with server("hang", *TINY, module="tests.light_server") as running:
        url = running.url()
        running.line("ready")
        robots = [await Robot.connect(url) for _ in range(2)]
        for robot in robots:
            await robot.send(observation())
        line = await asyncio.to_thread(running.line, "a call has been running for")
        assert "WARNING" in line
        for robot in robots:
            assert "the engine died" in await robot.reply()
            with pytest.raises(ConnectionClosed) as closed:
                await robot.websocket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1011
        assert await asyncio.to_thread(running.end) == 1
    assert [line for line in running.log if "ERROR" in line and "EngineHung: a call did not end in" in line]


def test_a_device_is_asked_whether_it_lives_whatever_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton, cuBLAS and cuDNN raise: nothing in the type tells a lost device from a call that cannot be made."""
    asked: list[int] = []

    def synchronize() -> None:
        asked.append(threading.get_ident())
        if is_dead:
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    for is_dead in (True, False):
        assert is_lost(RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")) is is_dead
        assert is_lost(ValueError("Triton Error [CUDA]: an illegal memory access was encountered")) is is_dead
    assert len(asked) == 4
    assert is_lost(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert not is_lost(torch.OutOfMemoryError("CUDA out of memory"))
    assert len(asked) == 4
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    is_dead = True
    assert not is_lost(RuntimeError("of a CPU"))


async def test_an_error_of_a_library_on_a_lost_device_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    def script(session_id: str) -> None:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", dead)
    worker = worker_of(ScriptedPolicy(script))
    with pytest.raises(EngineStopped, match="the engine died"):
        call(worker, "a").result(SECONDS)
    assert "cuDNN" in str(worker.finished.exception(SECONDS))
    assert worker.join(SECONDS)
