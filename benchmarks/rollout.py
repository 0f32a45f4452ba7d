"""The engine against the plain rollout, which recomputes what the public release recomputes, in one process.

    python -m benchmarks.rollout [--size mid] [--rounds 2] [--steps 16] [--execution eager] [--golden FILE]

First the engine reproduces a golden file; exits 1 where it does not. Then calls of both sides alternate over the same
frames and noise, and one Markdown table is printed. Exits 1 where the two sides' actions differ.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.golden import Golden, Report
from benchmarks.machine import machine
from benchmarks.plain_rollout import PlainRollout
from engine.checkpoint.open import synthetic_checkpoint
from engine.checkpoint.synthetic import BUILTIN_CONFIGS, BUILTIN_STATISTICS
from engine.execution import EXECUTIONS
from engine.model.config import ModelConfig, parse_config
from engine.model.text import Tokenizer, tokenize
from engine.model.weights import Model, load_model
from engine.robot.embodiment_file import read_embodiment
from engine.robot.transforms import Transforms
from engine.rollout import Noise, Rollout, RolloutSettings
from engine.session import Session
from engine.startup import build_cache
from kv_cache.sizing import CPU_DEFAULT_BYTES

CPU = torch.device("cpu")

ROOT = Path(__file__).parents[1]
GOLDEN = {
    "tiny": ROOT / "tests/golden_files/session.safetensors",
    "mid": ROOT.parent / "shared/golden/mid/mid.safetensors",
}
TOLERANCES = {"action": 1e-4, "action_latents": 1e-4, "video_latents": 5e-4}
SAME_ACTIONS = 1e-4  # largest difference of action latents between sides that compute the same
PHASES = ("whole call", "encoders", "DiT")


class Side(Protocol):
    """One session of one way to run the rollout. seconds: of its last call, by phase."""

    seconds: dict[str, float]

    def call(self, frames: Tensor, tokens: Tensor, mask: Tensor, state: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Video latents (C, F, H, W) and action latents (24, 32); arguments as in `PlainRollout.call`."""
        ...


