"""Write the current K/V into their slots and attend over the resident window: one operator, several backends.

The operator is registered with `torch.library`, so `torch.compile(fullgraph=True)` keeps it as one node. Everything
that changes from call to call (window fill, block ids) is in tensors of fixed shape, so nothing recompiles.
"""

import functools
import importlib
import importlib.util
import inspect
import logging
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

logger = logging.getLogger(__name__)

DEVICE_SIDE = ("flash-attn-3", "varlen", "triton")
"""Backends that read lengths and block table on the device: a captured CUDA graph of them serves every window."""


@dataclass(frozen=True)
class AttentionPlan:
    """Where the current tokens of a forward go and what they see; the same for every layer.

    slots: (L,) int64 on the device: slot of each current token, video frames first, then registers.
    table: (max_blocks,) int32 on the device: the visible blocks, padded with the null block. Visible tokens fill the
        blocks from the front; only the last block may be partly filled.
    visible: (1,) int32 on the device: number of visible tokens.
    extent: (3,) int64 on the CPU: visible tokens, visible blocks, first slot of the one run they form (-1: no run).
    """

    slots: Tensor
    table: Tensor
    visible: Tensor
    extent: Tensor

    @property
    def is_view(self) -> bool:
        """Whether the visible blocks are one run, which attention reads in place."""
        return int(self.extent[2]) >= 0


def available_backends(
    device: torch.device, dtype: torch.dtype, frame_tokens: int, device_side: bool = False
) -> list[str]:
    """Backends that can attend over blocks of `frame_tokens` tokens of `dtype` on `device`, the preferred one first.

    The flash backends know half precision alone, from compute capability 8.0 on. `varlen` runs the FlashAttention 2
    that torch carries, whose pages must be a multiple of 256 tokens. `triton`, from 8.0 on too, takes any page.
    device_side: only those in `DEVICE_SIDE`; there may be none.
    """
    backends = []
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if dtype in (torch.bfloat16, torch.float16):
        if capability == (9, 0) and _offers("flash_attn_interface", "flash_attn_with_kvcache"):
            backends.append("flash-attn-3")
        if capability >= (8, 0) and _offers("flash_attn", "flash_attn_func"):
            backends.append("flash-attn-2")
        if capability >= (8, 0) and frame_tokens % 256 == 0 and _varlen_knows_block_tables():
            backends.append("varlen")
    backends.append("sdpa")
    if capability >= (8, 0) and dtype in (torch.bfloat16, torch.float16, torch.float32) and _offers("triton", "jit"):
        backends.append("triton")
    return [name for name in backends if name in DEVICE_SIDE or not device_side]


def _offers(package: str, function: str) -> bool:
    """Whether `function` can be imported from `package`. The name alone tells nothing: there are packages of the same.

    `flash_attn_interface` of the index is empty, and what other FlashAttentions install has `flash_attn` as its folder.
    """
    if importlib.util.find_spec(package) is None:
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


def choose_backend(
    device: torch.device, dtype: torch.dtype, frame_tokens: int, wanted: str = "auto", device_side: bool = False
) -> str:
    """The backend to use, see `available_backends`: the preferred one, or `wanted` by name.

    Raises ValueError, naming those there are, where `wanted` cannot run, and where there is none at all.
    """
    backends = available_backends(device, dtype, frame_tokens, device_side)
    here = f"{device}, {dtype}, blocks of {frame_tokens} tokens" + (", lengths on the device" if device_side else "")
    if not backends:
        raise ValueError(
            f"no attention backend can run here ({here}): it takes CUDA, compute capability 8.0 or more, and the "
            "package triton, or in half precision FlashAttention 3 (for 9.0 alone), built from its sources"
        )
    if wanted == "auto":
        return backends[0]
    if wanted not in backends:
        raise ValueError(f"attention backend {wanted!r} cannot run here ({here}); available: {', '.join(backends)}")
    return wanted


def _varlen_knows_block_tables() -> bool:
    """From torch 2.12 on."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "block_table" in inspect.signature(varlen_attn).parameters


def attend(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, backend: str
) -> Tensor:
    """Store the current K/V and attend over everything the plan makes visible.

    q, k, v: (1, L, heads, head_dim), RoPE applied. k_cache, v_cache: (blocks, S, heads, head_dim), one layer's pool,
    written in place. Returns (1, L, heads, head_dim).
    """
    attention: Tensor = torch.ops.kv_cache.write_and_attend(
        q, k, v, k_cache, v_cache, plan.slots, plan.table, plan.visible, plan.extent, backend
    )
    return attention


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store the current K/V, each (1, L, heads, head_dim), in their slots (L,) of one layer's pool."""
    k_cache.flatten(0, 1).index_copy_(0, slots, k[0])
    v_cache.flatten(0, 1).index_copy_(0, slots, v[0])


def _write_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    table: Tensor,
    visible: Tensor,
    extent: Tensor,
    backend: str,
) -> Tensor:
    store(k, v, k_cache, v_cache, slots)
    if backend == "flash-attn-3":
        return _flash_attn_3(q, k_cache, v_cache, table, visible)
    if backend == "varlen":
        return _varlen(q, k_cache, v_cache, table, visible)
    if backend == "triton":
        return _triton(q, k_cache, v_cache, table, visible)
    tokens, blocks, first = extent.tolist()  # on the CPU: no device synchronisation
    if first >= 0:
        keys, values = (cache.flatten(0, 1)[first : first + tokens] for cache in (k_cache, v_cache))
    else:
        chosen = table[:blocks]
        keys, values = (cache[chosen].flatten(0, 1)[:tokens] for cache in (k_cache, v_cache))
    if backend == "flash-attn-2":
        return _flash_attn_2(q, keys, values)
    return _sdpa(q, keys, values)


def _shape_of_result(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    table: Tensor,
    visible: Tensor,
    extent: Tensor,
    backend: str,
) -> Tensor:
    return torch.empty_like(q)


# Defined by hand: `torch.library.custom_op` would do the same, at three times the cost of a call.
_library = torch.library.Library("kv_cache", "DEF")
_library.define(
    "write_and_attend(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, "
    "Tensor table, Tensor visible, Tensor extent, str backend) -> Tensor"
)
for _dispatch_key in ("CPU", "CUDA"):
    _library.impl("write_and_attend", _write_and_attend, _dispatch_key)
torch.library.register_fake("kv_cache::write_and_attend", _shape_of_result, lib=_library)


def _sdpa(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    heads_first = (q.transpose(1, 2), keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    return scaled_dot_product_attention(*heads_first).transpose(1, 2).contiguous()


def _flash_attn_2(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(q, keys[None], values[None])


def _flash_attn_3(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, visible: Tensor) -> Tensor:
    from flash_attn_interface import flash_attn_with_kvcache

    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=visible, page_table=table[None])
    return out[0] if isinstance(out, tuple) else out


def _varlen(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, visible: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    tokens = q.shape[1]
    out = varlen_attn(
        q[0],
        k_cache,
        v_cache,
        cu_seq_q=torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=q.device),
        cu_seq_k=None,
        max_q=tokens,
        max_k=table.numel() * k_cache.shape[1],
        seqused_k=visible,
        block_table=table[None],
    )
    return cast(Tensor, out)[None]


def _triton(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, visible: Tensor) -> Tensor:
    from kv_cache.triton_attention import paged_attention

    return paged_attention(q, k_cache, v_cache, table, visible)
