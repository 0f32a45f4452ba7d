"""Everything that speed on a GPU is judged by, in one run: Markdown tables on the standard output.

    python -m benchmarks.gpu                              the DROID 14B geometry with random weights, on a CUDA device
    python -m benchmarks.gpu --device cpu --size tiny     the same road without a GPU, to see that it can be walked

Needs torch 2.11 or later with Triton, transformers, safetensors, huggingface_hub, PyYAML and, where they are missing,
the wheels of diffusers, ftfy, wcwidth, importlib_metadata, zipp, requests and regex; no network and no checkpoint.
`flash_attn` and `flash_attn_interface` are measured where they are installed.
"""

import argparse
import copy
import gc
import platform
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.flops import call_flops
from benchmarks.gpu_kernels import attention_table, matmul_rates
from benchmarks.kv import machine, peak_resident_bytes
from engine.builtin import BUILTIN_CONFIGS, BUILTIN_STATISTICS
from engine.checkpoint.opening import Checkpoint, synthetic_checkpoint
from engine.config import ModelConfig
from engine.loading import build_cache, kv_geometry
from engine.model import Model, load_model
from engine.rollout import Prediction, Rollout, RolloutSettings
from engine.session import Session
from engine.step_cache import parse_step_cache
from engine.synthetic import as_trained
from kv_cache.attention import choose_backend
from kv_cache.sizing import one_session_bytes
from kv_cache.window import WindowPolicy

STEP_CACHES = ("none", "mask-8", "mask-5", "velocity")
STEPS = 16


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
class Bench:
    """One model on one device."""

    checkpoint: Checkpoint
    model: Model
    device: torch.device
    dtype: torch.dtype

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def robots(self, count: int, settings: RolloutSettings, backend: str | None = None) -> "list[Robot]":
        """Sessions in one pool that is just large enough for them."""
        geometry = kv_geometry(self.config, self.dtype)
        if backend is None:
            backend = choose_backend(
                self.device, self.dtype, geometry.frame_tokens, device_side=settings.execution == "graph"
            )
        one = one_session_bytes(geometry, WindowPolicy(self.config.dit.window_frames))
        cache = build_cache(self.config, count * one, self.device, self.dtype, backend)
        rollout = Rollout(self.model, cache, self.checkpoint.tokenizer, settings)
        return [Robot(rollout, Session(cache.session(key))) for key in range(count)]


@dataclass
class Robot:
    """One session, whose calls all see the same random frames."""

    rollout: Rollout
    session: Session

    def call(self) -> Prediction:
        config = self.rollout.config
        generator = torch.Generator().manual_seed(self.session.calls)
        size = (4, 2 * config.view_height, 2 * config.view_width, 3)
        frames = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        prompt = self.rollout.tokenize("pick up the block")
        return self.rollout.call(self.session, frames, *prompt, torch.zeros(config.max_state_dim))


def load(size: str, device: torch.device, dtype: torch.dtype, fp8: bool, text_encoder: torch.device) -> Bench:
    config = droid_14b() if size == "droid-14b" else BUILTIN_CONFIGS[size]
    checkpoint = synthetic_checkpoint(size, config, BUILTIN_STATISTICS)
    model = load_model(checkpoint.config, RandomWeights(device), device, dtype, fp8, text_encoder)
    return Bench(checkpoint, model, device, dtype)


def settings(execution: str, step_cache: str = "none", batched: bool = True) -> RolloutSettings:
    return RolloutSettings(
        steps=STEPS,
        step_cache=parse_step_cache(step_cache, STEPS),
        execution=execution,
        batch_branches=batched,
    )


def agreement_table(bench: Bench, executions: list[str]) -> list[str]:
    """Two calls in every execution and both ways of guidance, against separate branches run eagerly."""
    rows = ["| execution | largest difference of action latents | of video latents |", "|---|---|---|"]
    expected: list[Prediction] = []
    for execution in executions:
        for batched in (False, True):
            robot = bench.robots(1, settings(execution, batched=batched))[0]
            got = [robot.call() for _ in range(2)]
            expected = expected or got
            action, video = (
                max(_difference(getattr(g, part), getattr(e, part)) for g, e in zip(got, expected, strict=True))
                for part in ("action_latents", "video_latents")
            )
            name = f"{execution}, branches {'batched' if batched else 'separate'}"
            rows.append(f"| {name} | {action:.1e} | {video:.1e} |")
            del robot
            _free(bench.device)
    return rows


