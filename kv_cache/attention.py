"""Attention of the current tokens over the resident window and themselves: one operator, several backends.

The current K/V are attended where they are; they are written into the pool only where they become resident. Both
operators are registered with `torch.library`, so `torch.compile(fullgraph=True)` keeps each as one node. Everything
that changes from call to call (window fill, block ids) is in tensors of fixed shape, so nothing recompiles.
"""

import functools
import importlib
import importlib.util
import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

logger = logging.getLogger(__name__)

DEVICE_SIDE = ("flash-attn-3", "flash-attn-4", "triton")
"""Backends that read lengths and block table on the device: a captured CUDA graph of them serves every window."""


@dataclass(frozen=True)
class AttentionPlan:
    """What the current tokens of a forward see beside themselves, and where they go; the same for every layer.

    B guidance branches of one session, each with a window of its own; the windows have equally many frames.

    table: (B, max_blocks) int32 on the device: the blocks of each window, oldest first, padded with any block.
    visible: (B,) int32 on the device: number of tokens in each window.
    stored: (B, F) int64 on the device: blocks that take the K/V of the F current frames; none (F is 0) where they
        leave nothing behind.
    runs: for each branch (2,) int64 on the CPU: number of blocks in its window, and the first of them where they are
        one run of neighbours, which attention on a CPU reads in place; -1 where they are in pieces.
    """

    table: Tensor
    visible: Tensor
    stored: Tensor
    runs: tuple[Tensor, ...]

    @property
    def views(self) -> int:
        """How many windows are one run."""
        return sum(int(first) >= 0 for _, first in self.runs)

    def split(self) -> "tuple[AttentionPlan, ...]":
        """A plan for each branch alone."""
        parts = zip(self.table.split(1), self.visible.split(1), self.stored.split(1), self.runs, strict=True)
        return tuple(AttentionPlan(table, visible, stored, (runs,)) for table, visible, stored, runs in parts)


def available_backends(device: torch.device, dtype: torch.dtype, device_side: bool = False) -> list[str]:
    """Backends that can attend in `dtype` on `device`, the preferred one first.

    `flash-attn-3` knows half precision on Hopper alone, `flash-attn-4` on Hopper and on Blackwell's large cards: for
    others it has no pages. `triton` runs from compute capability 8.0 on. `sdpa`, which on a GPU copies the window
    together for each layer, comes last but for float32, in whose exact products `triton` is slow.
    device_side: only those in `DEVICE_SIDE`; there may be none.
    """
    backends = []
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    half = dtype in (torch.bfloat16, torch.float16)
    if half and capability == (9, 0) and _offers("flash_attn_interface", "flash_attn_with_kvcache"):
        backends.append("flash-attn-3")
    if half and capability[0] in (9, 10) and _offers("flash_attn.cute", "flash_attn_varlen_func"):
        backends.append("flash-attn-4")
    if capability >= (8, 0) and (half or dtype == torch.float32) and _offers("triton", "jit"):
        backends.append("triton")
    backends.insert(len(backends) if half else 0, "sdpa")
    return [name for name in backends if name in DEVICE_SIDE or not device_side]


def _offers(package: str, function: str) -> bool:
    """Whether `function` can be imported from `package`. The name alone tells nothing: the index has an empty package
    `flash_attn_interface`, and `flash_attn` is FlashAttention 2 or 4.
    """
    whole, _, part = package.partition(".")
    if importlib.util.find_spec(whole) is None or (part and importlib.util.find_spec(package) is None):
        return False
    try:
        getattr(importlib.import_module(package), function)
    except Exception as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        _warn_once(f"{package} is installed and of no use here: {type(error).__name__}: {reason}")
        return False
    return True


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def choose_backend(device: torch.device, dtype: torch.dtype, wanted: str = "auto", device_side: bool = False) -> str:
    """The backend to use, see `available_backends`: the preferred one, or `wanted` by name.

    Raises ValueError, naming those there are, where `wanted` cannot run, and where there is none at all.
    """
    backends = available_backends(device, dtype, device_side)
    here = f"{device}, {dtype}" + (", lengths on the device" if device_side else "")
    if not backends:
        raise ValueError(
            f"no attention backend can run here ({here}): it takes CUDA, compute capability 8.0 or more, and the "
            "package triton, or in half precision flash-attn-4 (9.0, 10.x) or FlashAttention 3 (9.0), built from source"
        )
    if wanted == "auto":
        return backends[0]
    if wanted not in backends:
        raise ValueError(f"attention backend {wanted!r} cannot run here ({here}); available: {', '.join(backends)}")
    return wanted


def attend(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, backend: str
) -> Tensor:
    """Attend over each branch's window and over its current tokens, without a causal mask.

    q, k, v: (B, L, heads, head_dim), RoPE applied. k_cache, v_cache: (blocks, S, heads, head_dim), one layer's pool.
    Returns (B, L, heads, head_dim), contiguous.
    """
    attention: Tensor = torch.ops.kv_cache.attend(
        q, k, v, k_cache, v_cache, plan.table, plan.visible, plan.runs, backend
    )
    return attention


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan) -> None:
    """Write the current K/V, each (B, F * S, heads, head_dim), into the plan's blocks of one layer's pool."""
    torch.ops.kv_cache.store(k, v, k_cache, v_cache, plan.stored)


