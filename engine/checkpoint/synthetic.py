"""Checkpoints with synthetic weights: built-in sizes, a rule for every weight, and the same written to disk.

Every tensor is a function of its checkpoint name and shape alone. The rule is the one the golden rollouts were made
with, so a model of any size can be rebuilt from its config and no weights need to be stored. Such a model moves a robot
about at random: it is for tests, demonstrations, benchmarks. Whatever loads and serves these loads and serves the
release's.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint.error import CheckpointError
from engine.checkpoint.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, STATISTICS_FILE
from engine.checkpoint.names import IMAGE, UNUSED
from engine.checkpoint.training import CONF_FILE
from engine.model.config import ModelConfig, parse_config
from engine.model.weights import build_model


def _config(
    view: tuple[int, int],
    dit: dict[str, Any],
    text: dict[str, int],
    image: dict[str, int],
    vae: dict[str, Any],
    **head: int,
) -> dict[str, Any]:
    return {
        "model_type": "vla",
        "action_dim": 32,
        "action_horizon": 24,
        "action_head_cfg": {
            "config": {
                "action_horizon": 24,
                "max_action_dim": 32,
                "max_state_dim": 64,
                "num_frames": 33,
                "decouple_inference_noise": False,
                "diffusion_model_cfg": {
                    "model_type": "i2v", "in_dim": 36, "out_dim": 16, "freq_dim": 256, "text_len": 512,
                    "max_chunk_size": 4, "num_frame_per_block": 2, "num_action_per_block": 24,
                    "num_state_per_block": 1, "eps": 1e-6, **dit,
                },
                "text_encoder_cfg": {"vocab": 384, "num_buckets": 32, **text},
                "image_encoder_cfg": {"image_size": 224, "patch_size": 14, "vision_mlp_ratio": 4, **image},
                "vae_cfg": vae,
                **head,
            }
        },
        "view_height": view[0],
        "view_width": view[1],
        "tokenizer": "byt5",
        "synthetic_weights": True,
    }  # fmt: skip


BUILTIN_CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": _config(
        view=(32, 64),
        dit={
            "dim": 128, "ffn_dim": 256, "num_heads": 4, "num_layers": 3, "text_dim": 64, "hidden_size": 64,
            "frame_seqlen": 32,
        },
        text={"dim": 64, "dim_attn": 64, "dim_ffn": 128, "num_heads": 4, "num_layers": 2},
        image={"vision_dim": 64, "vision_heads": 4, "vision_layers": 3},
        vae={"z_dim": 16, "dim": 16},
    ),
    "mid": _config(
        view=(88, 160),
        dit={
            "dim": 512, "ffn_dim": 2048, "num_heads": 8, "num_layers": 8, "text_dim": 256, "hidden_size": 256,
            "frame_seqlen": 220,
        },
        text={"dim": 256, "dim_attn": 256, "dim_ffn": 512, "num_heads": 8, "num_layers": 6},
        image={"vision_dim": 256, "vision_heads": 8, "vision_layers": 6},
        vae={"z_dim": 16, "dim": 32},
    ),
    # DROID's widths and views with two layers of each transformer, and as few words as bytes need.
    "droid-2l": _config(
        view=(176, 320),
        dit={
            "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 2, "text_dim": 4096, "hidden_size": 1024,
            "frame_seqlen": 880,
        },
        text={"dim": 4096, "dim_attn": 4096, "dim_ffn": 10240, "num_heads": 64, "num_layers": 2},
        image={"vision_dim": 1280, "vision_heads": 16, "vision_layers": 2},
        vae={"z_dim": 16, "dim": 96},
    ),
    # The small backbone (model.md section 8), smaller still.
    "wan22-tiny": _config(
        view=(44, 80),
        dit={
            "model_type": "ti2v", "in_dim": 48, "out_dim": 48, "dim": 96, "ffn_dim": 192, "num_heads": 3,
            "num_layers": 3, "text_dim": 64, "hidden_size": 64, "frame_seqlen": 8, "concat_first_frame_latent": False,
        },
        text={"dim": 64, "dim_attn": 64, "dim_ffn": 128, "num_heads": 4, "num_layers": 2},
        image={"vision_dim": 64, "vision_heads": 4, "vision_layers": 3},
        vae={"_target_": "WanVideoVAE38", "z_dim": 48, "dim": 16, "dec_dim": 24},
        target_video_height=64,
        target_video_width=128,
    ),
}  # fmt: skip

BUILTIN_STATISTICS: dict[str, Any] = {
    "oxe_droid": {
        "statistics": {
            "state": {
                "joint_position": {
                    "q01": [-0.9, -1.1, -0.8, -2.9, -1.2, 0.6, -1.6],
                    "q99": [0.9, 1.2, 0.8, -0.5, 1.2, 3.1, 1.7],
                },
                "gripper_position": {"q01": [0.0], "q99": [1.0]},
            },
            "action": {
                "joint_position": {
                    "q01": [-0.31, -0.42, -0.29, -0.38, -0.35, -0.33, -0.45],
                    "q99": [0.33, 0.4, 0.3, 0.39, 0.34, 0.36, 0.44],
                },
                "gripper_position": {"q01": [0.0], "q99": [1.0]},
            },
        }
    }
}


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def unit_uniform(name: str, count: int) -> np.ndarray:
    """`count` float32 values of mean 0 and variance 1: splitmix64 over a counter, seeded with the CRC-32 of `name`."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        state = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        state += np.uint64(zlib.crc32(name.encode())) * np.uint64(0x100000001B3)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
        state ^= state >> np.uint64(31)
    fraction = (state >> np.uint64(40)).astype(np.float64) / 2**24
    return ((2 * fraction - 1) * math.sqrt(3)).astype(np.float32)


def synthetic_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """The float32 tensor of checkpoint entry `name`."""
    return as_trained(name, torch.from_numpy(unit_uniform(name, math.prod(shape)).reshape(shape)))


def as_trained(name: str, values: Tensor) -> Tensor:
    """Values of mean 0 and variance 1, scaled as the trained ones of checkpoint entry `name` would roughly be."""
    shape = values.shape
    leaf = name.rpartition(".")[2]
    if "norm_q." in name or "norm_k" in name:  # sharp attention, so that errors in it show
        return 2 * (1 + 0.1 * values)
    if leaf == "gamma" or (leaf == "weight" and len(shape) == 1):
        return 1 + 0.1 * values
    if leaf in ("bias", "b"):
        return 0.02 * values
    if leaf in ("cls_embedding", "pos_embedding") or name.endswith("pos_embedding.embedding.weight"):
        return 0.5 * values
    if name.endswith("token_embedding.weight"):
        return values
    fan_in = {"W": shape[1:2], "modulation": shape[-1:]}.get(leaf, shape[1:])
    return values / math.sqrt(math.prod(fan_in))


class SyntheticWeights:
    """A source of weights that makes each when it is asked for."""

    def where(self, name: str) -> str:
        """The weight, for a message."""
        return f"synthetic entry {name!r}"

    def read(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """Each weight in its shape, float32 on the CPU."""
        return ((name, synthetic_tensor(name, shape)) for name, shape in shapes.items())


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
