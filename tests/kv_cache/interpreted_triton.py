"""The paged Triton kernel against float64, run by `tests/kv_cache/test_triton_attention.py` with TRITON_INTERPRET=1."""

from dataclasses import dataclass

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
from tests.kv import CPU, GEOMETRY, POLICY, bytes_for, check_against_float64

HEADS = 2
TABLES = [[5, 2, 7, 1, 4], [3, 8, 4, 2, 6]]  # of two branches, scattered; block 0 only pads
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


@dataclass
class Case:
    """q, k, v of current tokens, the pool's K and V, and the padded tables; what no table names is not a number."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor

    def __post_init__(self) -> None:
        self.k_cache[0] = self.v_cache[0] = float("nan")

    def attend(self, visible: list[int]) -> Tensor:
        lengths = torch.tensor(visible, dtype=torch.int32)
        return paged_attention(self.q, self.k, self.v, self.k_cache, self.v_cache, self.table, lengths)

    def reference(self, visible: list[int]) -> Tensor:
        """The same in float64, over the keys gathered one by one."""
        page, results = self.k_cache.shape[1], []
        for branch, seen in enumerate(visible):
            tokens = [(int(self.table[branch, n // page]), n % page) for n in range(seen)]
            keys, values = (
                torch.cat([torch.stack([cache[at] for at in tokens]) if tokens else now[branch, :0], now[branch]])
                for cache, now in ((self.k_cache, self.k), (self.v_cache, self.v))
            )
            scores = torch.einsum("qhd,khd->hqk", self.q[branch].double(), keys.double())
            weights = scores.div(self.q.shape[-1] ** 0.5).softmax(-1)
            results.append(torch.einsum("hqk,khd->qhd", weights, values.double()))
        return torch.stack(results)

    def check(self, *visible: int) -> None:
        got, expected = self.attend(list(visible)), self.reference(list(visible))
        assert got.dtype == self.q.dtype
        assert got.is_contiguous()
        # Weights and result are rounded once each: within the largest value times the width of a rounding. A weight is
        # a power whose exponent, a score, was rounded to 24 bits, of which large ones leave few behind the point.
        scores = torch.einsum("bqhd,bkhd->bhqk", self.q.double(), self.k.double()).abs().max() / self.q.shape[-1] ** 0.5
        bound = (EPSILON[self.q.dtype] + 2**-22 * scores) * expected.abs().max().clamp(min=1)
        assert (got.double() - expected).abs().max() < bound


def case(length: int, page: int, head_dim: int, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(length)
    current, pool = (2, length, HEADS, head_dim), (9, page, HEADS, head_dim)
    drawn = (torch.randn(shape, generator=generator).to(dtype) for shape in (current, current, current, pool, pool))
    return Case(*drawn, torch.tensor([table + [0] * 3 for table in TABLES], dtype=torch.int32))  # type: ignore[call-arg]


@pytest.mark.parametrize("page", [6, 22, 32])
@pytest.mark.parametrize("tokens", ["none", "one", "a block", "a block and one", "half", "all but one", "all"])
def test_every_fill_of_every_size_of_block(page: int, tokens: str) -> None:
    most = len(TABLES[0]) * page
    visible = {
        "none": 0, "one": 1, "a block": page, "a block and one": page + 1, "half": most // 2, "all but one": most - 1,
        "all": most,
    }[tokens]  # fmt: skip
    case(21, page, 32, torch.float32).check(visible, visible)


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("head_dim", [4, 32, 48, 64, 128])
def test_every_head_dim_and_dtype(head_dim: int, dtype: torch.dtype) -> None:
    case(17, 22, head_dim, dtype).check(75, 75)


@pytest.mark.parametrize("length", [1, 16, 37])
def test_every_number_of_queries(length: int) -> None:
    case(length, 22, 32, torch.float32).check(48, 48)


def test_branches_may_see_windows_of_different_lengths() -> None:
    case(21, 22, 32, torch.float32).check(3, 110)


def test_one_branch_alone_gets_the_same() -> None:
    both = case(21, 22, 32, torch.float32)
    second = Case(both.q[1:], both.k[1:], both.v[1:], both.k_cache, both.v_cache, both.table[1:])
    assert torch.equal(both.attend([30, 47])[1:], second.attend([47]))


def test_queries_keys_and_values_may_be_parts_of_one_tensor() -> None:
    whole = case(21, 22, 64, torch.float32)
    parts = torch.stack([whole.q, whole.k, whole.v], dim=2).unbind(2)
    Case(*parts, whole.k_cache, whole.v_cache, whole.table).check(70, 70)  # type: ignore[call-arg]
    cut = (t[:, 3:15] for t in parts)  # now branches do not follow each other
    Case(*cut, whole.k_cache, whole.v_cache, whole.table).check(70, 70)  # type: ignore[call-arg]
    turned = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in parts)
    Case(*turned, whole.k_cache, whole.v_cache, whole.table).check(70, 70)  # type: ignore[call-arg]


def test_a_cache_that_is_not_contiguous_is_refused() -> None:
    broken = case(17, 22, 32, torch.float32)
    broken.v_cache = broken.v_cache.transpose(0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        broken.attend([1, 1])


def test_large_scores_do_not_overflow() -> None:
    large = case(17, 22, 32, torch.float32)
    large.q *= 300  # scores of 1500
    large.check(75, 75)


def test_table_and_length_are_read_at_every_call() -> None:
    one = case(17, 22, 32, torch.float32)
    for fill, order in ((110, 1), (47, -1), (3, 1)):
        one.table[:, :5] = torch.tensor([table[::order] for table in TABLES])
        one.check(fill, fill)


def test_as_the_backend_of_a_cache() -> None:
    """Written and attended through the operator, with blocks in runs and in pieces."""
    cache = KVCache(GEOMETRY, POLICY, plan_budget(GEOMETRY, POLICY, bytes_for(2)), CPU, "triton")
    kinds = check_against_float64(cache, 8, CPU, torch.float32, 1e-5)
    assert min(kinds.values()) > 5
