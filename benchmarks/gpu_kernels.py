"""What single kernels do at a model's sizes: matrix products, and attention of both branches by each backend."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_report import Verdict, begin_table, show_row
from engine.model.config import ModelConfig
from engine.model.fp8 import quantize_rows
from engine.startup import kv_geometry
from kv_cache.attention import AttentionPlan, attend, available_backends
from kv_cache.paged_kv import PagedKV

LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Of attention, as a share of the largest value of the exact result, whose inputs are of unit variance.

bfloat16 rounds to 4e-3 once in the weights and once in the result. float32 sums 8,000 products to about 1e-6; 1e-4
leaves room for any order of the sums, and none for products in TF32, which are off by 1e-3.
"""


def timed(work: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Median seconds of `work`, after three runs to warm up."""
    seconds = []
    for _ in range(3 + repeats):
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[3:])


def matmul_rates(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """FLOPs a second of the feed-forward's first product, for both branches' tokens, in `dtype` and in float8."""
    dit = config.dit
    rows = 2 * (dit.num_frame_per_block * dit.frame_seqlen + dit.register_tokens)
    a = torch.randn(rows, dit.dim, device=device, dtype=dtype)
    b = torch.randn(dit.ffn_dim, dit.dim, device=device, dtype=dtype)
    (a8, a_scale), (b8, b_scale) = quantize_rows(a), quantize_rows(b)

    def product8() -> Tensor:
        scales = {"scale_a": a_scale[:, None], "scale_b": b_scale[None]}
        return torch._scaled_mm(a8, b8.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    flops = 2 * rows * dit.dim * dit.ffn_dim
    return {"model": flops / timed(lambda: a @ b.t(), device), "fp8": flops / timed(product8, device)}


def compare_attention(config: ModelConfig, device: torch.device, dtype: torch.dtype, verdict: Verdict) -> None:
    """A row for each backend over a full window, in a run of blocks and in pieces: errors against float64, and ms."""
    geometry = kv_geometry(config, dtype)
    frames, branches = config.dit.window_frames, geometry.branches
    resident = frames - geometry.frames_per_forward
    largest = LARGEST_ERROR[dtype]
    begin_table(
        f"attention over a full window, largest error over largest value (at most {largest:.0e})",
        "in a run", "in pieces", "ms in a run", "in pieces",
    )  # fmt: skip
    shape = (2 * branches * resident, geometry.frame_tokens, geometry.heads, geometry.head_dim)
    k_cache, v_cache = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    length = geometry.frames_per_forward * geometry.frame_tokens + geometry.register_tokens
    q, k, v = torch.randn(3, branches, length, geometry.heads, geometry.head_dim, device=device, dtype=dtype)
    for backend in available_backends(device, dtype):
        with verdict.attempt(f"attention by {backend}"):
            errors, millis = [], []
            for stride in (1, 2):  # neighbours, and every other block
                windows = [[stride * (branch * resident + at) for at in range(resident)] for branch in range(branches)]
                plan = PagedKV(geometry, 1, device, backend).plan(windows, [[]] * branches, frames)
                work = partial(attend, q, k, v, k_cache, v_cache, plan, backend)
                got, exact = work()[:, :, :2].double(), _reference(q, k, v, k_cache, v_cache, plan)
                errors.append(float((got - exact).abs().max() / exact.abs().max()))
                millis.append(1e3 * timed(work, device))
            show_row(backend, *(f"{error:.1e}" for error in errors), *(f"{ms:.2f}" for ms in millis))
            verdict.hold(f"attention by {backend}", max(errors), largest)


def _reference(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan) -> Tensor:
    """In float64, of the first two heads: (B, L, 2, head_dim)."""
    seen = int(plan.visible[0])
    keys, values = (
        torch.cat([cache[plan.table.long()].flatten(1, 2)[:, :seen], now], dim=1)[:, :, :2].double().transpose(1, 2)
        for cache, now in ((k_cache, k), (v_cache, v))
    )
    scores = q[:, :, :2].double().transpose(1, 2) @ keys.transpose(2, 3) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ values).transpose(1, 2)


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was told; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