def _store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, stored: Tensor) -> None:
    frames = (-1, *k_cache.shape[1:])
    k_cache.index_copy_(0, stored.flatten(), k.reshape(frames))
    v_cache.index_copy_(0, stored.flatten(), v.reshape(frames))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    visible: Tensor,
    runs: list[Tensor],
    backend: str,
) -> Tensor:
    if backend == "flash-attn-3":
        return _flash_attn_3(q, k, v, k_cache, v_cache, table, visible)
    if backend == "flash-attn-4":
        return flash_attn_4(q, k, v, k_cache, v_cache, table, visible)
    if backend == "triton":
        return _triton(q, k, v, k_cache, v_cache, table, visible)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for branch, (blocks, first) in enumerate(each.tolist() for each in runs):  # on the CPU: nothing is waited for
        window = slice(first, first + blocks) if first >= 0 else table[branch, :blocks]
        keys, values = (cache[window].flatten(0, 1) for cache in (k_cache, v_cache))
        _sdpa(q[branch], keys, values, k[branch], v[branch], out[branch])
    return out


def _shape_of_result(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _nothing(*_: object) -> None:
    pass


# Defined by hand: `torch.library.custom_op` would do the same, at three times the cost of a call.
_library = torch.library.Library("kv_cache", "DEF")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor table, Tensor visible, "
    "Tensor[] runs, str backend) -> Tensor"
)
_library.define("store(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor stored) -> ()")
for _dispatch_key in ("CPU", "CUDA"):
    _library.impl("attend", _attend, _dispatch_key)
    _library.impl("store", _store, _dispatch_key)
torch.library.register_fake("kv_cache::attend", _shape_of_result, lib=_library)
torch.library.register_fake("kv_cache::store", _nothing, lib=_library)


def _sdpa(q: Tensor, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Attention of one branch, into `out`; all (tokens, heads, head_dim), the window's K/V apart from the current."""
    if q.device.type == "cpu":
        _in_two_parts(q, keys, values, k, v, out)
        return
    query, key, value = (t.transpose(0, 1)[None] for t in (q, torch.cat([keys, k]), torch.cat([values, v])))
    out.copy_(scaled_dot_product_attention(query, key, value)[0].transpose(0, 1))


def _in_two_parts(q: Tensor, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """As `_sdpa` on a CPU: over the window where it lies, then over the current tokens, without a copy of either."""
    seen, seen_weight = _attention_and_weight(q, k, v)
    if len(keys):
        window, window_weight = _attention_and_weight(q, keys, values)
        # A part's share of the whole is as the sum of its exponentials.
        share = (seen_weight - window_weight).sigmoid_()[..., None].to(q.dtype)
        torch.lerp(window, seen, share, out=out)
    else:
        out.copy_(seen)


def _attention_and_weight(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What `scaled_dot_product_attention` runs on a CPU; beside the result the log of the sum of the exponentials.

    (tokens, heads, head_dim), and (tokens, heads) float32.
    """
    heads_first = (t.transpose(0, 1)[None] for t in (q, k, v))
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first)
    return out[0].transpose(0, 1), log_sum[0].transpose(0, 1)


def _flash_attn_3(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, visible: Tensor
) -> Tensor:
    from flash_attn_interface import flash_attn_func, flash_attn_with_kvcache

    window, window_weight, *_ = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=visible, page_table=table, return_softmax_lse=True
    )
    seen, seen_weight = flash_attn_func(q, k, v, return_attn_probs=True)
    return together(window, window_weight, seen, seen_weight, visible)


def flash_attn_4(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, visible: Tensor
) -> Tensor:
    """`attend` with FlashAttention 4, whose kernels are compiled at the first call with each kind of arguments."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    window, window_weight = flash_attn_varlen_func(
        q, k_cache, v_cache, page_table=table, seqused_k=visible, return_lse=True
    )
    seen, seen_weight = flash_attn_func(q, k, v, return_lse=True)
    return together(window, window_weight, seen, seen_weight, visible)


def together(window: Tensor, window_weight: Tensor, seen: Tensor, seen_weight: Tensor, visible: Tensor) -> Tensor:
    """Attention over a window and over the current tokens, from that over each alone.

    window, seen: (B, L, heads, head_dim). *_weight: (B, heads, L) float32, the logs of the sums of the exponentials.
    visible: (B,) tokens in each window; over an empty one the result is any finite number, and its weight anything.
    """
    share = (seen_weight - window_weight).sigmoid().where(visible[:, None, None] > 0, 1).transpose(1, 2)[..., None]
    return torch.lerp(window.float(), seen.float(), share).to(seen.dtype)


def _triton(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, visible: Tensor
) -> Tensor:
    from kv_cache.triton_attention import paged_attention

    return paged_attention(q, k, v, k_cache, v_cache, table, visible)
