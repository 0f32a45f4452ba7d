"""Calls made before the first robot comes, so that it waits for no compilation, tuning or capture.

They go the way that a robot's calls go, through every fill of the window and its restart, and leave no trace.
"""

from collections.abc import Callable

import numpy as np

from engine.policy import Policy
from engine.robot.embodiment import Embodiment
from protocol.robot import Observation

_SESSION = "warm-up"


def warm_up(policy: Policy, report: Callable[[str], None], decode: bool) -> None:
    """Walk the window; the policy's sessions, pool and counters are then as if nothing had happened.

    decode: whether episodes are recorded, which decodes video. Raises whatever a call raises.
    """
    try:
        calls = policy.calls_per_window + 1
        for call in range(calls):
            report(f"warming up: call {call + 1} of {calls}")
            chunk = policy.infer(_SESSION, _observation(policy.embodiment))
        if decode:
            report("warming up: decoding video")
            for _ in policy.decode([chunk.video_latents]):
                pass
    finally:
        policy.end_session(_SESSION)
        policy.reset_counters()


def _observation(embodiment: Embodiment) -> Observation:
    """Grey pictures of the release's size, zeros and the default prompt."""
    return Observation(
        views={view.name: np.full((4, 180, 320, 3), 127, np.uint8) for view in embodiment.views},
        state={vector.name: np.zeros(vector.size, np.float32) for vector in embodiment.state},
        prompt="",
    )