@dataclass
class EngineSide:
    """One session of the engine."""

    rollout: Rollout
    session: Session
    seconds: dict[str, float] = field(default_factory=dict)

    def call(self, frames: Tensor, tokens: Tensor, mask: Tensor, state: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """As in Side."""
        prediction = self.rollout.call(self.session, frames, tokens, mask, state, noise)
        self.seconds = prediction.seconds
        return prediction.video_latents, prediction.action_latents


def engine_side(model: Model, tokenizer: Tokenizer, settings: RolloutSettings) -> EngineSide:
    """A new session of the engine, over a cache of its own."""
    cache = build_cache(model.config, CPU_DEFAULT_BYTES, CPU, torch.float32)
    return EngineSide(Rollout(model, cache, tokenizer, settings), Session(cache.session(0)))


def golden_report(golden: Golden, config: ModelConfig, tokenizer: Tokenizer, new_side: Callable[[], Side]) -> Report:
    """Largest errors of a golden file's calls; `new_side` starts a session."""
    report = Report()
    transforms = Transforms(read_embodiment("oxe_droid"), config, golden.statistics)
    for index, call in enumerate(golden.calls):
        if index == 0 or call["new_session"]:
            side = new_side()
        expected = {name: golden.tensor(f"{index:02}.{name}") for name in (*TOLERANCES, "images", "state")}
        tokens, mask = tokenize(tokenizer, transforms.embodiment.prompt_text(call["prompt"]), config.dit.text_len)
        video, action = side.call(expected["images"], tokens, mask, expected["state"], golden.noise(index))
        observed = {name: np.array(call[name]) for name in ("joint_position", "gripper_position")}
        report.compare("video_latents", video, expected["video_latents"])
        report.compare("action_latents", action, expected["action_latents"])
        report.compare("action", transforms.actions(action, observed), expected["action"])
    return report


@dataclass(frozen=True)
class Pair:
    """The same call on both sides, seconds by phase, and the largest difference of their action latents."""

    restart: bool
    engine: dict[str, float]
    plain: dict[str, float]
    difference: float


def time_pairs(
    engine: Side, plain: Side, config: ModelConfig, prompt: tuple[Tensor, Tensor], windows: int
) -> list[Pair]:
    """Whole windows of calls, both sides in turn, over the same random frames and noise."""
    generator = torch.Generator().manual_seed(1140)
    block, calls = config.dit.num_frame_per_block, config.dit.max_chunk_size
    pairs = []
    for index in range(windows * calls):
        size = (4, 2 * config.view_height, 2 * config.view_width, 3)
        frames = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        noise = Noise(
            torch.randn(1, config.dit.out_dim, block, config.latent_height, config.latent_width, generator=generator),
            torch.randn(1, config.action_horizon, config.max_action_dim, generator=generator),
        )
        sides = [engine, plain]
        if (index + index // calls) % 2:  # who goes first changes with every call, and at restarts with every window
            sides.reverse()
        seconds, actions = {}, []
        for side in sides:
            began = time.perf_counter()
            actions.append(side.call(frames, *prompt, torch.zeros(config.max_state_dim), noise)[1])
            whole, encoders = time.perf_counter() - began, side.seconds["encode"]
            seconds[id(side)] = dict(zip(PHASES, (whole, encoders, whole - encoders), strict=True))
        difference = float((actions[0] - actions[1]).abs().max())
        pairs.append(Pair(index % calls == 0, seconds[id(engine)], seconds[id(plain)], difference))
    return pairs


def print_table(pairs: list[Pair]) -> None:
    """Medians by kind of call and phase, with the median ratio of neighbours and its range.

    Text and image K/V are the DiT's work; the engine computes them once, among its encoders' work.
    """
    kinds = defaultdict(list)
    for pair in pairs:
        kinds["restart" if pair.restart else "continued"].append(pair)
    print("| one call | engine | plain | ratio (range) |")
    print("|---|---|---|---|")
    for kind, alike in kinds.items():
        for phase in PHASES:
            engine, plain = ([getattr(pair, side)[phase] for pair in alike] for side in ("engine", "plain"))
            ratios = [e / p for e, p in zip(engine, plain, strict=True)]
            print(
                f"| {kind}, {phase} | {statistics.median(engine):.2f} s | {statistics.median(plain):.2f} s "
                f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
            )


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(BUILTIN_CONFIGS), default="mid")
    parser.add_argument("--rounds", type=int, default=2, help="windows of calls to time, after one to warm up")
    parser.add_argument("--steps", type=int, default=16, help="denoising steps of the calls that are timed")
    parser.add_argument("--golden", type=Path, help="reproduced first (default: the size's own, where there is one)")
    parser.add_argument("--execution", choices=EXECUTIONS[:2], default="compile", help="of the engine")
    parser.add_argument("--separate", action="store_true", help="the engine's guidance branches one after the other")
    args = parser.parse_args(argv)
    checkpoint = synthetic_checkpoint(args.size, BUILTIN_CONFIGS[args.size], BUILTIN_STATISTICS)
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    model = load_model(config, checkpoint.weights, CPU, torch.float32)

    guidance = "separate" if args.separate else "batched"
    how = {"execution": args.execution, "guidance": guidance}

    path = args.golden or GOLDEN.get(args.size)
    if path is None or not path.is_file():
        print(f"No golden file {path or f'of size {args.size}'}: the engine's numbers are not checked.\n")
    else:
        golden = Golden(path)
        if parse_config(golden.config) != config:
            parser.error(f"{path.name} was not made at size {args.size}")
        of_golden = replace(golden.settings(), **how)
        report = golden_report(golden, config, tokenizer, lambda: engine_side(model, tokenizer, of_golden))
        print(f"{path.name}, {len(golden.calls)} calls, largest errors of the engine:")
        for name, error in report.errors.items():
            print(f"    {name:16} {error:.1e} (at most {TOLERANCES[name]:.0e})")
        print(flush=True)
        if any(error > TOLERANCES[name] for name, error in report.errors.items()):
            print("BEYOND TOLERANCE: the engine does not compute the release's numbers; nothing is timed.")
            return 1

    settings = RolloutSettings(steps=args.steps)
    engine = engine_side(model, tokenizer, replace(settings, **how))
    plain = PlainRollout(model, tokenizer, settings)
    prompt = tokenize(tokenizer, "pick up the block", config.dit.text_len)
    pairs = time_pairs(engine, plain, config, prompt, args.rounds + 1)
    if not all(pair.difference <= SAME_ACTIONS for pair in pairs):
        differences = ", ".join(f"{pair.difference:.1e}" for pair in pairs)
        print(f"DIFFERENT ACTIONS, call by call: {differences}, where at most {SAME_ACTIONS:.0e} is the same.")
        return 1
    print(f"Size {args.size}, {args.steps} steps, float32, {args.execution}, branches {guidance}, {machine()}\n")
    print_table(pairs[config.dit.max_chunk_size :])
    print(f"\nThe two sides' action latents differ by {max(pair.difference for pair in pairs):.1e} at most.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
