"""A small KV cache for tests that need no model."""

import torch

from kv_cache.cache import KVCache, SessionKV
from kv_cache.cross_kv import LayerKV
from kv_cache.paged_kv import KVGeometry
from kv_cache.sizing import plan_budget
from kv_cache.window import WindowPolicy

GEOMETRY = KVGeometry(
    layers=2, heads=2, head_dim=4, frame_tokens=6, frames_per_forward=2, register_tokens=3,
    text_tokens=5, image_tokens=4, dtype=torch.float32,
)  # fmt: skip
POLICY = WindowPolicy(9)
CPU = torch.device("cpu")


def bytes_for(sessions: int, geometry: KVGeometry = GEOMETRY, policy: WindowPolicy = POLICY) -> int:
    """What so many full sessions need at least: the permanent prompt, and each session's own."""
    return geometry.text_bytes + sessions * geometry.session_bytes(policy)


def make_cache(sessions: int, geometry: KVGeometry = GEOMETRY, policy: WindowPolicy = POLICY) -> KVCache:
    """A cache with room for exactly `sessions` sessions."""
    budget = plan_budget(geometry, policy, bytes_for(sessions, geometry, policy))
    assert budget.sessions == sessions
    return KVCache(geometry, policy, budget, CPU)


def layer_kv(tokens: int, geometry: KVGeometry = GEOMETRY) -> LayerKV:
    """Cross-attention K/V of the right size."""
    shape = (1, tokens, geometry.heads, geometry.head_dim)
    return tuple((torch.zeros(shape), torch.zeros(shape)) for _ in range(geometry.layers))


def run_call(cache: KVCache, session: SessionKV, prompt: bytes = b"prompt") -> bool:
    """A call as the rollout makes it, without the model; returns whether the window was restarted."""
    restart = session.resident_frames in (0, 7)
    with cache.call(session):
        if restart:
            cache.restart(session)
            cache.publish_image(session, lambda: layer_kv(cache.geometry.image_tokens))
        cache.publish_text(session, 0, prompt, lambda: layer_kv(cache.geometry.text_tokens))
        with cache.lease(session, 1 if restart else 2, commit=True):
            pass
        with cache.lease(session, 2):
            pass
    return restart
