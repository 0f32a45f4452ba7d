"""Calls of a model on a GPU: whether every way to run them gives the same, how long they take, and in what memory."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.flops import call_flops
from benchmarks.gpu_model import Bench, free
from benchmarks.gpu_report import Verdict, begin_table, show_row
from benchmarks.machine import peak_resident_bytes
from engine.model.step_cache import step_cache_settings
from engine.rollout import Prediction, RolloutSettings

STEPS = 16
FLOAT32_TOLERANCE = 1e-4
TARGET_DIT_OVER_FLOPS = 1.25
TARGET_MS = {"mask-5": 900, "mask-8": 1300, "none": 2500}
TARGET_FP8 = 0.65
TARGET_GIB, TARGET_FP8_GIB = 60, 38


@dataclass(frozen=True)
class Way:
    """How calls are run. main: whether the targets are for this one."""

    execution: str
    step_cache: str
    guidance: str = "batched"
    sessions: int = 1
    main: bool = False

    def __str__(self) -> str:
        return (
            f"{self.execution}, {self.step_cache}"
            + ("" if self.guidance == "batched" else ", branches separate")
            + ("" if self.sessions == 1 else f", {self.sessions} sessions")
        )

    @property
    def settings(self) -> RolloutSettings:
        return RolloutSettings(
            steps=STEPS,
            step_cache=step_cache_settings(self.step_cache),
            execution=self.execution,
            guidance=self.guidance,
        )


def compare_ways(bench: Bench, ways: list[Way], verdict: Verdict) -> None:
    """A row for each way: two calls, against those of the first.

    In half precision the differences only have to be numbers: kernels round at different places, and the golden
    session in float32 is what holds every way to the same results.
    """
    begin_table(f"{bench.label}, two calls", "largest difference of action latents", "of video latents")
    largest = FLOAT32_TOLERANCE if bench.dtype == torch.float32 else math.inf
    expected: list[Prediction] = []
    for way in ways:
        with verdict.attempt(f"{bench.label}, {way}"):
            got = _two_calls(bench, way)
            expected = expected or got
            errors = {
                part: max(_difference(getattr(g, part), getattr(e, part)) for g, e in zip(got, expected, strict=True))
                for part in ("action_latents", "video_latents")
            }
            show_row(str(way), *(f"{error:.1e}" for error in errors.values()))
            for part, error in errors.items():
                verdict.hold(f"{bench.label}, {way}, {part}", error, largest)
        free(bench.device)


def _two_calls(bench: Bench, way: Way) -> list[Prediction]:
    robot = bench.robots(1, way.settings)[0]
    return [robot.call() for _ in range(2)]


def _difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max())


def begin_speed_table() -> None:
    begin_table(
        "median of the calls", "steps run", "ms", "encode + prefill + denoise", "DiT ms", "over FLOPs at the rates",
        "most GiB allocated", "reserved",
    )  # fmt: skip


def time_calls(
    bench: Bench, way: Way, calls: int, rates: Mapping[str, float], verdict: Verdict, plain_dit: float | None = None
) -> float:
    """Show a row with the median over `calls`, made in turns after each session's first window; returns DiT seconds.

    Memory is that of all calls, capture and warm-up included; graphs' own memory counts as reserved, not as
    allocated. plain_dit: DiT seconds of the same without float8.
    """
    free(bench.device)
    _reset_peaks(bench.device)
    robots = bench.robots(way.sessions, way.settings)
    dit = bench.config.dit
    warming = way.sessions * dit.max_chunk_size
    linear_rate = rates["fp8" if bench.fp8 else "model"]
    spent, ratios, steps_run = [], [], []
    for call in range(warming + calls):
        robot = robots[call % way.sessions]
        prediction = robot.call()
        if call < warming:
            continue
        ran = prediction.dit_forwards // 2 - 1
        flops = call_flops(bench.config, robot.session.kv.resident_frames, ran)
        spent.append(robot.seconds)
        steps_run.append(ran)
        ratios.append(robot.seconds["dit"] / flops.seconds(linear_rate, rates["model"]))
    median = {name: statistics.median(seconds[name] for seconds in spent) for name in spent[0]}
    phases = ("encode", "prefill", "denoise")
    whole, ratio = 1e3 * median["whole"], statistics.median(ratios)
    dit_ms = f"{1e3 * median['dit']:.0f}"
    if plain_dit is not None:
        share = median["dit"] / plain_dit
        dit_ms += ", " + verdict.beside(f"{share:.2f} of that without fp8", share, TARGET_FP8 if way.main else None)
    is_plain = way.main and not bench.fp8
    allocated, reserved = _peaks(bench.device)
    peak_target = (TARGET_FP8_GIB if bench.fp8 else TARGET_GIB) if way.main else None
    show_row(
        f"{bench.label}, {way}",
        f"{statistics.mean(steps_run):.1f}",
        verdict.beside(f"{whole:.0f}", whole, TARGET_MS.get(way.step_cache) if is_plain else None),
        " + ".join(f"{100 * median[phase] / median['whole']:.0f} %" for phase in phases),
        dit_ms,
        verdict.beside(f"{ratio:.2f}", ratio, TARGET_DIT_OVER_FLOPS if is_plain else None),
        f"{allocated:.1f}",
        verdict.beside(f"{reserved:.1f}", reserved, peak_target),
    )
    return median["dit"]


def _reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peaks(device: torch.device) -> tuple[float, float]:
    """Most GiB allocated and reserved since the reset; on a CPU twice what the process ever had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30, torch.cuda.max_memory_reserved(device) / 2**30
    return (peak_resident_bytes() / 2**30,) * 2
