"""Fixtures of the engine's tests."""

from collections.abc import Callable, Iterator

import pytest

from engine.worker import EngineWorker
from tests.engine.scripted import SECONDS, Gate, ScriptedPolicy


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[EngineWorker, ScriptedPolicy]]]:
    started: list[tuple[EngineWorker, Gate | None]] = []

    def start_loop(script: Callable[[str], None] = lambda session_id: None, max_queue: int = 8):
        policy = ScriptedPolicy(script)
        worker = EngineWorker(lambda report: policy, max_queue=max_queue)  # type: ignore[arg-type, return-value]
        started.append((worker, script if isinstance(script, Gate) else None))
        worker.start()
        worker.loaded.result(SECONDS)
        return worker, policy

    yield start_loop
    for worker, gate in started:
        if gate is not None:
            gate.opened.set()
        worker.stop(drain=False)
        assert worker.join(SECONDS)
