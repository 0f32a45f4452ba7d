"""What a call needs beside weights and K/V, found by making one before the KV cache is sized."""

import torch

from engine.rollout import Rollout
from engine.session import Session
from kv_cache.cache import SessionKV

_PROMPT = "trial"


def trial_calls(rollout: Rollout, kv: SessionKV) -> None:
    """Make the two kinds of call there are, a restart and one that continues, with grey frames."""
    config = rollout.config
    frames = torch.full((4, 2 * config.view_height, 2 * config.view_width, 3), 127, dtype=torch.uint8)
    tokens, mask = rollout.tokenize(_PROMPT)
    session = Session(kv)
    for _ in range(2):
        rollout.call(session, frames, tokens, mask, torch.zeros(config.max_state_dim))


def activation_bytes(rollout: Rollout, kv: SessionKV) -> int:
    """Most bytes that calls take for a while on the rollout's CUDA device, beyond what is held all the time."""
    held = torch.cuda.memory_allocated(rollout.device)
    torch.cuda.reset_peak_memory_stats(rollout.device)
    trial_calls(rollout, kv)
    peak = torch.cuda.max_memory_allocated(rollout.device) - held
    torch.cuda.empty_cache()
    return peak
