"""What each preset costs and how far it is from computing all 16 steps, as one Markdown table.

    python -m benchmarks.presets [FILE...] [--device cuda] [--execution graph]

Over the golden rollouts that the public release computed with all 16 steps: the deviation is from its numbers. Each
call is made by all ways in turn, and time is beside that of `quality` at the same call. fp8 on a CPU is computed in
software, so there it has no time.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.flops import call_flops
from benchmarks.golden import FILES, Engine, Golden, Mode, Report, build_engine, run_call
from benchmarks.machine import machine
from engine.execution import EXECUTIONS
from engine.model.config import parse_config
from engine.model.step_cache import step_cache_settings
from engine.presets import PRESETS, Preset
from engine.rollout import Rollout
from engine.session import Session

DROID_14B = parse_config({"action_head_cfg": {"config": {}}})
BESIDE_FAST = Preset("velocity", 16, "velocity")
"""No preset: what `fast` might have been."""


@dataclass
class Way:
    """A preset and an arithmetic. report: over all calls. seconds: of each call."""

    preset: Preset
    mode: Mode
    report: Report = field(default_factory=Report)
    seconds: list[float] = field(default_factory=list)

    def row(self, quality: "Way") -> str:
        """Its line of the table, beside what computes all steps."""
        calls = len(self.seconds)
        steps = self.report.forwards / calls / 2 - 1  # but for the prefill, both branches counted
        window = range(1, DROID_14B.dit.window_frames - 1, DROID_14B.dit.num_frame_per_block)
        flops = statistics.mean(call_flops(DROID_14B, start, steps).total for start in window)
        ratio = statistics.median(own / other for own, other in zip(self.seconds, quality.seconds, strict=True))
        in_software = self.preset.fp8 and self.mode.device == "cpu"
        _, _, flags = str(self.preset).partition(": ")
        return (
            f"| `{self.preset.name}` | `{flags}` | {str(self.mode.dtype).removeprefix('torch.')} | {steps:.1f} "
            f"| {flops / 1e12:,.0f} | {'' if in_software else f'{ratio:.2f}'} "
            f"| {self.report.psnr:.0f} dB | {self.report.joints:.1g} rad |"
        )


def every_way(device: str, execution: str) -> list[Way]:
    """The presets in the device's usual dtype, the velocity cache beside them, and `fast` as a card with fp8 has it."""
    usual = Mode(device=device, execution=execution, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    in_fp8 = replace(usual, fp8=True)
    plain = [PRESETS["quality"], PRESETS["release"], replace(PRESETS["fast"], fp8=False), BESIDE_FAST]
    return [*(Way(preset, usual) for preset in plain), Way(PRESETS["fast"], in_fp8)]


def run_file(golden: Golden, ways: list[Way]) -> None:
    """Every call of a rollout, all ways in turn."""
    engines = {mode: build_engine(golden, mode) for mode in dict.fromkeys(way.mode for way in ways)}
    own = [_with_preset(engines[way.mode], way.preset) for way in ways]
    for index, call in enumerate(golden.calls):
        if index == 0 or call["new_session"]:
            for number, engine in enumerate(own):
                engine.cache.forget(number)
            sessions = [Session(engine.cache.session(number)) for number, engine in enumerate(own)]
        for way, engine, session in zip(ways, own, sessions, strict=True):
            way.seconds.append(sum(run_call(engine, golden, session, index, way.report).seconds.values()))


def _with_preset(engine: Engine, preset: Preset) -> Engine:
    """The same model and cache, denoising as the preset says."""
    step_cache = step_cache_settings(preset.step_cache)
    settings = replace(engine.settings, steps=preset.steps, step_cache=step_cache)
    rollout = Rollout(engine.model, engine.cache, engine.checkpoint.tokenizer, settings)
    return replace(engine, settings=settings, rollout=rollout)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.presets", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=FILES, help="default: all that the project has")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--execution", choices=EXECUTIONS, default="eager")
    args = parser.parse_args(argv)
    ways = every_way(args.device, args.execution)
    goldens = {path.stem: Golden(path) for path in args.files}
    full = {stem: golden for stem, golden in goldens.items() if golden.runtime.get("step_cache") == {"kind": "none"}}
    if not full:
        parser.error("none of the files is a rollout with every step computed")
    for golden in full.values():
        run_file(golden, ways)
    print(f"Rollouts {', '.join(full)}; {len(ways[0].seconds)} calls by each, {args.execution}, {machine()}\n")
    print(
        "| preset | stands for | dtype | computed steps | 14B, TFLOP a call | time of `quality`'s | video, worst call "
        "| joints, worst |\n|---|---|---|---|---|---|---|---|"
    )
    for way in ways:
        print(way.row(ways[0]))
    return 0 if all(way.report.finite for way in ways) else 1


if __name__ == "__main__":
    sys.exit(main())
