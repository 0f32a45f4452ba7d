"""Everything that speed on a GPU is judged by, in one run: Markdown tables on the standard output.

    python -m benchmarks.gpu                              the DROID 14B geometry with random weights, on a CUDA device
    python -m benchmarks.gpu --device cpu --size tiny     the same road without a GPU, to see that it can be walked

Exits 1 where a result is beyond its bound: the golden session in float32 in every execution, each attention backend,
or a row that did not run at all. Speed and memory have targets, told beside the numbers of the 14B on CUDA.

Needs torch 2.11 or later with Triton, transformers, safetensors, huggingface_hub, PyYAML and, where they are missing,
the wheels of diffusers, ftfy, wcwidth, importlib_metadata, zipp, requests and regex; no network and no checkpoint.
`flash_attn_interface` is measured where it is installed.
"""

import argparse
import platform
import sys
import time
from dataclasses import replace

import torch

from benchmarks.gpu_kernels import compare_attention, matmul_rates
from benchmarks.gpu_model import Bench, free, load
from benchmarks.gpu_report import Verdict, begin_table, show, show_row
from benchmarks.gpu_speed import Way, begin_speed_table, compare_ways, time_calls
from benchmarks.kv import machine
from engine.builtin import BUILTIN_CONFIGS
from tests.golden import FILES, TOLERANCE, Mode, check

SESSION = next(path for path in FILES if path.stem == "session")
STEP_CACHES = ("none", "mask-8", "mask-5", "velocity")


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


def time_model(
    bench: Bench, ways: list[Way], calls: int, rates: dict[str, float], verdict: Verdict, plain: dict[Way, float]
) -> dict[Way, float]:
    """A row for each way; returns the DiT's seconds. plain: those without float8."""
    dit_seconds = {}
    for way in ways:
        with verdict.attempt(f"{bench.label}, {way}"):
            counted = calls if way.main else -(-calls // 2)
            dit_seconds[way] = time_calls(bench, way, counted, rates, verdict, plain.get(way))
    return dit_seconds


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("droid-14b", *BUILTIN_CONFIGS), default="droid-14b")
    parser.add_argument("--calls", type=int, default=10, help="calls to take the median of, half where no target is")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    executions = ("eager", "compile", "graph") if on_gpu else ("eager",)
    best = executions[-1]
    verdict = Verdict(on_target_machine=on_gpu and args.size == "droid-14b")
    name = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}" if on_gpu else machine()
    show(f"{args.size}, {name}, Python {platform.python_version()}")

    check_golden(device, executions, verdict)
    bench = load(args.size, device, dtype, fp8=False, text_encoder=device)
    compare_attention(bench.config, device, dtype, verdict)
    separate = Way("eager", "mask-5", batched=False)
    compare_ways(bench, [separate, *(replace(separate, execution=e, batched=True) for e in executions)], verdict)
    rates = matmul_rates(bench.config, device, dtype)
    show("", f"Matrix products: {rates['model'] / 1e12:.1f} TFLOP/s, in float8 {rates['fp8'] / 1e12:.1f} TFLOP/s")

    begin_speed_table()
    main_ways = [Way(best, step_cache, main=True) for step_cache in STEP_CACHES]
    others = [Way(execution, "mask-8") for execution in executions[:-1]]
    others += [Way(best, "mask-8", batched=False), Way(best, "mask-5", sessions=3)]
    plain = time_model(bench, main_ways + others, args.calls, rates, verdict, plain={})
    del bench
    torch.compiler.reset()  # what was compiled may refer to the model
    free(device)
    bench = load(args.size, device, dtype, fp8=True, text_encoder=torch.device("cpu"))
    # Not the velocity cache: it runs the forwards of the others, only how many is its own affair.
    time_model(bench, [way for way in main_ways if way.step_cache != "velocity"], args.calls, rates, verdict, plain)
    show("", f"All of it took {time.perf_counter() - began:.0f} s.")
    return verdict.conclude()


if __name__ == "__main__":
    sys.exit(main())
