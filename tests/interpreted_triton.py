"""The paged Triton kernel against float64, run by `tests/test_triton_attention.py` with TRITON_INTERPRET=1."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from kv_cache import triton_attention
from kv_cache.cache import KVCache
from kv_cache.sizing import plan_budget
from kv_cache.triton_attention import paged_attention
from tests.kv import CPU, GEOMETRY, POLICY, bytes_for
from tests.test_attention import check_against_float64

HEADS = 2
TABLE = [5, 2, 7, 1, 4]  # scattered; block 0 only pads
EPSILON = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def one_small_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to time here, and tiny inputs that still take several tiles of 16 queries and 16 keys."""
    tile = triton.Config({"BLOCK_M": 16, "BLOCK_N": 16})
    monkeypatch.setattr(triton_attention.kernel, "configs", [tile])


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 as integers of the same bits, and multiplies those: widened first here."""
    dot = InterpreterBuilder.create_dot

    def widened(builder, a, b, *rest):
        a, b = (builder.create_fp_ext(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return dot(builder, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", widened)


def inputs(length: int, page: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, the pool's K and V, and the padded table; what no table entry names is not a number."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((1, length, HEADS, head_dim), *[(9, page, HEADS, head_dim)] * 2)
    )
    unnamed = sorted(set(range(9)) - set(TABLE))
    k[unnamed] = v[unnamed] = float("nan")
    return q, k, v, torch.tensor(TABLE + [0] * 3, dtype=torch.int32)


def reference(q: Tensor, k: Tensor, v: Tensor, table: Tensor, visible: int) -> Tensor:
    """The same in float64, over the keys gathered one by one."""
    page = k.shape[1]
    tokens = [(int(table[n // page]), n % page) for n in range(visible)]
    keys, values = (torch.stack([cache[at] for at in tokens]).double() for cache in (k, v))
    weights = torch.einsum("qhd,khd->hqk", q[0].double(), keys).div(q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)[None]


def check(q: Tensor, k: Tensor, v: Tensor, table: Tensor, visible: int) -> None:
    got = paged_attention(q, k, v, table, torch.tensor([visible], dtype=torch.int32))
    expected = reference(q, k, v, table, visible)
    assert got.dtype == q.dtype
    assert got.is_contiguous()
    # Weights and result are rounded once each: within the largest value times the width of a rounding.
    bound = EPSILON[q.dtype] * expected.abs().max().clamp(min=1)
    assert (got.double() - expected).abs().max() < bound


@pytest.mark.parametrize("page", [6, 22, 32, 40])
@pytest.mark.parametrize("tokens", ["one", "a block", "a block and one", "half", "all but one", "all"])
def test_every_fill_of_every_size_of_block(page: int, tokens: str) -> None:
    most = len(TABLE) * page
    visible = {
        "one": 1, "a block": page, "a block and one": page + 1, "half": most // 2, "all but one": most - 1, "all": most,
    }[tokens]  # fmt: skip
    check(*inputs(21, page, 32, torch.float32), visible)


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("head_dim", [4, 32, 48, 64, 128])
def test_every_head_dim_and_dtype(head_dim: int, dtype: torch.dtype) -> None:
    check(*inputs(17, 22, head_dim, dtype), 75)


@pytest.mark.parametrize("length", [1, 16, 37])
def test_every_number_of_queries(length: int) -> None:
    check(*inputs(length, 22, 32, torch.float32), 48)


def test_queries_may_be_a_part_of_a_larger_tensor() -> None:
    q, k, v, table = inputs(37, 22, 64, torch.float32)
    for part in (q[:, 5:20], q.transpose(1, 2).contiguous().transpose(1, 2)):
        check(part, k, v, table, 70)


def test_a_cache_that_is_not_contiguous_is_refused() -> None:
    q, k, v, table = inputs(17, 22, 32, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention(q, k, v.transpose(0, 1), table, torch.tensor([1], dtype=torch.int32))


def test_large_scores_do_not_overflow() -> None:
    q, k, v, table = inputs(17, 22, 32, torch.float32)
    check(q * 300, k, v, table, 75)


def test_table_and_length_are_read_at_every_call() -> None:
    q, k, v, table = inputs(17, 22, 32, torch.float32)
    visible = torch.tensor([110], dtype=torch.int32)
    for fill, blocks in ((110, TABLE), (47, TABLE[::-1]), (3, TABLE[2:])):
        visible.fill_(fill)
        table[: len(blocks)] = torch.tensor(blocks)
        got = paged_attention(q, k, v, table, visible)
        assert (got - reference(q, k, v, table, fill)).abs().max() < 1e-5


def test_as_the_backend_of_a_cache() -> None:
    """Written and attended through the operator, with blocks in runs and in pieces."""
    cache = KVCache(GEOMETRY, POLICY, plan_budget(GEOMETRY, POLICY, bytes_for(2)), CPU, "triton")
    kinds = check_against_float64(cache, 8, CPU, torch.float32, 1e-5)
    assert min(kinds.values()) > 5


def test_float32_has_a_tile_of_its_own() -> None:
    q, *_ = inputs(1, 6, 32, torch.float32)
    assert triton_attention._tiles_for(triton_attention.TILES, {"q": q}) == [triton_attention.FLOAT32_TILE]
    assert triton_attention._tiles_for(triton_attention.TILES, {"q": q.half()}) == triton_attention.TILES
