"""`python -m tests.light_server HINDRANCE FLAG...`: the server's process around a policy that needs no torch.

HINDRANCE: seconds that each call computes, "die" for an engine that does not survive its first call, "hang" for a call
that never comes back.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from benchmarks.serving.processes import Chunk, StubPolicy
from engine import watchdog
from policy_server.logs import configure_logging
from policy_server.process import run
from policy_server.settings import parse_settings


class DeviceLost(BaseException):
    """What no later call survives."""


class LightPolicy(StubPolicy):
    """Answers with zeros, or as its hindrance says."""

    slowest_call = 0.01

    def __init__(self, hindrance: str) -> None:
        super().__init__(0.0)
        self._hindrance = hindrance

    def infer(self, session_id: str, seen: object) -> Chunk:
        if self._hindrance == "die":
            raise DeviceLost("CUDA error: an illegal memory access was encountered")
        if self._hindrance == "hang":
            threading.Event().wait()
        end = time.monotonic() + float(self._hindrance)
        numbers = np.ones((300, 300))
        while time.monotonic() < end:  # as a model does: products without the interpreter, and Python between them
            numbers = np.tanh(numbers @ numbers)
            sum(range(1000))
        return super().infer(session_id, seen)

    def info(self) -> dict[str, object]:
        return {"trained": False}


def load(report: Callable[[str], None]) -> LightPolicy:
    report("loading nothing")
    return LightPolicy(sys.argv[1])


if __name__ == "__main__":
    if sys.argv[1] == "hang":  # and is noticed sooner than a busy machine would allow
        watchdog.DOUBT_SECONDS, watchdog.HUNG_SECONDS = 1.0, 4.0
        watchdog.DOUBT_TIMES = watchdog.HUNG_TIMES = 0
    configure_logging(level="info", as_json=False)
    sys.exit(asyncio.run(run(parse_settings(sys.argv[2:]), load)))  # type: ignore[arg-type]
