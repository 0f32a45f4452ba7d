"""Calls made before the first robot comes: a profile run, by which the KV cache is sized, and the warm-up, so that the
robot waits for no compilation, tuning or capture.

They go the way that a robot's calls go, through every fill of the window and its restart, and leave no trace.
"""

from collections.abc import Callable

import numpy as np
import torch

from engine.policy import Policy
from engine.robot.embodiment import Embodiment
from engine.rollout import Rollout
from engine.session import Session
from kv_cache.cache import SessionKV
from protocol.robot import Observation

_SESSION = "warm-up"
_PROFILE_RUN = "profile run"


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


def profile_calls(rollout: Rollout, kv: SessionKV, decode: bool) -> None:
    """Make the two kinds of call there are, a restart and one that continues, with grey frames.

    decode: whether meanwhile a video is being decoded, as when episodes are recorded.
    """
    config = rollout.config
    latents = torch.zeros(config.vae.z_dim, 3, config.latent_height, config.latent_width)
    pieces = rollout.decode(latents) if decode else iter(())
    for _ in zip(range(2), pieces, strict=False):  # from here on its state is held on the device
        pass
    frames = torch.full((4, 2 * config.view_height, 2 * config.view_width, 3), 127, dtype=torch.uint8)
    tokens, mask = rollout.tokenize(_PROFILE_RUN)
    session = Session(kv)
    for _ in range(2):
        rollout.call(session, frames, tokens, mask, torch.zeros(config.max_state_dim))


def activation_bytes(rollout: Rollout, kv: SessionKV, decode: bool) -> int:
    """Most bytes that calls take for a while on the rollout's CUDA device, beyond what is held all the time.

    decode: as for `profile_calls`.
    """
    held = torch.cuda.memory_allocated(rollout.device)
    torch.cuda.reset_peak_memory_stats(rollout.device)
    profile_calls(rollout, kv, decode)
    return torch.cuda.max_memory_allocated(rollout.device) - held
