"""The paged self-attention K/V: pool tensors, and the plan by which a forward writes and reads them."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kv_cache.attention import AttentionPlan, attend, store
from kv_cache.block_pool import NULL_BLOCK
from kv_cache.window import WindowPolicy


@dataclass(frozen=True)
class KVGeometry:
    """What the K/V of one model look like.

    frame_tokens: tokens of a latent frame (S), the size of a block. frames_per_forward: most current frames of a
    forward (nf). register_tokens: action and state tokens of a denoise forward. text_tokens, image_tokens:
    cross-attention context lengths. branches: guidance branches, each with its own window.
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

    @property
    def scratch_blocks(self) -> int:
        """Blocks that hold the register tokens while a forward needs them."""
        return -(-self.register_tokens // self.frame_tokens)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def text_bytes(self) -> int:
        """Bytes of a prompt's cross-attention half."""
        return self.text_tokens * self.token_bytes

    @property
    def image_bytes(self) -> int:
        """Bytes of an image's cross-attention half."""
        return self.image_tokens * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one latent frame's K and V over all layers."""
        return self.frame_tokens * self.token_bytes

    def window_blocks(self, policy: WindowPolicy) -> int:
        """Most blocks one branch can hold: its window with the current frames, and the register scratch."""
        return policy.most_held(self.frames_per_forward) + self.scratch_blocks

    def session_blocks(self, policy: WindowPolicy) -> int:
        """Most blocks one session can hold, all branches together."""
        return self.branches * self.window_blocks(policy)


@dataclass(frozen=True)
class PagedLayer:
    """One layer's pool: k and v (num_blocks, S, heads, head_dim), read by one attention backend."""

    k: Tensor
    v: Tensor
    backend: str

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        """Store the current K/V and attend; q, k, v and the result are (1, L, heads, head_dim)."""
        return attend(q, k, v, self.k, self.v, plan, self.backend)

    def store(self, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Store the current K/V alone, each (1, L, heads, head_dim)."""
        store(k, v, self.k, self.v, plan.slots)


class PagedKV:
    """The pool of every layer."""

    def __init__(self, geometry: KVGeometry, num_blocks: int, device: torch.device, backend: str) -> None:
        self.geometry = geometry
        self.backend = backend
        shape = (num_blocks, geometry.frame_tokens, geometry.heads, geometry.head_dim)
        # Zeros, not empty: a gather reads the unused tail of a block, and the null block must hold numbers.
        self.layers = [
            PagedLayer(
                k=torch.zeros(shape, dtype=geometry.dtype, device=device),
                v=torch.zeros(shape, dtype=geometry.dtype, device=device),
                backend=backend,
            )
            for _ in range(geometry.layers)
        ]
        self._device = device

    def plan(
        self, visible: list[int], current: list[int], scratch: list[int], registers: int, table_size: int
    ) -> AttentionPlan:
        """The plan of forwards that see `visible` resident frames, write `current` frames and `registers` tokens.

        Blocks are given by number; `scratch` holds the registers. table_size: length of the padded block table.
        Keys stand in the order of time wherever the blocks lie: their order does not change what attention means (RoPE
        is applied before), but it changes how sums round, and a session must not see where its blocks are.
        """
        size = self.geometry.frame_tokens
        table = visible + current + scratch
        is_run = all(b == a + 1 for a, b in pairwise(table))
        tokens = (len(visible) + len(current)) * size + registers
        starts = torch.tensor(current + scratch, dtype=torch.int64) * size
        slots = (starts[:, None] + torch.arange(size))[: len(current) + len(scratch)].flatten()
        return AttentionPlan(
            slots=slots[: len(current) * size + registers].to(self._device),
            table=_padded(table, table_size).to(self._device),
            visible=torch.tensor([tokens], dtype=torch.int32, device=self._device),
            extent=torch.tensor([tokens, len(table), table[0] * size if is_run else -1], dtype=torch.int64),
        )


def _padded(table: list[int], size: int) -> Tensor:
    return torch.tensor(table + [NULL_BLOCK] * (size - len(table)), dtype=torch.int32)
