"""How fast a checkpoint loads and what memory that takes beyond the model: a Markdown table.

    python -m benchmarks.loading                   3.4 GB in shards of 500 MB, in a temporary folder
    python -m benchmarks.loading --checkpoint DIR

Reading the files alone, into one buffer, is the measure; reading them into new memory is what no loading onto a CPU can
beat. Each figure is the best of several rounds, from the disk (the files' pages are dropped from the page cache first)
and from the page cache.
"""

import argparse
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.machine import machine, peak_resident_bytes
from engine.checkpoint.open import read_files
from engine.checkpoint.synthetic import synthesize
from engine.model.weights import Model, is_finite, load_model

SHARD_BYTES = 500 * 10**6
BUFFER_BYTES = 16 * 2**20


def cheap_weights(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.02, 0.02)


def drop_from_cache(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_alone(files: list[Path]) -> float:
    """Seconds of reading every byte once, into one buffer."""
    buffer = bytearray(BUFFER_BYTES)
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def read_to_keep(files: list[Path]) -> float:
    """Seconds of reading every file into new memory: what no loading onto a CPU can beat."""
    started = time.perf_counter()
    kept = [path.read_bytes() for path in files]
    seconds = time.perf_counter() - started
    del kept
    return seconds


def load(directory: Path, device: torch.device) -> tuple[float, Model]:
    """Seconds of a load, and what was loaded."""
    checkpoint = read_files(str(directory))
    started = time.perf_counter()
    model = load_model(checkpoint.config, checkpoint.weights, device, torch.bfloat16)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, model


def bytes_beyond_the_model(directory: Path, device: torch.device) -> int:
    """Most bytes of host memory at once, beyond what was there and the model's own. For a process of its own.

    Elsewhere, memory that was freed but not given back would hide some.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = peak_resident_bytes()
    _, model = load(directory, device)
    on_host = sum(p.nbytes for module, _ in model.components() for p in module.parameters() if p.device.type == "cpu")
    return peak_resident_bytes() - before - on_host


def finite_seconds(model: Model) -> float:
    """Seconds that looking for NaN takes of a load."""
    started = time.perf_counter()
    for module, _ in model.components():
        assert all(is_finite(p) for p in module.parameters())
    return time.perf_counter() - started


def measure(directory: Path, device: torch.device, rounds: int) -> None:
    checkpoint = read_files(str(directory))
    files = sorted({stored.file for stored in checkpoint.weights.entries.values()})
    size, largest = sum(path.stat().st_size for path in files), max(path.stat().st_size for path in files)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as apart:
        beyond = apart.submit(bytes_beyond_the_model, directory, device).result()
    load(directory, device)  # whatever is set up at a first time
    states: dict[str, Callable[[], object]] = {
        "disk": lambda: drop_from_cache(files),
        "page cache": lambda: read_alone(files),
    }
    print(f"{size / 1e9:.2f} GB in {len(files)} files of at most {largest / 1e6:.0f} MB, onto {device} in bfloat16")
    print(f"{machine()}. Host memory beyond the model: {beyond / 1e6:,.0f} MB, {beyond / largest:.2f} of a shard.\n")
    print("| from | reading alone | reading to keep | loading | of reading alone | NaN check |")
    print("|---|---|---|---|---|---|")
    for name, prepare in states.items():
        alone, keep, seconds, finite = [], [], [], []
        for _ in range(rounds):
            prepare()
            alone.append(read_alone(files))
            prepare()
            keep.append(read_to_keep(files))
            prepare()
            taken, model = load(directory, device)
            seconds.append(taken)
            finite.append(finite_seconds(model))
            del model
            gc.collect()  # modules refer to each other in circles
        rates = " | ".join(f"{size / min(times) / 1e6:,.0f} MB/s" for times in (alone, keep, seconds))
        print(
            f"| {name} | {rates} | {min(alone) / min(seconds):.0%} | {min(finite) / min(seconds):.0%} of the loading |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="a directory; default: one made for the purpose")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.checkpoint:
        measure(args.checkpoint, torch.device(args.device), args.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "droid-2l"
        synthesize("droid-2l", directory, torch.bfloat16, SHARD_BYTES, cheap_weights)
        measure(directory, torch.device(args.device), args.rounds)


if __name__ == "__main__":
    main()
