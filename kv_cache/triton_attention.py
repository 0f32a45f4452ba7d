"""Attention over scattered blocks and the current tokens as one Triton kernel: table and length stay on the device.

The kernel takes nothing that changes from call to call from the host, so that a captured CUDA graph serves every fill
of the window. A page has any number of tokens, as a latent frame has. Only this module needs `triton`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, visible: Tensor
) -> Tensor:
    """Attention of each branch's queries over its window and over its current keys, without a causal mask.

    q, k, v: (B, L, heads, head_dim); each may be a part of a larger tensor, as long as the heads of a token lie side by
    side and branches follow each other. k_cache, v_cache: (blocks, S, heads, head_dim), contiguous. table: (B,
    max_blocks) int32, contiguous. visible: (B,) int32, from 0 to max_blocks * S; it is not checked, as that would wait
    for the device. Token n of a window lies in slot n % S of block table[n // S].
    Returns (B, L, heads, head_dim), contiguous. Raises ValueError where a cache is not contiguous.

    The first call with a (head_dim, L, dtype) tries several tile sizes over the keys it is given, and so it must not
    fall into the capture of a CUDA graph.
    """
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the caches must be contiguous")
    branches, length, heads, head_dim = q.shape
    q, k, v = (_with_tokens_in_line(t) for t in (q, k, v))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(q):
        kernel[lambda tile: (triton.cdiv(length, tile["BLOCK_M"]), heads, branches)](
            q,
            k,
            v,
            k_cache,
            v_cache,
            out,
            table,
            visible,
            LOG2_E / head_dim**0.5,
            length,
            table.shape[-1],
            q.stride(1),
            k.stride(1),
            v.stride(1),
            heads * head_dim,
            PAGE=k_cache.shape[1],
            HEAD_DIM=head_dim,
            # The tiles of a matrix product are powers of two, of 16 at least.
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            enable_fp_fusion=True,  # the exponent of a weight is one multiply-add
        )
    return out


def _with_tokens_in_line(t: Tensor) -> Tensor:
    """The tensor (B, L, heads, head_dim) itself where all tokens are equally far from each other, else a copy."""
    _, length, _, head_dim = t.shape
    token = t.stride(1)
    return t if t.stride() == (length * token, token, head_dim, 1) else t.contiguous()


def _tile(block_m: int, block_n: int, warps: int, stages: int) -> Any:
    return triton.Config({"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=stages)


# Chosen by what the compiler makes of them at DROID's sizes, which a test looks at. On Ampere, Ada and the small
# Blackwell cards others than the first three spill, or need more shared memory than there is.
TILES = [_tile(128, 64, warps=8, stages=stages) for stages in (2, 3, 4)]
TILES_OF_LARGE_CARDS = [
    *TILES,
    _tile(128, 128, warps=8, stages=2),
    _tile(64, 128, warps=4, stages=2),
    *(_tile(64, 64, warps=4, stages=stages) for stages in (2, 3, 4)),
]
# Exact float32 products run on the plain cores, unrolled: a large tile takes minutes to compile and spills.
FLOAT32_TILES = [_tile(32, 32, warps=8, stages=2)]


def tiles_for(dtype: torch.dtype, capability: tuple[int, int]) -> list[Any]:
    """The sizes of tiles worth a try on a card of that compute capability."""
    if dtype == torch.float32:
        return FLOAT32_TILES
    return TILES_OF_LARGE_CARDS if capability[0] in (9, 10) else TILES


def _prune(tiles: list[Any], arguments: dict[str, Any], **_: Any) -> list[Any]:
    q = arguments["q"]
    return tiles_for(q.dtype, torch.cuda.get_device_capability(q.device))


@triton.jit
def _slots(
    table: tl.tensor, start: tl.tensor, visible: tl.tensor, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """The slots (BLOCK_N,) of a tile of tokens from `start` on; of no meaning for those past the window."""
    token = start + tl.arange(0, BLOCK_N)
    slot = tl.load(table + token // PAGE, mask=token < visible, other=0) * PAGE + token % PAGE
    return slot.to(tl.int64)  # a pool may hold more than 2**31 numbers


@triton.jit
def _see(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_at: tl.tensor,
    value_at: tl.tensor,
    seen: tl.tensor,
    factor: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One tile of keys into the running softmax; in all but the last tile every key is seen.

    key_at, value_at: (BLOCK_N,) where each token's numbers begin in `keys` and `values`. seen: (BLOCK_N,) which count.
    best: (BLOCK_M,) highest score so far, in powers of two. total: (BLOCK_M,) sum of the weights, and acc: (BLOCK_M,
    BLOCK_D) of the weighted values, both relative to `best`. Returns the three anew.
    """
    width = tl.arange(0, BLOCK_D)[None, :]
    # A constant mask costs nothing: the compiler drops it.
    real = seen[:, None] & (width < HEAD_DIM if HEAD_DIM < BLOCK_D else tl.full((1, BLOCK_D), True, tl.int1))
    key = tl.load(keys + (key_at[:, None] + width), mask=real, other=0.0)
    scores = tl.dot(q, tl.trans(key), input_precision="ieee")
    if LAST:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - higher[:, None])
    fade = tl.exp2(best - higher)
    value = tl.load(values + (value_at[:, None] + width), mask=real, other=0.0)
    acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(weights, 1), acc


