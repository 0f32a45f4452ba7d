"""The paged pool against the dense way, at the size of the `mid` checkpoint, in one process.

    python -m benchmarks.kv [--size mid] [--rounds 3] [--chunks 100]

Prints one Markdown table. Chunks of both ways alternate, so that both see the same machine.
"""

import argparse
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.dense_kv import DenseKVCache
from engine.checkpoint.builtin import BUILTIN_CONFIGS, BUILTIN_STATISTICS
from engine.checkpoint.live_bytes import LiveBytes
from engine.checkpoint.opening import synthetic_checkpoint
from engine.model.dit import CrossContext, ForwardContext
from engine.model.rope import Rope
from engine.model.text import Tokenizer
from engine.model.weights import Model, load_model
from engine.rollout import Prediction, Rollout, RolloutSettings
from engine.session import Session
from engine.startup import build_cache
from kv_cache.cache import KVCache

CPU = torch.device("cpu")
FILLS = 4  # calls from one restart of the window to the next


@dataclass
class Robot:
    """One session over one kind of cache."""

    cache: KVCache
    rollout: Rollout
    session: Session
    generator: torch.Generator
    prompt: tuple[torch.Tensor, torch.Tensor]

    def chunk(self) -> Prediction:
        """One call with random frames."""
        config = self.rollout.config
        size = (4, 2 * config.view_height, 2 * config.view_width, 3)
        frames = torch.randint(0, 256, size, generator=self.generator, dtype=torch.uint8)
        return self.rollout.call(self.session, frames, *self.prompt, torch.zeros(config.max_state_dim))


def make_robot(model: Model, tokenizer: Tokenizer, dense: bool, steps: int) -> Robot:
    """A robot over the paged pool or the dense cache."""
    cache = build_cache(model.config, 2**30, CPU, torch.float32)
    if dense:
        cache = DenseKVCache(cache)
    rollout = Rollout(model, cache, tokenizer, RolloutSettings(steps=steps))
    prompt = rollout.tokenize("pick up the block")
    return Robot(cache, rollout, Session(cache.session(0)), torch.Generator().manual_seed(1140), prompt)


def compare_times(paged: Robot, dense: Robot, rounds: int) -> tuple[float, float, float]:
    """Median DiT seconds of a chunk (prefill and denoise) of both, and the median ratio of neighbours."""
    pairs = []
    for _ in range(rounds * FILLS):
        seconds = [robot.chunk().seconds for robot in (paged, dense)]
        pairs.append([s["prefill"] + s["denoise"] for s in seconds])
    pairs = pairs[FILLS:]  # the first window warms up
    ratio = statistics.median(p / d for p, d in pairs)
    return statistics.median(p for p, _ in pairs), statistics.median(d for _, d in pairs), ratio


@torch.inference_mode()
def large_allocations(model: Model, robot: Robot) -> int:
    """Allocations as large as one layer's K of a full window that a denoise forward makes because its window is full.

    What it allocates over a window of one frame as well is not the window's.
    """
    return _large_allocations(model, robot, 7) - _large_allocations(model, robot, 1)


def _large_allocations(model: Model, robot: Robot, resident: int) -> int:
    """Those of one denoise forward over a window of so many resident frames."""
    while robot.session.kv.resident_frames != resident:
        robot.chunk()
    config, kv, geometry = model.config, robot.session.kv, robot.cache.geometry
    window_tokens = robot.cache.policy.capacity * geometry.frame_tokens
    window_k = window_tokens * geometry.heads * geometry.head_dim * geometry.dtype.itemsize
    time = model.dit.embed_time(torch.tensor([500, 500]))
    rope = Rope(geometry.head_dim, config.latent_height // 2, config.latent_width // 2, 2, 24, 1)
    rotation = rope.rotation(resident, 2, True, CPU)
    tokens = torch.randn(1, 2 * geometry.frame_tokens + geometry.register_tokens, config.dit.dim)
    cross = CrossContext((kv.text(0), kv.text(1)), kv.image)
    with robot.cache.call(kv), robot.cache.lease(kv, 2) as plan:
        context = ForwardContext(rotation, plan, cross)
        model.dit(tokens, time, context, robot.cache.paged)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            model.dit(tokens, time, context, robot.cache.paged)
    return sum(event.self_cpu_memory_usage >= window_k for event in prof.events())


@dataclass(frozen=True)
class Peaks:
    """Most bytes in tensors during a stretch of chunks, and the process's high-water mark at its end."""

    tensors: int
    process: int


def peaks(robot: Robot, chunks: int) -> list[Peaks]:
    """Of the first two windows, and of each quarter of `chunks` more chunks. Pool and weights are not in `tensors`."""
    found = []
    with LiveBytes() as live:
        for stretch in (2 * FILLS, *[chunks // 4] * 4):
            live.peak = 0
            for _ in range(stretch):
                robot.chunk()
            found.append(Peaks(live.peak, peak_resident_bytes()))
    return found


def growth_text(peaks: list[int]) -> str:
    """The first peak, and by how much each later one differs from it."""
    first, *later = peaks
    return f"{first / 2**20:.0f} MiB, then {', '.join(f'{(peak - first) / 2**20:+.0f}' for peak in later)} MiB"


def peak_resident_bytes() -> int:
    """The process's high-water mark."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def machine() -> str:
    """The processor's name and what torch uses of it."""
    info = Path("/proc/cpuinfo").read_text()
    name = info.split("model name")[1].split(":")[1].splitlines()[0].strip() if "model name" in info else ""
    return f"{name or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(BUILTIN_CONFIGS), default="mid")
    parser.add_argument("--rounds", type=int, default=3, help="windows of four chunks to time, after one to warm up")
    parser.add_argument("--steps", type=int, default=16, help="denoising steps of the chunks that are timed")
    parser.add_argument("--chunks", type=int, default=100, help="chunks over which the peak memory must be flat")
    args = parser.parse_args(argv)
    checkpoint = synthetic_checkpoint(args.size, BUILTIN_CONFIGS[args.size], BUILTIN_STATISTICS)
    model = load_model(checkpoint.config, checkpoint.weights, CPU, torch.float32)
    quick = make_robot(model, checkpoint.tokenizer, dense=False, steps=1)
    memory = peaks(quick, args.chunks)
    paged, dense = (make_robot(model, checkpoint.tokenizer, dense, args.steps) for dense in (False, True))
    paged_seconds, dense_seconds, ratio = compare_times(paged, dense, args.rounds + 1)
    allocations = [large_allocations(model, robot) for robot in (paged, dense)]
    report = paged.cache.report()
    views = report.plain_view / (report.plain_view + report.gathered)
    print(f"Size {args.size}, float32, {machine()}\n")
    print("| | paged pool | dense `cat` and slice | ratio |")
    print("|---|---|---|---|")
    print(
        f"| DiT time of one chunk, {args.steps} steps | {paged_seconds:.2f} s | {dense_seconds:.2f} s | {ratio:.2f} |"
    )
    print(
        f"| window-sized allocations of one denoise forward at a full window | {allocations[0]} | {allocations[1]} | |"
    )
    print(f"| attention plans that read a plain view | {views:.0%} | | |")
    of_tensors, of_process = (growth_text([getattr(peak, of) for peak in memory]) for of in ("tensors", "process"))
    quarters = f"in the first two windows, and in each quarter of {args.chunks} more chunks of 1 step"
    print(f"| most memory in tensors beside pool and weights {quarters} | {of_tensors} | | |")
    print(f"| the process's high-water mark after each of these | {of_process} | | |")


if __name__ == "__main__":
    main()
