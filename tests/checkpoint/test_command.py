"""`python -m engine.checkpoint`: inspect, synthesize, verify."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checkpoint.__main__ import main
from engine.checkpoint.error import CheckpointError
from engine.checkpoint.files import read_header
from engine.checkpoint.footprint import GIB, footprint
from engine.checkpoint.open import read_files
from engine.checkpoint.synthetic import BUILTIN_CONFIGS, release_shapes, synthesize
from engine.model.config import parse_config
from engine.settings import EngineSettings
from kv_cache.sizing import plan_budget
from tests.checkpoints import actions_of, change_weights, droid_shapes, headers_alone, tiny_checkpoint

SMALL_BACKBONE = {
    "action_head_cfg": {
        "config": {
            "target_video_height": 160,
            "target_video_width": 320,
            "diffusion_model_cfg": {
                "model_type": "ti2v", "dim": 3072, "num_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_dim": 48,
                "out_dim": 48, "frame_seqlen": 50, "concat_first_frame_latent": False,
            },
            "vae_cfg": {"_target_": "somewhere.WanVideoVAE38"},
        }
    }
}  # fmt: skip
"""Wan2.2-TI2V-5B at its own size."""


def run(*arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and what was printed."""
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_inspect_of_the_14b_layout_reads_headers_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = headers_alone(tmp_path / "droid", {"action_head_cfg": {"config": {}}}, droid_shapes(), files=10)
    assert sum(path.stat().st_size for path in directory.glob("*.safetensors")) > 45e9
    assert sum(path.stat().st_blocks for path in directory.glob("*.safetensors")) * 512 < 10e6
    started = time.monotonic()
    code, printed = run("inspect", directory, "--gpu-gib", "80", "--gpu-gib", "24", capsys=capsys)
    assert time.monotonic() - started < 30
    assert code == 0
    words = [line.split() for line in printed.splitlines()]
    assert ["DiT", "16.48", "B", "30.70", "GiB", "BF16"] in words
    assert ["text", "encoder", "5.68", "B", "10.58", "GiB", "BF16"] in words
    assert ["image", "encoder", "0.63", "B", "1.18", "GiB", "BF16"] in words
    assert ["VAE", "0.13", "B", "0.24", "GiB", "BF16"] in words
    for line in (
        "2146 entries in 10 files",
        "i2v: width 5120, 40 heads, 40 layers, 880 tokens a latent frame, window of 9 frames",
        "camera view    176x320",
        "LoRA           no",
        "embodiments    oxe_droid",
        "relative       as the embodiment says",
        "not used       4 entries, as in the release",
        "unknown        none",
        "problems       none",
        "weights            40.74 GiB   (and 1.96 GiB in the host's memory)",
        "card of 80 GiB    fits, 2 sessions at once",
        "card of 24 GiB    too small: needs ",
    ):
        assert line in printed


@pytest.mark.slow
def test_inspect_says_what_smaller_weights_on_the_gpu_make_room_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = headers_alone(tmp_path / "droid", {"action_head_cfg": {"config": {}}}, droid_shapes(), files=10)
    cards = [word for card in ("24", "44.4", "48", "79.1", "139.8") for word in ("--gpu-gib", card)]
    _, printed = run("inspect", directory, *cards, capsys=capsys)
    plain, fp8, small = re.split(r"\nwith .*\n", printed.split("GPU memory of serving in bfloat16\n")[1])
    assert "card of 48 GiB    too small: needs 58.81 GiB" in plain
    assert "card of 79.1 GiB  fits, 2 sessions at once" in plain  # sold as 80 GB
    assert "card of 139.8 GiB fits, 7 sessions at once" in plain  # an H200
    assert "weights            25.71 GiB   (and 1.96 GiB in the host's memory)" in fp8
    assert "card of 44.4 GiB  fits, 1 session at once" in fp8  # sold as 48 GB
    assert "card of 24 GiB    too small: needs 43.78 GiB" in fp8
    assert "weights            17.09 GiB   (and 10.58 GiB in the host's memory)" in small
    assert "CUDA graphs         2.38 GiB   (none with --execution eager)" in small
    assert "card of 48 GiB    fits, 2 sessions at once" in small
    assert "card of 24 GiB    too small: needs 35.16 GiB" in small
    assert "card of 79.1 GiB  fits, 4 sessions at once" in small


