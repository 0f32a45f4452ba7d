"""Everything that speed on a GPU is judged by, part by part: Markdown tables on the standard output (docs/gpu.md).

    python -m benchmarks.gpu --parts start,tests,main     whether the server runs there, and the number that matters
    python -m benchmarks.gpu --parts golden,attention,products,video,fp8,ways,steps      what that number is made of
    python -m benchmarks.gpu --device cpu --size tiny     the same road without a GPU, to see that it can be walked

Each part has a budget of seconds and fails alone; each row is also appended to a file as a line of JSON when it comes.
Exits 1 where a result is beyond its bound or a part did not run through. Targets are told beside the numbers.

Sizes are the DROID 14B geometry's with random weights. Needs torch 2.11 or later with Triton, transformers and
safetensors, and the wheels named in docs/gpu.md; no network and no checkpoint.
`flash_attn_interface` is measured where it is installed.
"""

import argparse
import faulthandler
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.golden import FILES, TOLERANCE, Mode, check
from benchmarks.gpu_kernels import compare_attention, matmul_rates, timed
from benchmarks.gpu_model import Bench, free, load
from benchmarks.gpu_report import Verdict, begin_part, begin_table, show, show_row, write_rows_to
from benchmarks.gpu_speed import Way, begin_speed_table, compare_ways, time_calls
from benchmarks.machine import machine
from engine.checkpoint.synthetic import BUILTIN_CONFIGS
from engine.settings import EngineSettings
from engine.startup import load_policy
from protocol.robot import Observation

SESSION = next(path for path in FILES if path.stem == "session")
STEP_CACHES = ("none", "mask-8", "velocity")
KERNELS = 15
ON_CPU_TIMES = 20  # as long may a part take there


@dataclass
class Run:
    """What the parts share. rates: of matrix products, once measured. plain: the DiT's seconds without float8."""

    size: str
    device: torch.device
    calls: int
    verdict: Verdict
    rates: dict[str, float] = field(default_factory=dict)
    plain: dict[Way, float] = field(default_factory=dict)
    _bench: Bench | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def executions(self) -> tuple[str, ...]:
        return ("eager", "compile", "graph") if self.on_gpu else ("eager",)

    @property
    def main(self) -> Way:
        """What a lab that wants speed runs."""
        return Way(self.executions[-1], "mask-5", main=True)

    def bench(self, fp8: bool = False) -> Bench:
        """The model, which stays loaded for the parts that follow; one at a time."""
        if self._bench is None or self._bench.fp8 != fp8:
            self.drop()
            dtype = torch.bfloat16 if self.on_gpu else torch.float32
            text_encoder = torch.device("cpu") if fp8 else self.device
            self._bench = load(self.size, self.device, dtype, fp8, text_encoder)
        return self._bench

    def drop(self) -> None:
        self._bench = None
        torch.compiler.reset()  # what was compiled may refer to the model
        free(self.device)

    def measured_rates(self) -> dict[str, float]:
        if not self.rates:
            bench = self.bench()
            self.rates = matmul_rates(bench.config, self.device, bench.dtype)
        return self.rates


def start(run: Run) -> None:
    """The server's own start with the smallest model, and a window of calls: does it run here at all, and how?"""
    began = time.perf_counter()
    policy = load_policy(EngineSettings(checkpoint="tiny", device=str(run.device)), lambda status: None)
    started = time.perf_counter() - began
    seen = Observation(
        views={view.name: np.full((4, 180, 320, 3), 127, np.uint8) for view in policy.embodiment.views},
        state={vector.name: np.zeros(vector.size, np.float32) for vector in policy.embodiment.state},
        prompt="pick up the block",
    )
    seconds = []
    for _ in range(policy.calls_per_window + 1):
        began = time.perf_counter()
        policy.infer("robot", seen)
        seconds.append(time.perf_counter() - began)
    info = policy.info()
    begin_table("the server with tiny", "device", "execution", "attention", "start s", "slowest call ms")
    how = f"{info['execution']}" + (f" ({info['execution_reason']})" if info["execution_reason"] else "")
    attention = str(info["attention_backend"])
    show_row("started", str(info["device"]), how, attention, f"{started:.1f}", f"{1e3 * max(seconds):.0f}")


