"""A backend that is wrong on this machine is found before it serves."""

import pytest
import torch
from torch import Tensor

from kv_cache import attention
from kv_cache.self_check import BackendError, check_backend
from kv_cache.window import WindowPolicy
from tests.kv import GEOMETRY

CPU = torch.device("cpu")


def test_what_agrees_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[tuple[int, int]] = []

    def other(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        looked_at.append((q.shape[1], keys.shape[0]))
        return attention._sdpa(q, keys, values)

    monkeypatch.setattr(attention, "_flash_attn_2", other)
    check_backend(GEOMETRY, WindowPolicy(9), CPU, "flash-attn-2")
    size, registers = GEOMETRY.frame_tokens, GEOMETRY.register_tokens
    window = 9 * size
    assert looked_at == [(size, window), (2 * size, window), (2 * size + registers, window + registers)]


@pytest.mark.parametrize("wrong", [lambda out: out * 1.1, lambda out: out.roll(1, dims=2), lambda out: out * torch.nan])
def test_what_does_not_agree_is_refused(monkeypatch: pytest.MonkeyPatch, wrong) -> None:
    monkeypatch.setattr(attention, "_flash_attn_2", lambda *qkv: wrong(attention._sdpa(*qkv)))
    with pytest.raises(BackendError, match=r"'flash-attn-2' differs from SDPA .* --attention-backend sdpa"):
        check_backend(GEOMETRY, WindowPolicy(9), CPU, "flash-attn-2")
