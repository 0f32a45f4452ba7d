"""Attention over scattered blocks as one Triton kernel: the block table and the length stay on the device.

The kernel takes nothing that changes from call to call from the host, so that a captured CUDA graph serves every fill
of the window. A page has any number of tokens, as a latent frame has. Only this module needs `triton`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, visible: Tensor) -> Tensor:
    """Attention of all queries over the visible keys, without a causal mask.

    q: (1, L, heads, head_dim). k_cache, v_cache: (blocks, S, heads, head_dim), contiguous. table: (max_blocks,) int32.
    visible: (1,) int32, from 1 to max_blocks * S; it is not checked, as that would wait for the device. Token n lies
    in slot n % S of block table[n // S].
    Returns (1, L, heads, head_dim), contiguous. Raises ValueError where a cache is not contiguous.

    The first call with a (head_dim, L, dtype) tries several tile sizes over the keys it is given, and so it must not
    fall into the capture of a CUDA graph.
    """
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the caches must be contiguous")
    q = q.contiguous()
    out = torch.empty_like(q)
    _, length, heads, head_dim = q.shape
    with torch.cuda.device_of(q):
        kernel[lambda tile: (triton.cdiv(length, tile["BLOCK_M"]), heads)](
            q,
            k_cache,
            v_cache,
            out,
            table,
            visible,
            LOG2_E / head_dim**0.5,
            length,
            heads * head_dim,
            PAGE=k_cache.shape[1],
            HEAD_DIM=head_dim,
            # The tiles of a matrix product are powers of two, of 16 at least.
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            enable_fp_fusion=True,  # the exponent of a weight is one multiply-add
        )
    return out


def _tile(block_m: int, block_n: int, warps: int, stages: int) -> Any:
    return triton.Config({"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=stages)


TILES = [
    _tile(128, 128, warps=8, stages=2),
    _tile(128, 128, warps=8, stages=3),
    _tile(128, 64, warps=8, stages=2),
    _tile(128, 64, warps=8, stages=3),
    _tile(128, 64, warps=8, stages=4),
    _tile(128, 64, warps=4, stages=3),
    _tile(64, 128, warps=4, stages=2),
    _tile(64, 64, warps=4, stages=2),
    _tile(64, 64, warps=4, stages=3),
    _tile(64, 64, warps=4, stages=4),
]
# Exact float32 products run on the plain cores, unrolled: a large tile takes minutes to compile and spills.
FLOAT32_TILE = _tile(32, 32, warps=8, stages=2)


def _tiles_for(tiles: list[Any], arguments: dict[str, Any], **_: Any) -> list[Any]:
    return [FLOAT32_TILE] if arguments["q"].dtype == torch.float32 else tiles


@triton.jit
def _slots(
    table: tl.tensor, start: tl.tensor, visible: tl.tensor, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """The slots (BLOCK_N,) of a tile of tokens from `start` on; slot 0 for those past the end."""
    token = start + tl.arange(0, BLOCK_N)
    return tl.load(table + token // PAGE, mask=token < visible, other=0) * PAGE + token % PAGE


@triton.jit
def _see(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slot: tl.tensor,
    seen: tl.tensor,
    factor: tl.tensor,
    stride: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One tile of keys into the running softmax; in all but the last tile every key is seen.

    slot: (BLOCK_N,) where the keys lie. seen: (BLOCK_N,) which of them count.
    best: (BLOCK_M,) highest score so far, in powers of two. total: (BLOCK_M,) sum of the weights, and acc: (BLOCK_M,
    BLOCK_D) of the weighted values, both relative to `best`. Returns the three anew.
    """
    width = tl.arange(0, BLOCK_D)[None, :]
    # A constant mask costs nothing: the compiler drops it.
    real = seen[:, None] & (width < HEAD_DIM if HEAD_DIM < BLOCK_D else tl.full((1, BLOCK_D), True, tl.int1))
    at = slot.to(tl.int64)[:, None] * stride + width  # a pool may hold more than 2**31 numbers
    scores = tl.dot(q, tl.trans(tl.load(keys + at, mask=real, other=0.0)), input_precision="ieee")
    if LAST:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - higher[:, None])
    fade = tl.exp2(best - higher)
    value = tl.load(values + at, mask=real, other=0.0)
    acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(weights, 1), acc


@triton.autotune(TILES, key=["HEAD_DIM", "length"], prune_configs_by={"early_config_prune": _tiles_for})
@triton.jit(do_not_specialize=["length"])
def kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    visible: tl.tensor,
    factor: tl.tensor,
    length: tl.tensor,
    stride: tl.tensor,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """BLOCK_M queries of one head, see `paged_attention`.

    factor: what scores are multiplied by, log2(e) included. stride: numbers from one token to the next.
    """
    head = tl.program_id(1) * HEAD_DIM
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    width = tl.arange(0, BLOCK_D)[None, :]
    real = (token < length) & (width < HEAD_DIM)
    at = head + token * stride + width
    queries = tl.load(q + at, mask=real, other=0.0)

    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    visible = tl.load(visible)
    # The last tile holds one key at least: no row is ever without a finite score.
    last = (visible - 1) // BLOCK_N * BLOCK_N
    slot = _slots(table, 0, visible, PAGE, BLOCK_N)
    every = tl.full((BLOCK_N,), True, tl.int1)
    for start in range(0, last, BLOCK_N):
        following = _slots(table, start + BLOCK_N, visible, PAGE, BLOCK_N)
        best, total, acc = _see(
            queries, k_cache + head, v_cache + head, slot, every, factor, stride, best, total, acc,
            HEAD_DIM, BLOCK_N, BLOCK_D, LAST=False,
        )  # fmt: skip
        slot = following
    seen = last + tl.arange(0, BLOCK_N) < visible
    best, total, acc = _see(
        queries, k_cache + head, v_cache + head, slot, seen, factor, stride, best, total, acc,
        HEAD_DIM, BLOCK_N, BLOCK_D, LAST=True,
    )  # fmt: skip
    tl.store(out + at, (acc * (1 / total)[:, None]).to(out.dtype.element_ty), mask=real)
