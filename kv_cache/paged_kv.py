"""The paged self-attention K/V: pool tensors, and the plan by which a forward writes and reads them."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kv_cache.attention import AttentionPlan, attend, store
from kv_cache.window import WindowPolicy


@dataclass(frozen=True)
class KVGeometry:
    """What the K/V of one model look like.

    frame_tokens: tokens of a latent frame (S), the size of a block. frames_per_forward: most current frames of a
    forward (nf). register_tokens: action and state tokens of a denoise forward. text_tokens, image_tokens:
    cross-attention context lengths. branches: guidance branches, each with its own window. conditioning_bytes: of what
    else a window is started with and goes on with.
    """

    layers: int
    heads: int
    head_dim: int
    frame_tokens: int
    frames_per_forward: int
    register_tokens: int
    text_tokens: int
    image_tokens: int
    dtype: torch.dtype
    branches: int = 2
    conditioning_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def text_bytes(self) -> int:
        """Bytes of a prompt's cross-attention K/V."""
        return self.text_tokens * self.token_bytes

    @property
    def image_bytes(self) -> int:
        """Bytes of an image's cross-attention K/V."""
        return self.image_tokens * self.token_bytes

    @property
    def start_bytes(self) -> int:
        """Bytes that a window is started with: the image's cross-attention K/V and the conditioning."""
        return self.image_bytes + self.conditioning_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one latent frame's K and V over all layers."""
        return self.frame_tokens * self.token_bytes

    def window_blocks(self, policy: WindowPolicy) -> int:
        """Most blocks one branch can hold."""
        return policy.most_held(self.frames_per_forward)

    def session_blocks(self, policy: WindowPolicy) -> int:
        """Most blocks one session can hold, all branches together."""
        return self.branches * self.window_blocks(policy)

    def session_bytes(self, policy: WindowPolicy) -> int:
        """Most bytes that one session can hold, with a prompt of its own."""
        return self.session_blocks(policy) * self.block_bytes + self.text_bytes + self.start_bytes


@dataclass(frozen=True)
class PagedLayer:
    """One layer's pool: k and v (num_blocks, S, heads, head_dim), read by one attention backend."""

    k: Tensor
    v: Tensor
    backend: str

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        """Attend, and store the current K/V where the plan says so; q, k, v and the result: (B, L, heads, head_dim)."""
        result = attend(q, k, v, self.k, self.v, plan, self.backend)
        if plan.stored.numel():
            self.store(k, v, plan)
        return result

    def store(self, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Store the current K/V alone, each (B, F * S, heads, head_dim)."""
        store(k, v, self.k, self.v, plan)


class PagedKV:
    """The pool of every layer."""

    def __init__(self, geometry: KVGeometry, num_blocks: int, device: torch.device, backend: str) -> None:
        self.geometry = geometry
        self.backend = backend
        shape = (num_blocks, geometry.frame_tokens, geometry.heads, geometry.head_dim)
        # Zeros, not empty: a kernel may read past a window's end and multiply what it finds by nought.
        self.layers = [
            PagedLayer(
                k=torch.zeros(shape, dtype=geometry.dtype, device=device),
                v=torch.zeros(shape, dtype=geometry.dtype, device=device),
                backend=backend,
            )
            for _ in range(geometry.layers)
        ]
        self._device = device

    def plan(self, windows: list[list[int]], stored: list[list[int]], table_size: int) -> AttentionPlan:
        """The plan of forwards, given by each branch's blocks.

        windows: what each branch sees, oldest first, equally many. stored: what takes its current frames, equally many
        or none. table_size: length of the padded block tables.
        Keys stand in the order of time wherever the blocks lie: their order does not change what attention means (RoPE
        is applied before), but it changes how sums round, and a session must not see where its blocks are.
        """
        padded = [window + [0] * (table_size - len(window)) for window in windows]
        return AttentionPlan(
            table=torch.tensor(padded, dtype=torch.int32, device=self._device),
            visible=torch.tensor(
                [len(window) * self.geometry.frame_tokens for window in windows], dtype=torch.int32, device=self._device
            ),
            stored=torch.tensor(stored, dtype=torch.int64, device=self._device),
            runs=tuple(torch.tensor([len(window), _first_of_run(window)]) for window in windows),
        )


def _first_of_run(blocks: list[int]) -> int:
    """The first of blocks that are neighbours in order, 0 where there are none, -1 where they are in pieces."""
    if all(b == a + 1 for a, b in pairwise(blocks)):
        return blocks[0] if blocks else 0
    return -1
