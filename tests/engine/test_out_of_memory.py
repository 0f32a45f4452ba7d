"""Calls that find no device memory: caches are freed, a second try, and when readiness ends and returns."""

import time
from collections.abc import Callable

import pytest
import torch

from tests.engine.scripted import SECONDS, call


def out_of_memory_in_calls(*numbers: int) -> Callable[[str], None]:
    counted = iter(range(1, 100))

    def script(session_id: str) -> None:
        if next(counted) in numbers:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return script


def test_out_of_memory_frees_the_caches_and_tries_once_more(start) -> None:
    worker, policy = start(out_of_memory_in_calls(1, 4, 5))
    call(worker, "a").result(SECONDS)
    assert policy.events == ["infer a", "free caches", "infer a"]
    call(worker, "a").result(SECONDS)
    with pytest.raises(torch.OutOfMemoryError):
        call(worker, "a").result(SECONDS)
    assert worker.not_ready is None


def test_three_calls_in_a_row_without_memory_end_readiness_until_one_succeeds(start) -> None:
    worker, _ = start(out_of_memory_in_calls(1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12))
    for failures, ready in ((2, True), (0, True), (2, True), (1, False), (0, True)):
        for _ in range(failures):
            with pytest.raises(torch.OutOfMemoryError):
                call(worker, "a").result(SECONDS)
        if failures == 0:
            call(worker, "a").result(SECONDS)
        assert (worker.not_ready is None) == ready, worker.not_ready
    with pytest.raises(TimeoutError):
        worker.finished.result(0)


def test_readiness_returns_in_time_without_a_call_and_the_next_one_without_memory_ends_it(start, monkeypatch) -> None:
    """A balancer sends nobody to a server that is not ready, so no call would come to succeed."""
    worker, _ = start(out_of_memory_in_calls(*range(1, 9)))
    monkeypatch.setattr("engine.device_faults._SECONDS_WITHOUT_MEMORY", 0.5)
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            call(worker, "a").result(SECONDS)
    deadline = time.monotonic() + SECONDS
    while worker.not_ready is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    monkeypatch.setattr("engine.device_faults._SECONDS_WITHOUT_MEMORY", 1000.0)
    with pytest.raises(torch.OutOfMemoryError):
        call(worker, "a").result(SECONDS)
    assert worker.not_ready == "4 calls in a row ran out of device memory"
    call(worker, "a").result(SECONDS)
    assert worker.not_ready is None
