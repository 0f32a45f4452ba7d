"""A backend that is wrong on this machine is found before it serves."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kv_cache import attention
from kv_cache.self_check import BackendError, check_backend
from kv_cache.window import WindowPolicy
from tests.kv import GEOMETRY

CPU = torch.device("cpu")


def test_what_agrees_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[tuple[list[int], int]] = []

    def other(*inputs: Tensor) -> Tensor:
        looked_at.append((inputs[-1].tolist(), inputs[1].shape[1]))
        return by_sdpa(*inputs)

    monkeypatch.setattr(attention, "_triton", other)
    check_backend(GEOMETRY, WindowPolicy(9), CPU, "triton")
    size, registers = GEOMETRY.frame_tokens, GEOMETRY.register_tokens
    assert looked_at == [
        ([8 * size] * 2, size),
        ([0, 0], size),
        ([7 * size] * 2, 2 * size),
        ([7 * size] * 2, 2 * size + registers),
    ]


@pytest.mark.parametrize("wrong", [lambda out: out * 1.1, lambda out: out.roll(1, dims=2), lambda out: out * torch.nan])
def test_what_does_not_agree_is_refused(monkeypatch: pytest.MonkeyPatch, wrong) -> None:
    monkeypatch.setattr(attention, "_triton", lambda *inputs: wrong(by_sdpa(*inputs)))
    with pytest.raises(BackendError, match=r"'triton' differs from SDPA .* --attention-backend sdpa"):
        check_backend(GEOMETRY, WindowPolicy(9), CPU, "triton")


def by_sdpa(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, visible: Tensor
) -> Tensor:
    """What a backend that reads table and length where they are is to give."""
    results = []
    for branch, seen in enumerate(visible.tolist()):
        keys, values = (
            torch.cat([cache[table[branch]].flatten(0, 1)[:seen], now[branch]]).transpose(0, 1)
            for cache, now in ((k_cache, k), (v_cache, v))
        )
        results.append(scaled_dot_product_attention(q[branch].transpose(0, 1), keys, values).transpose(0, 1))
    return torch.stack(results)
