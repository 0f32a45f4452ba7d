"""An engine with a policy that does what a test tells it, without a model."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engine.worker import EngineWorker
from protocol.robot import Observation

SECONDS = 10  # what no test should need


@dataclass
class Chunk:
    actions: np.ndarray
    seconds: dict[str, float]


@dataclass
class ScriptedPolicy:
    """Does what `script` says for each call, and writes down what happened on which thread."""

    script: Callable[[str], None] = lambda session_id: None
    events: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    slowest_call: float = 0.0

    def infer(self, session_id: str, observation: Observation) -> Chunk:
        self._note(f"infer {session_id}")
        self.script(session_id)
        return Chunk(np.zeros((24, 8), np.float32), {"denoise": 0.0})

    def end_session(self, session_id: str) -> None:
        self._note(f"end {session_id}")

    def free_caches(self) -> None:
        self._note("free caches")

    def info(self) -> dict[str, object]:
        return {"checkpoint": "scripted"}

    def stats(self) -> str:
        return "stats"

    def _note(self, event: str) -> None:
        self.events.append(event)
        self.threads.add(threading.get_ident())


class Gate:
    """Holds the engine inside a call until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, session_id: str) -> None:
        if session_id == "gate":
            self.entered.set()
            assert self.opened.wait(SECONDS)


def observation() -> Observation:
    views = {"wrist": np.zeros((1, 8, 8, 3), np.uint8)}
    return Observation(views, {}, "prompt")


def call(worker: EngineWorker, session_id: str) -> Future[Chunk]:
    return worker.infer(session_id, observation())


def hold(worker: EngineWorker, gate: Gate) -> Future[Chunk]:
    future = call(worker, "gate")
    assert gate.entered.wait(SECONDS)
    return future