def gpu_tests(run: Run) -> None:
    """The tests that need a CUDA device; elsewhere all of them are skipped by name."""
    files = sorted(str(path) for path in Path("tests").glob("test_*.py") if "mark.gpu" in path.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    begin_table("tests that need a GPU", "exit code", "result")
    show_row("pytest -m gpu", str(done.returncode), lines[-1] if lines else done.stderr[-200:])
    if done.returncode:
        show(*lines[-60:], done.stderr[-2000:])
    run.verdict.hold("tests that need a GPU", done.returncode, 0)


def main_number(run: Run) -> None:
    """The number that matters: a call of the model as labs run it; then where its time goes, kernel by kernel."""
    bench, way = run.bench(), run.main
    begin_speed_table()
    run.plain[way] = time_calls(bench, way, run.calls, run.measured_rates(), run.verdict)
    robot = bench.robots(1, way.settings)[0]
    for _ in range(2):
        robot.call()  # captures
    kind, name = (DeviceType.CUDA, "self_device_time_total") if run.on_gpu else (DeviceType.CPU, "self_cpu_time_total")
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if run.on_gpu else [])]) as prof:
        robot.call()
    kernels = [each for each in prof.key_averages() if each.device_type == kind]
    kernels.sort(key=lambda each: getattr(each, name), reverse=True)
    whole = sum(getattr(each, name) for each in kernels) or 1
    begin_table(f"the {KERNELS} longest kernels of one continued call", "times", "ms", "share")
    for each in kernels[:KERNELS]:
        spent = getattr(each, name)
        show_row(each.key[:90].replace("|", "/"), str(each.count), f"{spent / 1e3:.2f}", f"{100 * spent / whole:.1f} %")


def golden(run: Run) -> None:
    check_golden(run.device, run.executions, run.verdict)


def check_golden(device: torch.device, executions: tuple[str, ...], verdict: Verdict) -> None:
    """A row for each execution: the golden session in float32, against what the release computed."""
    outputs = ("video_latents", "action_latents", "action")
    begin_table(f"golden session in float32, largest error (at most {TOLERANCE:.0e})", *outputs, "DiT forwards")
    for execution in executions:
        what = f"golden session, {execution}"
        with verdict.attempt(what):
            report = check(SESSION, Mode(device=str(device), execution=execution))
            shown = [f"{report.errors[name]:.1e}" for name in outputs]
            show_row(execution, *shown, f"{report.forwards} of {report.forwards_expected}")
            for name, error in report.errors.items():
                verdict.hold(f"{what}, {name}", error, TOLERANCE)
            verdict.hold(f"{what}, DiT forwards", abs(report.forwards - report.forwards_expected), 0)
        free(device)


def attention(run: Run) -> None:
    """Every backend over a full window, against float64."""
    bench = run.bench()
    compare_attention(bench.config, run.device, bench.dtype, run.verdict)


def products(run: Run) -> None:
    """What the card's matrix units give at this model's sizes: the ceiling of everything else."""
    begin_table("matrix products", "TFLOP/s")
    for name, rate in run.measured_rates().items():
        show_row(name, f"{rate / 1e12:.1f}")


