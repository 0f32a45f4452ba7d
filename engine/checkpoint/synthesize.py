"""Checkpoints of built-in sizes on disk, in the release's layout, with synthetic weights.

For tests, demonstrations and benchmarks: whatever loads and serves these loads and serves the release's.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint.builtin import BUILTIN_CONFIGS, BUILTIN_STATISTICS
from engine.checkpoint.error import CheckpointError
from engine.checkpoint.names import IMAGE, UNUSED
from engine.checkpoint.opening import CONFIG_FILE, STATISTICS_FILE
from engine.checkpoint.shards import INDEX_FILE, SINGLE_FILE
from engine.checkpoint.synthetic import synthetic_tensor
from engine.checkpoint.training import CONF_FILE
from engine.model.config import ModelConfig, parse_config
from engine.model.weights import build_model

SHARD_BYTES = 4 * 10**9
Fill = Callable[[str, tuple[int, ...]], Tensor]


def release_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every entry of a release's checkpoint of these sizes, those included that no forward uses."""
    width = config.image.vision_dim
    unused: dict[str, tuple[int, ...]] = {name: (width,) for name in UNUSED if name.startswith(IMAGE + "post_norm.")}
    unused |= {IMAGE + "head": (width, 4 * width // 5), "action_head.image_encoder.model.log_scale": ()}
    return build_model(config).entry_shapes() | unused


def synthesize(
    size: str,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    fill: Fill = synthetic_tensor,
) -> None:
    """Write the built-in checkpoint `size` into `directory`, which is made where it is missing.

    shard_bytes: most bytes of one file; with more than one there is an index. fill: the values of an entry, by its name
    and shape. Needs the memory of one shard. Raises KeyError for a size that is not built in, CheckpointError where
    the directory holds something already.
    """
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} is not empty: expected a directory to make, or an empty one")
    raw = BUILTIN_CONFIGS[size]
    config = parse_config(raw)
    conf = {
        "image_resolution_height": config.view_height,
        "image_resolution_width": config.view_width,
        "relative_action": True,
        "relative_action_keys": ["joint_position"],
    }
    (directory / STATISTICS_FILE).parent.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(raw, indent=2))
    (directory / STATISTICS_FILE).write_text(json.dumps(BUILTIN_STATISTICS, indent=2))
    (directory / CONF_FILE).write_text(yaml.safe_dump(conf))
    write_weights(directory, release_shapes(config), dtype, shard_bytes, fill)


def write_weights(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, shard_bytes: int, fill: Fill
) -> None:
    """Write entries of these names and shapes into one file, or into shards with an index."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, shape in sorted(shapes.items()):
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        path = directory / file
        path.touch()
        mode = path.stat().st_mode  # as the umask wants it, where the library lets nobody else read
        save_file({name: fill(name, shapes[name]).to(dtype).contiguous() for name in names}, path)
        path.chmod(mode)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}, indent=2))
