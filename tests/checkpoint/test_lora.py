"""LoRA fine-tunes: whatever names their entries have, they serve what the merged weights do."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint.__main__ import main
from engine.checkpoint.lora import merge
from engine.checkpoint.names import DIT
from engine.startup import PolicyLoadError
from tests.checkpoints import (
    WRAPPED,
    actions_of,
    change_json,
    change_weights,
    fine_tune,
    head_config,
    merged,
    tiny_checkpoint,
)

Change = Callable[[dict[str, Tensor]], object]

Q = "blocks.0.self_attn.q"


@pytest.fixture(scope="module")
def merged_actions(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    actions = actions_of(merged(tmp_path_factory.mktemp("merged") / "merged"))
    assert np.abs(actions - actions_of("tiny")).max() > 0.01
    return actions


@pytest.mark.parametrize(
    ("base_layer", "adapter", "where"),
    [(".base_layer", ".default", "head"), ("", "", "head"), ("", ".default", "dit"), (".base_layer", "", "head")],
)
def test_a_fine_tune_that_holds_its_base(
    tmp_path: Path, merged_actions: np.ndarray, base_layer: str, adapter: str, where: str
) -> None:
    directory = fine_tune(tmp_path / "lora", base_layer=base_layer, adapter=adapter, where=where)
    np.testing.assert_array_equal(actions_of(directory), merged_actions)


def test_adapters_over_a_base_checkpoint(tmp_path: Path, merged_actions: np.ndarray) -> None:
    directory, base = fine_tune(tmp_path / "lora", base_weights=False), tiny_checkpoint(tmp_path / "base")
    np.testing.assert_array_equal(actions_of(directory, base_checkpoint=str(base)), merged_actions)


def test_what_a_fine_tune_trained_in_full_replaces_the_base_s(tmp_path: Path) -> None:
    """Adapters of zeros over the base, and a bias of its own: only the bias differs from the base."""
    name = "blocks.1.ffn.0.bias"

    def own_bias(tensors: dict[str, Tensor]) -> None:
        tensors[WRAPPED + name.replace("ffn.0", "ffn.0.base_layer")] = torch.ones(256)
        for entry in tensors:
            if "lora_B" in entry:
                tensors[entry] = torch.zeros_like(tensors[entry])

    directory, base = fine_tune(tmp_path / "lora", base_weights=False), tiny_checkpoint(tmp_path / "base")
    change_weights(directory, own_bias)
    actions = actions_of(directory, base_checkpoint=str(base))
    assert not np.array_equal(actions, actions_of("tiny"))
    change_weights(base, lambda tensors: tensors.update({DIT + name: torch.ones(256)}))
    np.testing.assert_array_equal(actions, actions_of(base))


def test_merging_in_bfloat16_files_rounds_once(tmp_path: Path) -> None:
    """B A is added in float32: a change far below a bfloat16 step of W is not lost before the cast."""
    weight = torch.full((4, 4), 1.0, dtype=torch.bfloat16)
    a, b = torch.full((1, 4), 2.0**-6, dtype=torch.bfloat16), torch.full((4, 1), 2.0**-6, dtype=torch.bfloat16)
    out = merge(weight, a, b, 0.5)
    assert out.dtype == torch.float32
    assert torch.equal(out, torch.full((4, 4), 1 + 2.0**-13))


A, B = f"{WRAPPED}{Q}.lora_A.weight", f"{WRAPPED}{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(B), rf"entry '{A}' is half an adapter: its lora_B is missing"),
        (lambda t: t.pop(A), rf"entry '{B}' is half an adapter: its lora_A is missing"),
        (
            lambda t: t.update({A: torch.zeros(2, 128), B: torch.zeros(128, 2)}),
            rf"entry '{A}' has shape \[2, 128\], expected \[4, 128\] at 'lora_rank' 4",
        ),
        (
            lambda t: t.update({B: torch.zeros(64, 4)}),
            rf"entry '{B}' has shape \[64, 4\], expected \[128, 4\] at 'lora_rank' 4",
        ),
        (
            lambda t: t.update({WRAPPED + "nowhere.lora_A.weight": t[A], WRAPPED + "nowhere.lora_B.weight": t[B]}),
            r"entry '.*nowhere\.lora_A\.weight' adapts 'action_head\.model\.nowhere\.weight', which the model does not",
        ),
        (
            lambda t: t.update(
                {WRAPPED + "patch_embedding.lora_A.weight": t[A], WRAPPED + "patch_embedding.lora_B.weight": t[B]}
            ),
            r"patch_embedding\.lora_A\.weight' adapts .* of shape \[128, 36, 1, 2, 2\], expected a matrix",
        ),
        (
            lambda t: t.update({WRAPPED + Q + ".lora_magnitude_vector": t[A]}),
            r"lora_magnitude_vector': expected a LoRA entry to end in \.lora_A",
        ),
        (
            lambda t: t.update({f"{WRAPPED}{Q}.weight": torch.zeros(128, 128)}),
            rf"'{WRAPPED}{Q}\.(base_layer\.)?weight'.* stand for the same weight",
        ),
        (
            lambda t: t.pop(f"{WRAPPED}{Q}.base_layer.weight"),
            rf"entry '{A}' adapts '{DIT}{Q}\.weight', but there is no such weight: --base-checkpoint must",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_named(tmp_path: Path, change: Change, message: str) -> None:
    directory = fine_tune(tmp_path / "lora")
    change_weights(directory, change)
    with pytest.raises(PolicyLoadError, match=message) as error:
        actions_of(directory)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sizes", [{}, {"lora_rank": 4}, {"lora_alpha": 4}, {"lora_rank": 0, "lora_alpha": 4}])
def test_adapters_need_rank_and_alpha_in_the_config(tmp_path: Path, sizes: dict[str, int]) -> None:
    directory = fine_tune(tmp_path / "lora")
    change_json(
        directory / "config.json",
        lambda config: (
            [head_config(config).pop(key) for key in ("lora_rank", "lora_alpha")] and head_config(config).update(sizes)
        ),
    )
    with pytest.raises(PolicyLoadError, match=r"config\.json must hold 'lora_rank' and 'lora_alpha'"):
        actions_of(directory)


def test_a_base_of_other_sizes_is_refused(tmp_path: Path) -> None:
    """As many heads decide how weights of one shape are used, so shapes alone do not tell."""
    directory, base = fine_tune(tmp_path / "lora", base_weights=False), tiny_checkpoint(tmp_path / "base")
    change_json(base / "config.json", lambda c: head_config(c)["diffusion_model_cfg"].update(num_heads=2))
    with pytest.raises(
        PolicyLoadError,
        match=r"lora/config\.json has other sizes in 'diffusion_model_cfg' than .*base/config\.json, its base",
    ):
        actions_of(directory, base_checkpoint=str(base))


def test_a_base_that_is_a_fine_tune_itself_is_refused(tmp_path: Path) -> None:
    directory = fine_tune(tmp_path / "lora")
    with pytest.raises(PolicyLoadError, match="is a LoRA fine-tune itself"):
        actions_of(directory, base_checkpoint=str(directory))


def test_inspect_and_verify_know_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, base = fine_tune(tmp_path / "lora", base_weights=False), tiny_checkpoint(tmp_path / "base")
    flags = [str(directory), "--base-checkpoint", str(base)]
    assert main(["inspect", *flags]) == 0
    assert "LoRA           30 adapters of rank 4, alpha 6, merged when loaded" in capsys.readouterr().out
    assert main(["verify", *flags]) == 0
    tensors = load_file(directory / "model.safetensors")
    tensors[A][0, 0] = float("nan")
    save_file(tensors, directory / "model.safetensors")
    capsys.readouterr()
    assert main(["verify", *flags]) == 1
    assert f"entry '{A}' holds NaN" in capsys.readouterr().out
