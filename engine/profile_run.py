"""What a call needs beside weights and K/V, found by making one before the KV cache is sized."""

import torch

from engine.rollout import Rollout
from engine.session import Session
from kv_cache.cache import SessionKV

_PROMPT = "profile run"


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
    tokens, mask = rollout.tokenize(_PROMPT)
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
