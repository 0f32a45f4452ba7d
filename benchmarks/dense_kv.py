"""The dense way to keep self-attention K/V, for comparison: one tensor a layer, grown by `cat`, cut by slicing.

It stands in for the pool behind the same interface, so that everything else of a chunk is the same code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kv_cache.attention import AttentionPlan
from kv_cache.cache import KVCache, SessionKV


@dataclass
class _DenseLayer:
    """One layer's windows, K and V of (B, tokens, heads, head_dim)."""

    window_tokens: int
    window: tuple[Tensor, Tensor] | None = None
    frame_tokens: int = 0
    """Of the running lease's frames: what is behind them in a forward is the register."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        """Attend over the window, the current frames and the register; keep the frames where the lease commits."""
        window_k, window_v = self._extended(k, v, plan)
        video = self.frame_tokens
        keys = torch.cat([window_k, k[:, video:]], dim=1).transpose(1, 2)
        values = torch.cat([window_v, v[:, video:]], dim=1).transpose(1, 2)
        return scaled_dot_product_attention(q.transpose(1, 2), keys, values).transpose(1, 2).contiguous()

    def store(self, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Keep the frames where the lease commits, and no more."""
        self._extended(k, v, plan)

    def _extended(self, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """The window with the current frames behind it, cut to its size; kept where the lease commits."""
        video = self.frame_tokens
        past_k, past_v = self.window or (k[:, :0], v[:, :0])
        window_k = torch.cat([past_k, k[:, :video]], dim=1)[:, -self.window_tokens :]
        window_v = torch.cat([past_v, v[:, :video]], dim=1)[:, -self.window_tokens :]
        if plan.stored.numel():
            self.window = (window_k, window_v)
        return window_k, window_v


class DenseKVCache(KVCache):
    """A KV cache for one session, branches in one batch, that keeps the account of blocks but stores K/V densely."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache.geometry, cache.policy, cache.budget, torch.device("cpu"))
        tokens = cache.policy.capacity * cache.geometry.frame_tokens
        self._dense = [_DenseLayer(tokens) for _ in range(cache.geometry.layers)]
        self.paged.layers = self._dense  # type: ignore[assignment]

    @contextmanager
    def lease(self, session: SessionKV, frames: int, commit: bool = False) -> Iterator[AttentionPlan]:
        """As KVCache.lease; the layers know how many tokens its frames have."""
        for layer in self._dense:
            layer.frame_tokens = frames * self.geometry.frame_tokens
        with super().lease(session, frames, commit) as plan:
            yield plan

    def restart(self, session: SessionKV) -> None:
        """As KVCache.restart; the dense windows go too."""
        super().restart(session)
        for layer in self._dense:
            layer.window = None