@triton.autotune(
    [*TILES_OF_LARGE_CARDS, *FLOAT32_TILES],
    key=["HEAD_DIM", "length"],
    prune_configs_by={"early_config_prune": _prune},
)
@triton.jit(do_not_specialize=["length", "table_size"], do_not_specialize_on_alignment=["table", "visible"])
def kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    visible: tl.tensor,
    factor: tl.tensor,
    length: tl.tensor,
    table_size: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    stride: tl.tensor,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """BLOCK_M queries of one head of one branch, see `paged_attention`.

    factor: what scores are multiplied by, log2(e) included. *stride: numbers from one token to the next; `stride` is
    that of the pool and of the result.
    """
    branch = tl.program_id(2)
    head = tl.program_id(1) * HEAD_DIM
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    width = tl.arange(0, BLOCK_D)[None, :]
    real = (token < length) & (width < HEAD_DIM)
    first = branch.to(tl.int64) * length
    queries = tl.load(q + head + (first + token) * q_stride + width, mask=real, other=0.0)

    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    every = tl.full((BLOCK_N,), True, tl.int1)
    # The current keys first, of which there is one at least: from then on no row is without a finite score.
    k += head + first * k_stride
    v += head + first * v_stride
    whole = (length - 1) // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        at = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        best, total, acc = _see(
            queries, k, v, at * k_stride, at * v_stride, every, factor, best, total, acc,
            HEAD_DIM, BLOCK_N, BLOCK_D, LAST=False,
        )  # fmt: skip
    at = (whole + tl.arange(0, BLOCK_N)).to(tl.int64)
    best, total, acc = _see(
        queries, k, v, at * k_stride, at * v_stride, at < length, factor, best, total, acc,
        HEAD_DIM, BLOCK_N, BLOCK_D, LAST=True,
    )  # fmt: skip
    # Then the window's. A last tile of it may have none.
    visible = tl.load(visible + branch)
    table += branch * table_size
    k_cache += head
    v_cache += head
    whole = visible // BLOCK_N * BLOCK_N
    slot = _slots(table, 0, visible, PAGE, BLOCK_N)
    for start in range(0, whole, BLOCK_N):
        following = _slots(table, start + BLOCK_N, visible, PAGE, BLOCK_N)
        best, total, acc = _see(
            queries, k_cache, v_cache, slot * stride, slot * stride, every, factor, best, total, acc,
            HEAD_DIM, BLOCK_N, BLOCK_D, LAST=False,
        )  # fmt: skip
        slot = following
    seen = whole + tl.arange(0, BLOCK_N) < visible
    best, total, acc = _see(
        queries, k_cache, v_cache, slot * stride, slot * stride, seen, factor, best, total, acc,
        HEAD_DIM, BLOCK_N, BLOCK_D, LAST=True,
    )  # fmt: skip
    result = out + head + (first + token) * stride + width
    tl.store(result, (acc * (1 / total)[:, None]).to(out.dtype.element_ty), mask=real)
