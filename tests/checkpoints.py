"""Checkpoints on disk: a tiny one to break, and ones of full size that are headers over files without content."""

import copy
import functools
import gzip
import json
import math
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint.names import DIT
from engine.checkpoint.synthetic import BUILTIN_CONFIGS, BUILTIN_STATISTICS, synthesize
from engine.settings import EngineSettings
from engine.startup import load_policy
from protocol.robot import Observation

KEYS = Path(__file__).parent / "data" / "droid_checkpoint_keys.json.gz"


@functools.cache
def _made_once() -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory()
    synthesize("tiny", Path(made.name) / "tiny")
    return made


def tiny_checkpoint(directory: Path) -> Path:
    """A copy of the tiny checkpoint, in one file."""
    return shutil.copytree(Path(_made_once().name) / "tiny", directory)


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` alter what a JSON file holds."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def head_config(config: dict[str, Any]) -> dict[str, Any]:
    """The sizes inside a config.json."""
    return config["action_head_cfg"]["config"]  # type: ignore[no-any-return]


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Let `change` alter the entries of a checkpoint in one file."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def droid_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the released 14B DROID checkpoint."""
    return {name: tuple(shape) for name, shape in json.loads(gzip.decompress(KEYS.read_bytes())).items()}


def headers_alone(
    directory: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], files: int
) -> Path:
    """A bfloat16 checkpoint of any size: its files have the right length, and nothing in them but their headers."""
    (directory / "experiment_cfg").mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "experiment_cfg" / "metadata.json").write_text(json.dumps(BUILTIN_STATISTICS))
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        header, offset = {}, 0
        for name in list(shapes)[number::files]:
            size = 2 * math.prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + offset)
        weight_map |= dict.fromkeys(header, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def observation() -> Observation:
    """A first observation of a DROID robot."""
    frame = np.arange(180 * 320 * 3, dtype=np.uint32).astype(np.uint8).reshape(1, 180, 320, 3)
    views = dict.fromkeys(("wrist", "exterior_left", "exterior_right"), frame)
    return Observation(views, {"joint_position": np.zeros(7), "gripper_position": np.zeros(1)}, "pick up the block")


def actions_of(checkpoint: str | Path, **settings: Any) -> np.ndarray:
    """The first chunk that a checkpoint answers `observation` with, in two steps."""
    torch.set_num_threads(1)
    policy = load_policy(
        EngineSettings(checkpoint=str(checkpoint), device="cpu", steps=2, **settings), lambda status: None
    )
    return policy.infer("robot", observation()).actions


RANK, ALPHA = 4, 6.0
TARGETS = tuple(
    f"blocks.{block}.{layer}"
    for block in range(3)
    for layer in (
        *(f"{attention}.{part}" for attention in ("self_attn", "cross_attn") for part in "qkvo"),
        "ffn.0",
        "ffn.2",
    )
)
WRAPPED = DIT + "base_model.model."


def halves(target: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A (rank, in) and B (out, rank), large enough to change the actions."""
    generator = torch.Generator().manual_seed(TARGETS.index(target))
    a = torch.randn(RANK, weight.shape[1], generator=generator)
    b = torch.randn(weight.shape[0], RANK, generator=generator)
    return a / 10, b / 10


def merged(directory: Path) -> Path:
    """A plain checkpoint of the fine-tuned weights."""

    def change(tensors: dict[str, Tensor]) -> None:
        for target in TARGETS:
            weight = tensors[f"{DIT}{target}.weight"]
            a, b = halves(target, weight)
            tensors[f"{DIT}{target}.weight"] = weight + ALPHA / RANK * (b @ a)

    tiny_checkpoint(directory)
    change_weights(directory, change)
    return directory


def fine_tune(
    directory: Path, base_weights: bool = True, base_layer: str = ".base_layer", adapter: str = "", where: str = "head"
) -> Path:
    """The tiny checkpoint with adapters, as a LoRA training writes it; `base_weights`: with those it is based on."""

    def change(tensors: dict[str, Tensor]) -> None:
        plain = dict(tensors)
        tensors.clear()
        for name, tensor in plain.items():
            target = name.removeprefix(DIT).rpartition(".")[0] if name.startswith(DIT) else ""
            wrapped = name.replace(DIT, WRAPPED)
            if target in TARGETS:
                wrapped = wrapped.replace(target, target + base_layer)
                if name.endswith(".weight"):
                    a, b = halves(target, tensor)
                    tensors[f"{WRAPPED}{target}.lora_A{adapter}.weight"] = a
                    tensors[f"{WRAPPED}{target}.lora_B{adapter}.weight"] = b
            if base_weights:
                tensors[wrapped] = tensor

    tiny_checkpoint(directory)
    change_weights(directory, change)
    sizes = {"lora_rank": RANK, "lora_alpha": ALPHA}
    change_json(
        directory / "config.json",
        lambda config: (head_config(config) if where == "head" else head_config(config)["diffusion_model_cfg"]).update(
            sizes
        ),
    )
    return directory


def small() -> dict[str, Any]:
    """`tiny`, one layer of its transformer, and a window that starts with less grey video: far fewer operations."""
    config = copy.deepcopy(BUILTIN_CONFIGS["tiny"])
    head = config["action_head_cfg"]["config"]
    head["num_frames"] = 5
    head["diffusion_model_cfg"]["num_layers"] = 1
    return config
