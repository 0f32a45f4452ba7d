"""Checkpoints that cannot be used: each is one line that names the file, the entry and the expectation."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.error import CheckpointError
from engine.checkpoint.files import read_header
from engine.checkpoint.open import open_checkpoint, read_files
from engine.checkpoint.synthetic import BUILTIN_CONFIGS, release_shapes, synthetic_tensor, write_weights
from engine.model.config import ConfigError, parse_config
from engine.model.weights import build_model
from engine.settings import EngineSettings
from engine.startup import PolicyLoadError, load_policy
from tests.checkpoints import actions_of, change_json, change_weights, head_config, tiny_checkpoint
from tests.process import LOADING, server

TINY = BUILTIN_CONFIGS["tiny"]
ENTRY = "action_head.model.blocks.1.ffn.0.weight"
IN_FILE = rf"model\.safetensors: entry '{ENTRY}' ".replace("blocks.1", r"blocks\.1")
Break = Callable[[Path], object]


def truncate(directory: Path) -> None:
    weights = directory / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)


def truncate_header(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 1000)


def pickle_inside(directory: Path) -> None:
    torch.save({"a": torch.zeros(1)}, directory / "model.safetensors")


def pickle_beside(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, directory / "pytorch_model.bin")


def index(weight_map: object) -> Break:
    def write(directory: Path) -> None:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    return lambda directory: change_weights(directory, change)


def config(change: Callable[[dict[str, Any]], object]) -> Break:
    return lambda directory: change_json(directory / "config.json", change)


def fifo(name: str) -> Break:
    def make(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return make


def q01(numbers: list[Any]) -> Break:
    return lambda directory: change_json(
        directory / "experiment_cfg" / "metadata.json",
        lambda m: m["oxe_droid"]["statistics"]["state"]["joint_position"].update(q01=numbers),
    )


def nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[ENTRY][3, 5] = float("nan")


def infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["action_head.image_encoder.model.visual.transformer.0.attn.to_qkv.bias"][70] = float("inf")


CASES: dict[str, tuple[Break, str]] = {
    "truncated": (truncate, r"model\.safetensors is cut off: [\d,]+ bytes of the [\d,]+ .* entry '.+' is not whole"),
    "truncated header": (truncate_header, r"model\.safetensors is no whole safetensors file: its 1,000 bytes end"),
    "no safetensors": (
        lambda d: (d / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0[]"),
        r"model\.safetensors is no safetensors file: its header cannot be read",
    ),
    "pickle inside": (pickle_inside, r"model\.safetensors holds a pickle, .* never read: safetensors expected"),
    "pickle beside": (pickle_beside, r"weights in pickles \(pytorch_model\.bin\), .* model\.safetensors .* expected"),
    "pickle in the index": (
        index({ENTRY: "pytorch_model-00001-of-00002.bin"}),
        r"index\.json names the file pytorch_model-00001-of-00002\.bin for entry",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"model\.safetensors is missing"),
    "missing shard": (
        index({ENTRY: "model-00001-of-00002.safetensors"}),
        rf"index\.json names the file model-00001-of-00002\.safetensors for entry '{ENTRY}', but it is missing",
    ),
    "entry not in shard": (
        index({"action_head.model.nowhere": "model.safetensors"}),
        r"model\.safetensors has no entry 'action_head\.model\.nowhere', which model\.safetensors\.index\.json expects",
    ),
    "index elsewhere": (
        index({ENTRY: "../model.safetensors"}),
        r"must name a file beside the index, found '\.\./model\.safetensors'",
    ),
    "index empty": (index({}), r"index\.json must hold an object 'weight_map'"),
    "missing entry": (weights(lambda t: t.pop(ENTRY)), rf"has no entry '{ENTRY}', expected with shape \[256, 128\]"),
    "wrong shape": (
        weights(lambda t: t.update({ENTRY: t[ENTRY][:, 1:]})),
        IN_FILE + r"has shape \[256, 127\], expected \[256, 128\]",
    ),
    "wrong dtype": (
        weights(lambda t: t.update({ENTRY: t[ENTRY].int()})),
        IN_FILE + "has dtype I32, expected one of F64, F32, F16, BF16",
    ),
    "NaN": (weights(nan), IN_FILE + "holds NaN or infinite values"),
    "infinite": (weights(infinite), r"transformer\.0\.attn\.to_qkv\.bias' holds NaN or infinite values"),
    "weights are a FIFO": (fifo("model.safetensors"), r"model\.safetensors cannot be read: it is no regular file"),
    "config is a FIFO": (fifo("config.json"), r"config\.json cannot be read as JSON: it is no regular file"),
    "statistics are a FIFO": (
        fifo("experiment_cfg/metadata.json"),
        r"metadata\.json cannot be read as JSON: it is no regular file",
    ),
    "training config is a FIFO": (
        fifo("experiment_cfg/conf.yaml"),
        r"conf\.yaml: cannot be read as YAML: it is no regular file",
    ),
    "index is a FIFO": (
        fifo("model.safetensors.index.json"),
        r"index\.json cannot be read as JSON: it is no regular file",
    ),
    "name too long for a file": (index({ENTRY: "x" * 300}), r"index\.json names the file x{300} for entry .* missing"),
    "name that no file has": (index({ENTRY: "a\0\ud800\n"}), r"the file a\\x00\\ud800\\n for entry .* it is missing"),
    "no name": (index({ENTRY: ""}), r"must name a file beside the index, found ''"),
    "entry of many lines": (index({"a\nb" * 5000: "model.safetensors"}), r"has no entry 'a\\nba.*\.\.\.$"),
    "no config": (lambda d: (d / "config.json").unlink(), r"config\.json is missing; it must hold the sizes"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), r"config\.json cannot be read as JSON"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), r"config\.json must hold a JSON object"),
    "no action_head_cfg": (
        config(lambda c: c.pop("action_head_cfg")),
        r"config\.json: config\.json needs a map 'action_head_cfg'",
    ),
    "unknown model type": (
        config(lambda c: head_config(c)["diffusion_model_cfg"].update(model_type="t2v")),
        r"config\.json: diffusion_model_cfg\.model_type must be 'i2v' or 'ti2v', found 't2v'",
    ),
    "no statistics": (
        lambda d: (d / "experiment_cfg" / "metadata.json").unlink(),
        r"metadata\.json is missing; it must hold the normalisation statistics",
    ),
    "statistics of others": (
        lambda d: change_json(d / "experiment_cfg" / "metadata.json", lambda m: m.update(gr1=m.pop("oxe_droid"))),
        r"metadata\.json has no embodiment 'oxe_droid'; it has \['gr1'\]: --embodiment FILE",
    ),
    "actions of others": (
        lambda d: (d / "experiment_cfg" / "conf.yaml").write_text("relative_action_keys: [wheels]"),
        r"calls the actions wheels relative; embodiment oxe_droid has .*: --embodiment FILE",
    ),
    "statistics as text": (
        q01(["low"] * 7),
        r"needs a list of 7 numbers at oxe_droid\.statistics\.state\.joint_position",
    ),
    "statistics of null": (q01([None] * 7), "needs a list of 7 numbers at"),
    "statistics as lists": (q01([[0.0]] * 7), "needs a list of 7 numbers at"),
    "statistics NaN": (q01([float("nan")] * 7), "needs a list of 7 numbers at"),
    "statistics too large": (q01([10**400] * 7), "needs a list of 7 numbers at"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_checkpoint_is_one_clear_line(tmp_path: Path, case: str) -> None:
    break_it, message = CASES[case]
    break_it(tiny_checkpoint(tmp_path / "tiny"))
    with pytest.raises(PolicyLoadError, match=message) as error:
        actions_of(tmp_path / "tiny")
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["NaN", "truncated"])
async def test_the_server_ends_with_that_line_and_exit_code_2(tmp_path: Path, case: str) -> None:
    break_it, _ = CASES[case]
    break_it(tiny_checkpoint(tmp_path / "tiny"))
    with server("--checkpoint", str(tmp_path / "tiny"), "--port", "0") as running:
        assert await asyncio.to_thread(running.end, LOADING) == 2, running.log
    (line,) = [line for line in running.log if "ERROR" in line]
    assert "model.safetensors" in line
    assert "Traceback" not in "".join(running.log)


def test_a_shard_that_is_cut_off_is_found_before_any_weight_is_read(tmp_path: Path) -> None:
    """The last of several: whatever lies before it must not be on the device already."""
    directory = tiny_checkpoint(tmp_path / "tiny")
    (directory / "model.safetensors").unlink()
    write_weights(directory, release_shapes(parse_config(TINY)), torch.float32, 4 * 2**20, synthetic_tensor)
    last = max(directory.glob("*.safetensors"))
    os.truncate(last, last.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{last.name} is cut off"):
        read_files(str(directory))


def test_missing_entries_are_found_before_any_weight_is_read(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path / "tiny")
    change_weights(directory, lambda tensors: [tensors.pop(name) for name in list(tensors)[-3:]])
    read = read_files(str(directory)).weights.read(build_model(parse_config(TINY)).entry_shapes())
    with pytest.raises(CheckpointError, match=r"has no entry .* \(and 2 more such entries\)"):
        next(read)


def test_a_base_beside_a_checkpoint_without_adapters_is_not_ignored(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path / "tiny")
    with pytest.raises(CheckpointError, match=r"tiny holds no LoRA adapters: --base-checkpoint is for fine-tunes"):
        read_files(str(directory), base=str(directory))


def test_a_revision_of_a_directory_is_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--revision 'v2' is of a hub id, but --checkpoint .* is a directory"):
        read_files(str(tmp_path), revision="v2")


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, '{"model": 5}', "\udcff", None])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_cannot_be_read_is_one_clear_line(tmp_path: Path, file: str, text: str | None) -> None:
    directory = tiny_checkpoint(tmp_path / "tiny")
    (tmp_path / "tokenizer").mkdir()
    if text is None:
        os.mkfifo(tmp_path / "tokenizer" / file)
    else:
        (tmp_path / "tokenizer" / file).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"^--tokenizer .* holds no tokenizer that can be read: .") as error:
        open_checkpoint(str(directory), tokenizer=str(tmp_path / "tokenizer"))
    assert "\n" not in str(error.value)


def test_others_may_read_what_is_written_as_far_as_the_umask_lets_them(tmp_path: Path) -> None:
    write_weights(tmp_path, {"a": (2,)}, torch.float32, 10**6, synthetic_tensor)
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "model.safetensors").stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": 32, "shape": [1], "data_offsets": [0, 4]},
        {"shape": [1], "data_offsets": [0, 4]},
        [],
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, entry: object) -> None:
    text = json.dumps({"x": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(CheckpointError, match=r"x\.safetensors is no safetensors file"):
        read_header(path)


def test_our_reading_of_a_header_is_the_library_s(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, 2, dtype=torch.bfloat16), "b": torch.zeros(()), "c": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert {name: stored.shape for name, stored in header.items()} == {"a": (3, 2), "b": (), "c": (0, 4)}
    assert {name: (stored.dtype, stored.size) for name, stored in header.items()} == {
        "a": ("BF16", 12), "b": ("F32", 4), "c": ("F32", 0),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint": "no/such/place"}, r"'no/such/place' is neither a directory nor a hub id"),
        ({"checkpoint": "huge"}, r"neither built in \(droid-2l, mid, tiny, wan22-tiny\) nor a directory nor a hub id"),
        ({"checkpoint": "x" * 300}, "neither built in"),
        ({"checkpoint": "x/" + "y" * 300}, "neither a directory nor a hub id|could not be fetched"),
        ({"checkpoint": "a/\0"}, r"'a/\\x00' is neither a directory nor a hub id"),
        ({"embodiment": "x" * 300}, "is neither built in"),
        ({"checkpoint": "tiny", "base_checkpoint": "mid"}, r"'tiny' is built in: it takes no base"),
        ({"attention_backend": "flash-attn-3", "device": "cpu"}, "'flash-attn-3' cannot run here"),
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
        ("diffusion_model_cfg.dim", "wide", "dim must be a whole number"),
        ("diffusion_model_cfg.dim", 128.5, "dim must be a whole number"),
        ("diffusion_model_cfg.num_heads", 0, "num_heads must be a whole number of at least 1"),
        ("diffusion_model_cfg.num_heads", 5, "does not divide into 5 heads"),
        ("diffusion_model_cfg.eps", -1.0, "eps must be a number of at least 0"),
        ("diffusion_model_cfg.concat_first_frame_latent", "no", "must be true or false"),
        ("diffusion_model_cfg.frame_seqlen", 33, "view size does not fit"),
        ("diffusion_model_cfg.in_dim", 20, "do not fit a VAE of 16 channels"),
        ("text_encoder_cfg.dim", 63, "is not diffusion_model_cfg.text_dim"),
        ("image_encoder_cfg.vision_heads", 5, "vision_dim 64 does not divide into 5 heads"),
        ("diffusion_model_cfg.dim", 10**30, r"dim must be at most 1,000,000, found 1e\+30"),
        ("diffusion_model_cfg.num_layers", 10**9, r"num_layers must be at most 1,000, found 1e\+09"),
        ("diffusion_model_cfg.eps", float("nan"), "eps must be a number of at least 0, found nan"),
        ("diffusion_model_cfg.eps", float("inf"), "eps must be a number of at least 0, found inf"),
    ],
)
def test_sizes_that_do_not_fit_are_named(path: str, value: object, message: str) -> None:
    changed = json.loads(json.dumps(TINY))
    section, key = path.split(".")
    head_config(changed)[section][key] = value
    with pytest.raises(ConfigError, match=message):
        parse_config(changed)


@pytest.mark.parametrize("section", ["diffusion_model_cfg", "text_encoder_cfg", "image_encoder_cfg", "vae_cfg"])
def test_a_section_of_the_wrong_form_is_named(section: str) -> None:
    changed = json.loads(json.dumps(TINY))
    head_config(changed)[section] = "none"
    with pytest.raises(ConfigError, match=f"needs a map '{section}'"):
        parse_config(changed)


def test_keys_that_are_null_or_missing_take_the_release_s_values() -> None:
    config = parse_config({"action_head_cfg": {"config": {"num_frames": None, "diffusion_model_cfg": {"dim": None}}}})
    assert (config.num_frames, config.dit.dim, config.dit.num_layers) == (33, 5120, 40)
    assert (config.view_height, config.view_width) == (176, 320)