def test_inspect_says_that_the_small_backbone_fits_24_gib(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config(SMALL_BACKBONE)
    directory = headers_alone(tmp_path / "small", SMALL_BACKBONE, release_shapes(config), files=6)
    code, printed = run("inspect", directory, capsys=capsys)
    assert code == 0
    assert "problems       none" in printed
    plain, _, small = re.split(r"\nwith .*\n", printed.split("GPU memory of serving in bfloat16\n")[1])
    assert "card of 24 GiB    fits with --execution eager, 1 session at once" in plain
    assert "card of 24 GiB    fits, " in small
    assert "ti2v: width 3072, 24 heads, 30 layers, 50 tokens a latent frame" in printed


def test_inspect_lists_what_is_unknown_and_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = droid_shapes()
    shapes["action_head.model.extra.weight"] = (3, 3)
    del shapes["action_head.model.patch_embedding.bias"]
    directory = headers_alone(tmp_path / "droid", {"action_head_cfg": {"config": {}}}, shapes, files=1)
    code, printed = run("inspect", directory, capsys=capsys)
    assert code == 0
    assert "unknown        1: action_head.model.extra.weight" in printed
    assert "problems       1: " in printed
    assert "has no entry 'action_head.model.patch_embedding.bias', expected with shape [5120]" in printed


def test_a_footprint_counts_what_serving_will_hold() -> None:
    config = parse_config(BUILTIN_CONFIGS["tiny"])
    need = footprint(config)
    shapes = release_shapes(config)
    used = sum(np.prod(shape) for name, shape in shapes.items() if "post_norm" not in name)
    used -= np.prod(shapes["action_head.image_encoder.model.visual.head"]) + 1
    assert need.host_weights == 2 * 384 * 64
    assert need.weights + need.host_weights == 2 * used
    frame = 64 * 128 * 16 * 2  # a frame of the VAE's first feature map
    assert 4 * frame < need.activations < 100 * frame
    assert frame < need.steady < 20 * frame
    cross = 2 * need.geometry.text_bytes + need.geometry.image_bytes
    assert need.graphs == cross + need.activations
    budget = plan_budget(need.geometry, need.window, need.session)
    assert budget.sessions == 1
    assert need.sessions(need.needed + 1) == 1
    assert need.sessions(need.needed - 2**20) == 0
    text = sum(np.prod(shape) for name, shape in shapes.items() if ".text_encoder." in name)
    smaller = footprint(config, text_encoder_on_host=True)
    assert smaller.host_weights == 2 * text
    assert smaller.weights + smaller.host_weights == 2 * used
    assert need.needed - smaller.needed == need.weights - smaller.weights == 2 * text - need.host_weights
    share = EngineSettings().kv_fraction
    for card in (2 * GIB, 4 * GIB):
        free = share * (card - (need.needed - need.session / share))
        assert need.sessions(card) == plan_budget(need.geometry, need.window, int(free)).sessions


@pytest.mark.slow
def test_synthesize_writes_what_can_be_served_and_verified(tmp_path: Path) -> None:
    """As a user does it, in processes of their own."""
    command = [sys.executable, "-m", "engine.checkpoint"]
    subprocess.run([*command, "synthesize", "--size", "wan22-tiny", tmp_path / "made"], check=True, timeout=120)
    np.testing.assert_array_equal(actions_of(tmp_path / "made"), actions_of("wan22-tiny"))
    checked = subprocess.run([*command, "verify", tmp_path / "made"], capture_output=True, text=True, timeout=120)
    assert (checked.returncode, checked.stdout) == (0, f"{tmp_path / 'made'}: no problems\n")


def test_synthesize_shards_large_ones_and_keeps_the_release_s_names(tmp_path: Path) -> None:
    synthesize("tiny", tmp_path / "made", torch.bfloat16, shard_bytes=3 * 10**6)
    files = sorted((tmp_path / "made").glob("*.safetensors"))
    assert [file.name for file in files[:2]] == [f"model-0000{i}-of-0000{len(files)}.safetensors" for i in (1, 2)]
    assert all(file.stat().st_size < 3.1e6 for file in files)
    entries = {name: stored for file in files for name, stored in read_header(file).items()}
    assert {stored.dtype for stored in entries.values()} == {"BF16"}
    # Block numbers aside, the names are those of the released checkpoint.
    assert entries.keys() < droid_shapes().keys()
    assert read_files(str(tmp_path / "made")).training.view_height == 32


def test_droid_2l_has_droid_s_widths_and_two_layers() -> None:
    config = parse_config(BUILTIN_CONFIGS["droid-2l"])
    released = droid_shapes()
    shapes = release_shapes(config)
    differing = {name for name, shape in shapes.items() if released[name] != shape}
    assert differing == {"action_head.text_encoder.token_embedding.weight"}
    assert {name.split(".")[3] for name in shapes if name.startswith("action_head.model.blocks.")} == {"0", "1"}


def test_synthesize_does_not_write_over_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("mine")
    code, printed = run("synthesize", tmp_path, capsys=capsys)
    assert code == 2
    assert "is not empty" in printed
    assert (tmp_path / "config.json").read_text() == "mine"
    with pytest.raises(CheckpointError, match="is not empty"):
        synthesize("tiny", tmp_path)


def test_verify_lists_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_checkpoint(tmp_path / "tiny")

    def harm(tensors: dict[str, torch.Tensor]) -> None:
        tensors["action_head.model.blocks.0.self_attn.q.weight"][0, 0] = float("nan")
        tensors["action_head.image_encoder.model.visual.head"][0, 0] = float("inf")
        tensors["action_head.model.blocks.1.ffn.0.bias"] = torch.zeros(3)
        del tensors["action_head.vae.model.conv1.bias"]

    change_weights(directory, harm)
    code, printed = run("verify", directory, capsys=capsys)
    assert code == 1
    lines = printed.splitlines()
    assert len(lines) == 5
    for problem in (
        "entry 'action_head.model.blocks.0.self_attn.q.weight' holds NaN or infinite values",
        "entry 'action_head.image_encoder.model.visual.head' holds NaN or infinite values",
        "entry 'action_head.model.blocks.1.ffn.0.bias' has shape [3], expected [256]",
        "has no entry 'action_head.vae.model.conv1.bias'",
    ):
        assert sum(problem in line for line in lines) == 1
    assert lines[-1] == f"{directory}: 4 problems"


def test_values_whose_sum_overflows_are_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_checkpoint(tmp_path / "tiny")
    change_weights(directory, lambda tensors: tensors["action_head.model.blocks.0.ffn.0.weight"].fill_(1e38))
    assert run("verify", directory, capsys=capsys)[0] == 0


def test_a_checkpoint_that_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_checkpoint(tmp_path / "tiny")
    (directory / "config.json").write_text(json.dumps({"model_type": "vla"}))
    for command, code in (("inspect", 2), ("verify", 1)):
        got, printed = run(command, directory, capsys=capsys)
        assert got == code
        assert "config.json needs a map 'action_head_cfg'" in printed