def video(run: Run) -> None:
    """The encoder alone, launched kernel by kernel: what a restart and every other call begin with."""
    bench = run.bench()
    config, encoder = bench.config, bench.model.video_encoder
    shape = (config.video_height, config.video_width)
    block = 1 + 4 * config.dit.num_frame_per_block
    frames = torch.zeros(1, 3, block, *shape, device=run.device, dtype=bench.dtype)
    begin_table("video encoder", "ms")
    with torch.inference_mode():
        still = 1e3 * timed(
            lambda: encoder.encode_still(frames[:, :, :1], grey_frames=config.num_frames - 1), run.device, 3
        )
        show_row(f"a restart: an image and {config.num_frames - 1} grey frames", f"{still:.1f}")
        seen = 1e3 * timed(lambda: encoder.encode(frames), run.device, 3)
        show_row(f"a continued call: {block} frames", f"{seen:.1f}")


def fp8(run: Run) -> None:
    """The main number again, with the blocks' products in float8 and the text encoder on the host."""
    rates = run.measured_rates()
    begin_speed_table()
    time_calls(run.bench(fp8=True), run.main, run.calls, rates, run.verdict, run.plain.get(run.main))


def ways(run: Run) -> None:
    """Every execution gives the same, and how long it takes; branches apart; three robots."""
    separate = Way("eager", "mask-5", guidance="separate")
    batched = [replace(separate, execution=execution, guidance="batched") for execution in run.executions]
    compare_ways(run.bench(), [separate, *batched], run.verdict)
    others = [Way(execution, "mask-5") for execution in run.executions[:-1]]
    best = run.executions[-1]
    time_ways(run, [*others, Way(best, "mask-5", guidance="separate"), Way(best, "mask-5", sessions=3)])


def steps(run: Run) -> None:
    """The other step settings."""
    time_ways(run, [replace(run.main, step_cache=step_cache) for step_cache in STEP_CACHES])


def time_ways(run: Run, ways: list[Way]) -> None:
    """A row for each way, with half the calls where no target is."""
    begin_speed_table()
    for way in ways:
        with run.verdict.attempt(f"{run.bench().label}, {way}"):
            calls = run.calls if way.main else -(-run.calls // 2)
            time_calls(run.bench(), way, calls, run.measured_rates(), run.verdict)


PARTS: dict[str, tuple[Callable[[Run], None], int]] = {
    "start": (start, 60),
    "tests": (gpu_tests, 180),
    "main": (main_number, 270),
    "golden": (golden, 75),
    "attention": (attention, 60),
    "products": (products, 30),
    "video": (video, 30),
    "fp8": (fp8, 105),
    "ways": (ways, 120),
    "steps": (steps, 100),
}
"""Each part and the seconds that it may take on a GPU: the first three, and the others, under nine minutes together."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the body after so many seconds; ends the process, saying where it is, where that is of no
    use, as in a kernel that hangs.
    """

    def on_alarm(*_: object) -> NoReturn:
        raise TimeoutError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds + 20, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("droid-14b", *BUILTIN_CONFIGS), default="droid-14b")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; in this order")
    parser.add_argument("--calls", type=int, default=10, help="calls to take the median of, half where no target is")
    parser.add_argument("--rows", type=Path, default=Path("gpu-rows.jsonl"), help="file that each row is appended to")
    args = parser.parse_args(argv)
    wanted = args.parts.split(",")
    if unknown := set(wanted) - PARTS.keys():
        parser.error(f"--parts: no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    verdict = Verdict(on_target_machine=device.type == "cuda" and args.size == "droid-14b")
    name = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}" if device.type == "cuda" else machine()
    show(f"{args.size}, {name}, Python {platform.python_version()}")
    write_rows_to(args.rows)
    run = Run(args.size, device, args.calls, verdict)
    for part, (work, seconds) in PARTS.items():
        if part in wanted:
            begin_part(part)
            seconds *= 1 if run.on_gpu else ON_CPU_TIMES
            began = time.perf_counter()
            with verdict.attempt(f"part {part}"), within(seconds):
                work(run)
            show("", f"Part {part}: {time.perf_counter() - began:.0f} s of at most {seconds}.")
    write_rows_to(None)
    return verdict.conclude()


if __name__ == "__main__":
    sys.exit(main())
