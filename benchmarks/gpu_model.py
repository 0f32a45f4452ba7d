"""The model that is measured on a GPU, with weights drawn at random, and robots that call it."""

import copy
import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.open import Checkpoint, synthetic_checkpoint
from engine.checkpoint.synthetic import BUILTIN_CONFIGS, BUILTIN_STATISTICS, as_trained
from engine.model.config import ModelConfig
from engine.model.weights import Model, load_model
from engine.rollout import Prediction, Rollout, RolloutSettings
from engine.session import Session
from engine.startup import build_cache, kv_geometry
from kv_cache.attention import choose_backend
from kv_cache.cache import KVCache
from kv_cache.sizing import one_session_bytes
from kv_cache.window import WindowPolicy


def droid_14b() -> dict[str, Any]:
    """The config of the DROID checkpoint: the built-in one of two layers, with all of them."""
    config = copy.deepcopy(BUILTIN_CONFIGS["droid-2l"])
    head = config["action_head_cfg"]["config"]
    head["diffusion_model_cfg"]["num_layers"] = 40
    head["text_encoder_cfg"] |= {"num_layers": 24, "vocab": 256384}
    head["image_encoder_cfg"]["vision_layers"] = 32
    return config


class RandomWeights:
    """Weights drawn where they are used: 23 billion from their names would take an hour."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(1140)

    def where(self, name: str) -> str:
        return f"random entry {name!r}"

    def read(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        device = self._generator.device
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=self._generator, device=device, dtype=torch.bfloat16)
            yield name, as_trained(name, drawn)


@dataclass
class Robot:
    """One session with a prompt of its own, whose call of each number sees the same random frames in every run."""

    rollout: Rollout
    session: Session
    prompt: tuple[Tensor, Tensor]
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the last call, by phase; `whole`: all of it."""

    def call(self) -> Prediction:
        config = self.rollout.config
        generator = torch.Generator().manual_seed(self.session.calls)
        size = (4, 2 * config.view_height, 2 * config.view_width, 3)
        frames = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        began = time.perf_counter()
        prediction = self.rollout.call(self.session, frames, *self.prompt, torch.zeros(config.max_state_dim))
        self.seconds = prediction.seconds | {"whole": time.perf_counter() - began}
        self.seconds["dit"] = self.seconds["prefill"] + self.seconds["denoise"]
        return prediction


@dataclass
class Bench:
    """One model on one device. label: how its numbers are called."""

    label: str
    checkpoint: Checkpoint
    model: Model
    device: torch.device
    dtype: torch.dtype
    fp8: bool

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def robots(self, count: int, settings: RolloutSettings) -> list[Robot]:
        """Sessions in one pool that is just large enough for them."""
        backend = choose_backend(self.device, self.dtype, device_side=settings.execution == "graph")
        cache = build_cache(self.config, self._pool_bytes(count), self.device, self.dtype, backend)
        rollout = Rollout(self.model, cache, self.checkpoint.tokenizer, settings)
        return [self._robot(rollout, cache, number) for number in range(count)]

    def _pool_bytes(self, count: int) -> int:
        return count * one_session_bytes(
            kv_geometry(self.config, self.dtype), WindowPolicy(self.config.dit.window_frames)
        )

    def _robot(self, rollout: Rollout, cache: KVCache, number: int) -> Robot:
        return Robot(rollout, Session(cache.session(number)), rollout.tokenize(f"pick up block {number}"))


def load(size: str, device: torch.device, dtype: torch.dtype, fp8: bool, text_encoder: torch.device) -> Bench:
    config = droid_14b() if size == "droid-14b" else BUILTIN_CONFIGS[size]
    checkpoint = synthetic_checkpoint(size, config, BUILTIN_STATISTICS)
    model = load_model(checkpoint.config, RandomWeights(device), device, dtype, fp8, text_encoder)
    label = "fp8" if fp8 else str(dtype).removeprefix("torch.")
    return Bench(label, checkpoint, model, device, dtype, fp8)


def free(device: torch.device) -> None:
    """Give back what nothing refers to any more, so that the next peak is the next row's own."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