def _difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max())


def speed_rows(bench: Bench, execution: str, calls: int, rate: float, label: str) -> tuple[list[str], dict[str, float]]:
    """Median over `calls` after a window to warm up; also the median DiT seconds by step cache."""
    rows = []
    dit_seconds = {}
    for step_cache in STEP_CACHES:
        for batched in (True, False) if step_cache == "mask-8" else (True,):
            robot = bench.robots(1, settings(execution, step_cache, batched))[0]
            spent, ratios, steps_run = [], [], []
            for call in range(bench.config.dit.max_chunk_size + calls):
                began = time.perf_counter()
                prediction = robot.call()
                seconds = prediction.seconds | {"whole": time.perf_counter() - began}
                if call < bench.config.dit.max_chunk_size:
                    continue
                seconds["dit"] = seconds["prefill"] + seconds["denoise"]
                ran = prediction.dit_forwards // 2 - 1
                denoised_from = robot.session.start_frame - bench.config.dit.num_frame_per_block
                spent.append(seconds)
                steps_run.append(ran)
                ratios.append(seconds["dit"] / (call_flops(bench.config, denoised_from, ran) / rate))
            median = {name: statistics.median(s[name] for s in spent) for name in spent[0]}
            if batched:
                dit_seconds[step_cache] = median["dit"]
            phases = ("encode", "prefill", "denoise")
            shares = " + ".join(f"{100 * median[phase] / median['whole']:.0f} %" for phase in phases)
            name = f"{label}, {step_cache}{'' if batched else ', branches separate'}"
            rows.append(
                f"| {name} | {statistics.mean(steps_run):.1f} | {1e3 * median['whole']:.0f} | {shares} "
                f"| {statistics.median(ratios):.2f} |"
            )
            del robot, prediction
            _free(bench.device)
    return rows, dit_seconds


def peak_row(bench: Bench, execution: str, count: int, label: str) -> str:
    """Most memory while `count` sessions take turns over a whole window and its restart."""
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    robots = bench.robots(count, settings(execution, "mask-5"))
    for _ in range(bench.config.dit.max_chunk_size + 1):
        for robot in robots:
            robot.call()
    peak = torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else peak_resident_bytes()
    return f"| {label}, {count} session{'s' if count > 1 else ''} | {peak / 2**30:.1f} GiB |"


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _show(*rows: str) -> None:
    print(*rows, "", sep="\n", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("droid-14b", *BUILTIN_CONFIGS), default="droid-14b")
    parser.add_argument("--calls", type=int, default=10, help="calls to take the median of")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    execution = "graph" if on_gpu else "eager"
    name = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}" if on_gpu else machine()
    short = str(dtype).removeprefix("torch.")
    _show(f"{args.size}, {short}, {name}, Python {platform.python_version()}")

    bench = load(args.size, device, dtype, fp8=False, text_encoder=device)
    rates = matmul_rates(bench.config, device, dtype)
    _show(f"Matrix products: {rates['model'] / 1e12:.1f} TFLOP/s, in float8 {rates['fp8'] / 1e12:.1f} TFLOP/s")
    _show(*attention_table(bench.config, device, dtype))
    _show(*agreement_table(bench, ["eager", "compile", "graph"] if on_gpu else ["eager"]))
    rows, model_seconds = speed_rows(bench, execution, args.calls, rates["model"], short)
    peaks = [peak_row(bench, execution, count, "weights as they are") for count in (1, 3)]
    del bench
    _free(device)

    bench = load(args.size, device, dtype, fp8=True, text_encoder=torch.device("cpu"))
    fp8_rows, fp8_seconds = speed_rows(bench, execution, args.calls, rates["fp8"], "fp8")
    peaks.append(peak_row(bench, execution, 1, "fp8, text encoder on the host"))
    head = "| median of the calls | steps run | ms | encode + prefill + denoise | DiT time over FLOPs at that rate |"
    _show(head, "|---|---|---|---|---|", *rows, *fp8_rows)
    _show(*(f"fp8 over {name}: {fp8_seconds[name] / model_seconds[name]:.2f} of the DiT time" for name in STEP_CACHES))
    _show("| | peak memory |", "|---|---|", *peaks)
    _show(f"All of it took {time.perf_counter() - began:.0f} s.")


if __name__ == "__main__":
    main()
