"""A backend's attention against plain SDPA, before it serves: what runs on this card is seen on this card."""

from dataclasses import replace

import torch

from kv_cache.paged_kv import KVGeometry, PagedKV
from kv_cache.window import WindowPolicy

_ROUNDING = 2e-2  # of half precision, in which the backends round at different places


class BackendError(RuntimeError):
    """An attention backend gives other results than it should."""


@torch.inference_mode()
def check_backend(geometry: KVGeometry, policy: WindowPolicy, device: torch.device, backend: str) -> None:
    """Attend with every number of tokens that a forward has, over no window and over a full one in pieces.

    Kernels that choose their tiles at their first run choose them here, over the longest window that a forward sees.
    Raises BackendError where the result is not SDPA's, and whatever the backend itself raises.
    """
    size, frames, branches = geometry.frame_tokens, geometry.frames_per_forward, geometry.branches
    pool = PagedKV(replace(geometry, layers=1), 2 * branches * policy.capacity, device, backend)
    layer = pool.layers[0]
    layer.k.normal_(), layer.v.normal_()
    blocks = list(range(1, 2 * branches * policy.capacity, 2))
    for seen, current, registers in (
        (policy.capacity - 1, 1, 0),
        (0, 1, 0),
        (policy.capacity - frames, frames, 0),
        (policy.capacity - frames, frames, geometry.register_tokens),
    ):
        plan = pool.plan(
            [blocks[branch::branches][:seen] for branch in range(branches)], [[]] * branches, policy.capacity
        )
        shape = (3, branches, current * size + registers, geometry.heads, geometry.head_dim)
        q, k, v = torch.randn(shape, device=device, dtype=geometry.dtype)
        got = layer.attend(q, k, v, plan).float()
        expected = replace(layer, backend="sdpa").attend(q, k, v, plan).float()
        error = float(torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected))
        if not error <= _ROUNDING:
            raise BackendError(
                f"attention backend {backend!r} differs from SDPA by {error:.1e} of the result on {device}; "
                "--attention-backend sdpa does without it"
            )
