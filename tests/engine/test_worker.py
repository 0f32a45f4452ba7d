"""The engine's thread alone: order, bounds, faults and the end. Its policy is a script: no model matters here."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch

from engine.worker import EngineBusy, EngineStopped, EngineWorker
from tests.engine.scripted import SECONDS, Gate, ScriptedPolicy, call, hold, observation


def test_jobs_run_in_order_on_one_thread_of_their_own(start) -> None:
    gate = Gate()
    worker, policy = start(gate)
    held = hold(worker, gate)
    call(worker, "b")
    worker.end_session("a")
    last = call(worker, "a")
    queued_at = time.monotonic()
    time.sleep(0.02)
    waited = time.monotonic() - queued_at
    gate.opened.set()
    chunk = last.result(SECONDS)
    assert policy.events == ["infer gate", "end a", "infer b", "infer a"]
    assert len(policy.threads) == 1
    assert threading.get_ident() not in policy.threads
    assert chunk.actions.shape == (24, 8)
    assert chunk.seconds["wait"] >= waited
    assert held.result().seconds["wait"] >= 0


def test_the_end_of_a_session_is_the_end_of_its_call_that_waits(start) -> None:
    """Whoever asked has gone, and a call that ran after the end would be an episode that nobody ends."""
    gate = Gate()
    worker, policy = start(gate)
    hold(worker, gate)
    waiting = call(worker, "a")
    ended = worker.end_session("a")
    with pytest.raises(EngineStopped, match="its session has ended"):
        waiting.result(SECONDS)
    gate.opened.set()
    ended.result(SECONDS)
    assert policy.events == ["infer gate", "end a"]


def test_times_tell_waiting_from_running(start) -> None:
    gate = Gate()
    worker, _ = start(gate)
    held = hold(worker, gate)
    waited = call(worker, "a")
    with pytest.raises(TimeoutError):
        waited.result(0.2)
    gate.opened.set()
    assert held.result(SECONDS).seconds["infer"] >= 0.2
    assert waited.result(SECONDS).seconds["wait"] >= 0.2
    assert waited.result().seconds["infer"] < 0.2


def test_the_queue_is_bounded_for_calls_and_not_for_ends(start) -> None:
    gate = Gate()
    worker, policy = start(gate, max_queue=2)
    hold(worker, gate)
    call(worker, "a"), call(worker, "b")
    with pytest.raises(EngineBusy, match="2 calls are waiting"):
        call(worker, "c")
    ended = [worker.end_session(name) for name in "cdef"]
    assert worker.stats().waiting == 2
    gate.opened.set()
    for each in ended:
        each.result(SECONDS)
    call(worker, "c").result(SECONDS)
    assert policy.events[-1] == "infer c"


def test_a_call_cancelled_in_the_queue_is_never_run_and_gives_its_place_and_memory_back(start) -> None:
    gate = Gate()
    worker, policy = start(gate, max_queue=1)
    hold(worker, gate)
    seen = observation()
    images = weakref.ref(seen.views["wrist"])
    cancelled = worker.infer("gone", seen)
    del seen
    assert cancelled.cancel()
    del cancelled
    gc.collect()
    assert images() is None
    kept = call(worker, "kept")
    gate.opened.set()
    kept.result(SECONDS)
    assert policy.events == ["infer gate", "infer kept"]


def test_a_running_call_cannot_be_cancelled(start) -> None:
    gate = Gate()
    worker, _ = start(gate)
    held = hold(worker, gate)
    assert not held.cancel()
    gate.opened.set()
    held.result(SECONDS)


def test_a_failed_call_fails_alone_and_its_locals_are_let_go(start) -> None:
    held: list[weakref.ref] = []

    def script(session_id: str) -> None:
        if session_id == "bad":
            tensor = np.zeros(1000)
            held.append(weakref.ref(tensor))
            raise ValueError("bad luck")

    worker, _ = start(script)
    failed = call(worker, "bad")
    with pytest.raises(ValueError, match="bad luck"):
        failed.result(SECONDS)
    assert held[0]() is None
    call(worker, "good").result(SECONDS)
    assert worker.not_ready is None


def test_loading_reports_what_it_does_and_calls_wait_for_it() -> None:
    reported, proceed = threading.Event(), threading.Event()
    policy = ScriptedPolicy()

    def load(report: Callable[[str], None]) -> ScriptedPolicy:
        report("loading weights")
        reported.set()
        assert proceed.wait(SECONDS)
        return policy

    worker = EngineWorker(load, max_queue=1)  # type: ignore[arg-type]
    assert worker.not_ready == "starting"
    worker.start()
    assert reported.wait(SECONDS)
    assert worker.not_ready == "loading weights"
    assert worker.stats().policy is None
    early = call(worker, "early")
    proceed.set()
    early.result(SECONDS)
    assert worker.not_ready is None
    assert worker.loaded.result() == {"checkpoint": "scripted"}
    assert worker.stats().policy == "stats"
    worker.stop(drain=True)
    assert worker.join(SECONDS)


def test_a_failed_load_is_told_to_everyone() -> None:
    def load(report: Callable[[str], None]) -> ScriptedPolicy:
        raise ValueError("no such checkpoint")

    worker = EngineWorker(load, max_queue=1)  # type: ignore[arg-type]
    early = call(worker, "early")
    worker.start()
    for future in (worker.loaded, worker.finished):
        with pytest.raises(ValueError, match="no such checkpoint"):
            future.result(SECONDS)
    # Robots, and whoever asks without a key, learn that it died, not of what.
    with pytest.raises(EngineStopped, match=r"^the engine died$"):
        early.result(SECONDS)
    with pytest.raises(EngineStopped, match=r"^the engine died$"):
        call(worker, "late")
    assert worker.not_ready == "the engine died"


@pytest.mark.parametrize("error", [SystemExit(3), torch.AcceleratorError("an illegal memory access")])
def test_what_no_call_survives_ends_the_thread(error: BaseException) -> None:
    gate = Gate()

    def script(session_id: str) -> None:
        gate(session_id)
        raise error

    worker = EngineWorker(lambda report: ScriptedPolicy(script), max_queue=4)  # type: ignore[arg-type, return-value]
    worker.start()
    running = hold(worker, gate)
    waiting = call(worker, "a")
    gate.opened.set()
    for future in (running, waiting):
        with pytest.raises(EngineStopped, match="the engine died"):
            future.result(SECONDS)
    assert worker.finished.exception(SECONDS) is error
    with pytest.raises(EngineStopped):
        worker.end_session("a")
    assert worker.join(SECONDS)


@pytest.mark.parametrize("drain", [True, False])
def test_stop_finishes_the_running_call_and_drains_only_if_told(start, drain: bool) -> None:
    gate = Gate()
    worker, policy = start(gate)
    held = hold(worker, gate)
    waiting = call(worker, "a")
    worker.stop(drain=drain)
    with pytest.raises(EngineStopped, match="shutting down"):
        call(worker, "late")
    assert not worker.join(0)
    gate.opened.set()
    held.result(SECONDS)
    if drain:
        waiting.result(SECONDS)
    else:
        with pytest.raises(EngineStopped, match="shutting down"):
            waiting.result(SECONDS)
    assert worker.finished.result(SECONDS) is None
    assert policy.events == ["infer gate"] + ["infer a"] * drain


def test_draining_can_be_given_up(start) -> None:
    gate = Gate()
    worker, _ = start(gate)
    held = hold(worker, gate)
    waiting = call(worker, "a")
    worker.stop(drain=True)
    worker.stop(drain=False)
    with pytest.raises(EngineStopped):
        waiting.result(SECONDS)
    gate.opened.set()
    held.result(SECONDS)


def test_the_policy_is_dropped_with_the_thread() -> None:
    policy = ScriptedPolicy()
    alive = weakref.ref(policy)
    kept = [policy]
    worker = EngineWorker(lambda report: kept.pop(), max_queue=1)  # type: ignore[arg-type, return-value]
    del policy
    worker.start()
    worker.loaded.result(SECONDS)
    worker.stop(drain=True)
    assert worker.join(SECONDS)
    gc.collect()
    assert alive() is None


def test_a_waiter_that_gives_up_cancels_nothing_for_others() -> None:
    worker = EngineWorker(lambda report: ScriptedPolicy(), max_queue=1)  # type: ignore[arg-type, return-value]
    assert not worker.finished.cancel()
    assert not worker.loaded.cancel()
    with pytest.raises((TimeoutError, CancelledError)):
        worker.finished.result(0)
