"""FlashAttention 4 without a GPU: its kernels are really compiled, over pages of a latent frame's 880 tokens."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from kv_cache.attention import together
from tests.fake_cuda import FLASH_ATTN_4_FOR_HOPPER

PROGRAM = """
import torch
from kv_cache.attention import flash_attn_4
from tests.fake_cuda import fake_cuda
with fake_cuda(capability=(9, 0)):
    half = {"dtype": torch.bfloat16, "device": "cuda"}
    table = torch.empty(2, 8, dtype=torch.int32, device="cuda")
    caches = [torch.empty(60, 880, 40, 128, **half) for _ in range(2)]
    for tokens in (880, 2 * 880 + 25):
        whole = torch.empty(2, tokens, 3, 40, 128, **half)
        out = flash_attn_4(*whole.unbind(2), *caches, table, table[:, 0].contiguous())
        print(tuple(out.shape), out.dtype, out.device.type, out.is_contiguous())
"""


@pytest.mark.slow
def test_its_kernels_are_compiled_for_hopper_over_the_pool_as_it_is() -> None:
    """Everything but the launch runs: the package's own checks of every argument, its choice of tiles, its compiler."""
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("needs flash-attn-4")
    environment = {**os.environ, **FLASH_ATTN_4_FOR_HOPPER}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"(2, {tokens}, 40, 128) torch.bfloat16 cuda True" for tokens in (880, 2 * 880 + 25)
    ]


def test_attention_in_two_parts_is_that_over_both() -> None:
    """Scores are such that some queries look at the window alone, some at the current tokens; one window is empty."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 7, 4, 16, dtype=torch.float64)
    keys, values = torch.randn(2, 2, 20, 4, 16, dtype=torch.float64)
    q[:, ::2] *= 20

    def attention(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) / 4
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values).float(), scores.logsumexp(-1).float()

    window, weight = attention(keys, values)
    window[1], weight[1] = 0, float("-inf")
    got = together(window, weight, *attention(k, v), torch.tensor([20, 0], dtype=torch.int32))
    expected, _ = attention(torch.cat([keys, k], 1), torch.cat([values, v], 1))
    torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=0)
    assert torch.equal(got[1], attention(k, v)[0][1])
