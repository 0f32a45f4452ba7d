"""Checkpoints on disk in the release's layout, and what is wrong with those that cannot be loaded."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.builtin import BUILTIN_CONFIGS, BUILTIN_STATISTICS
from engine.config import ConfigError, parse_config
from engine.embodiment import Observation
from engine.model import build_model
from engine.policy import PolicyLoadError, load_policy
from engine.settings import EngineSettings
from engine.synthetic import synthetic_tensor

TINY = BUILTIN_CONFIGS["tiny"]


def release_entries() -> dict[str, tuple[int, ...]]:
    """Every entry of a tiny checkpoint, those included that no forward uses."""
    entries = {
        entry.name: entry.shape
        for _, component in build_model(parse_config(TINY)).components()
        for entry in component.values()
    }
    return entries | {
        "action_head.image_encoder.model.visual.head": (64, 32),
        "action_head.image_encoder.model.visual.post_norm.weight": (64,),
        "action_head.image_encoder.model.log_scale": (),
    }


def write_checkpoint(directory: Path, shards: int = 1) -> Path:
    """A tiny checkpoint in the release's layout, in one file or several with an index."""
    (directory / "experiment_cfg").mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(TINY))
    (directory / "experiment_cfg" / "metadata.json").write_text(json.dumps(BUILTIN_STATISTICS))
    tensors = {name: synthetic_tensor(name, shape).contiguous() for name, shape in release_entries().items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def observation() -> Observation:
    frame = np.arange(180 * 320 * 3, dtype=np.uint32).astype(np.uint8).reshape(1, 180, 320, 3)
    views = dict.fromkeys(("wrist", "exterior_left", "exterior_right"), frame)
    return Observation(views, np.zeros(7), np.zeros(1), "pick up the block")


def actions_of(checkpoint: str | Path) -> np.ndarray:
    settings = EngineSettings(checkpoint=str(checkpoint), device="cpu", steps=2)
    return load_policy(settings, lambda _: None).infer("robot", observation()).actions


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_on_disk_gives_the_actions_of_the_one_in_memory(tmp_path: Path, shards: int) -> None:
    written = write_checkpoint(tmp_path / "tiny", shards)
    np.testing.assert_array_equal(actions_of(written), actions_of("tiny"))


def test_entries_that_no_forward_uses_are_counted_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    actions_of(write_checkpoint(tmp_path / "tiny"))
    assert f"3 of {len(release_entries())} checkpoint entries are not used" in caplog.text


def break_file(directory: Path, what: str) -> None:
    weights = directory / "model.safetensors"
    if what == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif what == "no weights":
        weights.unlink()
    elif what == "pickle":
        torch.save({"a": torch.zeros(1)}, weights)
    elif what == "no config":
        (directory / "config.json").unlink()
    elif what == "config is no JSON":
        (directory / "config.json").write_text("{")
    elif what == "no action_head_cfg":
        (directory / "config.json").write_text("{}")
    elif what == "no metadata":
        (directory / "experiment_cfg" / "metadata.json").unlink()
    elif what in ("missing entry", "wrong shape"):
        tensors = {name: synthetic_tensor(name, shape).contiguous() for name, shape in release_entries().items()}
        name = "action_head.model.blocks.1.ffn.0.weight"
        tensors[name] = tensors[name][:, 1:].contiguous()
        if what == "missing entry":
            del tensors[name]
        save_file(tensors, weights)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("truncated", r"model\.safetensors is not a whole safetensors file"),
        ("pickle", r"model\.safetensors is not a whole safetensors file"),
        ("no weights", r"model\.safetensors is missing"),
        ("no config", r"config\.json is missing"),
        ("config is no JSON", r"config\.json cannot be read as JSON"),
        ("no action_head_cfg", r"config\.json needs a map 'action_head_cfg'"),
        ("no metadata", r"metadata\.json is missing"),
        ("missing entry", r"has no entry 'action_head\.model\.blocks\.1\.ffn\.0\.weight'"),
        (
            "wrong shape",
            r"'action_head\.model\.blocks\.1\.ffn\.0\.weight' has shape \[256, 127\], expected \[256, 128\]",
        ),
    ],
)
def test_a_broken_checkpoint_is_one_clear_line(tmp_path: Path, what: str, message: str) -> None:
    directory = write_checkpoint(tmp_path / "tiny")
    break_file(directory, what)
    with pytest.raises(PolicyLoadError, match=message) as error:
        actions_of(directory)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint": "no/such/place"}, r"neither built in \(mid, tiny\) nor a directory"),
        ({"device": "toaster"}, "not a torch device"),
        ({"step_cache": "mask-8", "steps": 4}, "made for 16 steps"),
        ({"kv_bytes": 1000}, r"one session needs .* MiB"),
    ],
)
def test_settings_that_cannot_be_met_are_one_clear_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyLoadError, match=message):
        load_policy(EngineSettings(**settings), lambda _: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("diffusion_model_cfg.model_type", "t2v", "must be 'i2v' or 'ti2v'"),
        ("diffusion_model_cfg.dim", "wide", "dim must be a number"),
        ("diffusion_model_cfg.num_heads", 5, "does not divide into 5 heads"),
        ("diffusion_model_cfg.frame_seqlen", 33, "view size does not fit"),
        ("diffusion_model_cfg.in_dim", 20, "do not fit a VAE of 16 channels"),
        ("text_encoder_cfg.dim", 63, "is not diffusion_model_cfg.text_dim"),
    ],
)
def test_sizes_that_do_not_fit_are_named(path: str, value: object, message: str) -> None:
    config = json.loads(json.dumps(TINY))
    section, key = path.split(".")
    config["action_head_cfg"]["config"][section][key] = value
    with pytest.raises(ConfigError, match=message):
        parse_config(config)
