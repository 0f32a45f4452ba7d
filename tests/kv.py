"""A small KV cache for tests that need no model."""

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from kv_cache.attention import AttentionPlan
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


def leases(cache: KVCache, sessions: list[SessionKV], rng: random.Random) -> Iterator[tuple[AttentionPlan, int, int]]:
    """Plans of sessions whose windows grow in turns of any order, with (current tokens, session index)."""
    for _ in range(60):
        index = rng.randrange(len(sessions))
        session, commit = sessions[index], rng.random() < 0.5
        with cache.call(session):
            if session.resident_frames >= 7:
                cache.restart(session)
            frames = rng.choice((1, 2))
            with cache.lease(session, frames, commit) as plan:
                yield plan, frames * cache.geometry.frame_tokens + 3 * (not commit), index


def check_against_float64(cache: KVCache, sessions: int, device: torch.device, dtype: torch.dtype, tolerance: float):
    """Attend through random plans and compare with dense float64 windows kept beside; returns windows by kind."""
    rng, geometry = random.Random(7), cache.geometry
    generator = torch.Generator(device).manual_seed(7)
    heads, width = geometry.heads, geometry.head_dim
    windows: dict[int, list[tuple[Tensor, Tensor]]] = {}
    kinds = {True: 0, False: 0}
    members = [cache.session(index) for index in range(sessions)]
    for plan, length, index in leases(cache, members, rng):
        branches = len(plan.table)
        q, k, v = (
            torch.randn(branches, length, heads, width, generator=generator, device=device).to(dtype) for _ in range(3)
        )
        layer = cache.paged.layers[1]
        before = layer.k.clone()
        out = layer.attend(q, k, v, plan)
        resident = cache.session(index).resident_frames
        dense = windows.setdefault(index, [])
        dense = windows[index] = dense[len(dense) - resident :] if resident else []
        keys = torch.cat([frame[0] for frame in dense] + [k], dim=1).double()
        values = torch.cat([frame[1] for frame in dense] + [v], dim=1).double()
        weights = torch.einsum("bqhd,bkhd->bhqk", q.double(), keys).div(width**0.5).softmax(-1)
        reference = torch.einsum("bhqk,bkhd->bqhd", weights, values)
        assert out.shape == q.shape
        assert (out.double() - reference).abs().max() < tolerance
        written = {block for block in range(len(before)) if not torch.equal(layer.k[block], before[block])}
        assert written == set(plan.stored.flatten().tolist())
        if plan.stored.numel():
            size = geometry.frame_tokens
            dense += [(k[:, i : i + size], v[:, i : i + size]) for i in range(0, length, size)]
        kinds[True] += plan.views
        kinds[False] += branches - plan.views
    return kinds
