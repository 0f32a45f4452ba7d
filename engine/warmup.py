"""Calls made before the first robot comes, so that it waits for no compilation, tuning or recording.

They go the way that a robot's calls go, through every fill of the window and its restart, and leave no trace.
"""

import logging
from collections.abc import Callable

import numpy as np

from engine.policy import Policy
from engine.robot.embodiment import Embodiment, Observation

logger = logging.getLogger(__name__)

_SESSION = "warm-up"


def warm_up(policy: Policy, report: Callable[[str], None], decode: bool, measure_guidance: bool) -> None:
    """Walk the window; the policy's sessions, pool and counters are then as if nothing had happened.

    decode: whether episodes are recorded, which decodes video. measure_guidance: try the guidance branches as one batch
    and one after the other, and leave the policy with the faster.
    Raises whatever a call raises.
    """
    try:
        if measure_guidance:
            _choose_guidance(policy, report)
        else:
            _walk(policy, report, "warming up")
        if decode:
            report("warming up: decoding video")
            chunk = policy.infer(_SESSION, _observation(policy.embodiment))
            for _ in policy.decode([chunk.video_latents]):
                pass
    finally:
        policy.end_session(_SESSION)
        policy.reset_counters()


def _walk(policy: Policy, report: Callable[[str], None], what: str) -> float:
    """One call at every fill of the window and the restart after it; returns the seconds that the DiT took."""
    seconds = 0.0
    calls = policy.calls_per_window + 1
    for call in range(calls):
        report(f"{what}: call {call + 1} of {calls}")
        spent = policy.infer(_SESSION, _observation(policy.embodiment)).seconds
        seconds += spent["prefill"] + spent["denoise"]
    policy.end_session(_SESSION)
    return seconds


def _choose_guidance(policy: Policy, report: Callable[[str], None]) -> None:
    """Leaves the policy with the faster way; where one of them fails, with the other, and raises what it raised."""
    seconds = {}
    for batched, name in ((False, "separate"), (True, "batched")):
        policy.set_batched(batched)
        try:
            _walk(policy, report, f"warming up guidance branches {name}")
            seconds[batched] = _walk(policy, report, f"measuring guidance branches {name}")
        except BaseException:
            policy.set_batched(not batched)
            raise
    if seconds[False] < seconds[True]:
        policy.set_batched(False)
        _walk(policy, report, "warming up guidance branches separate")
    logger.info("guidance branches: %.3f s separate, %.3f s batched", seconds[False], seconds[True])


def _observation(embodiment: Embodiment) -> Observation:
    """Grey pictures of the release's size, zeros and the default prompt."""
    return Observation(
        views={view.name: np.full((4, 180, 320, 3), 127, np.uint8) for view in embodiment.views},
        state={vector.name: np.zeros(vector.size, np.float32) for vector in embodiment.state},
        prompt="",
    )
