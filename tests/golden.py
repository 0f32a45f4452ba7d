"""Compare the engine with golden files: what the public release computed, at small size.

    python -m tests.golden FILE...              prints the largest error of each output, exits 1 beyond tolerance
    python -m tests.golden --dtype bfloat16     prints how far rollouts in another arithmetic (or --fp8) are from it

--device, --execution and --separate choose the way that forwards are run, which must not change a number.

A file is complete: sizes, inputs and outputs are inside, and the weights follow from the names.
"""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.golden import (
    FILES,
    TOLERANCE,
    Golden,
    Mode,
    build_engine,
    check,
    check_rollout,
)
from engine.execution import EXECUTIONS


def print_deviations(files: list[Path], mode: Mode) -> int:
    """Run the rollouts among the files in that arithmetic; returns 0 where all that comes out is finite."""
    finite = True
    for golden, name in ((Golden(path), path.stem) for path in files):
        if golden.kind != "rollout":
            print(f"{name}: no rollout")
            continue
        report = check_rollout(golden, build_engine(golden, mode))
        finite &= report.finite
        print(
            f"{name}: video {report.psnr:.1f} dB, joints {report.joints:.1e} rad, gripper {report.gripper:.1e}",
            flush=True,
        )
    return 0 if finite else 1


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=FILES, help="default: all that the project has")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="largest absolute error (default 1e-4)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32",
        help="bfloat16: print the deviation of rollouts in this dtype; exits 0 where it is a number",
    )  # fmt: skip
    parser.add_argument("--fp8", action="store_true", help="the same with the transformer's blocks in float8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--execution", choices=EXECUTIONS, default="eager")
    parser.add_argument("--separate", action="store_true", help="guidance branches one after the other")
    args = parser.parse_args()
    if missing := [str(path) for path in args.files if not path.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    mode = Mode(
        device=args.device,
        dtype=getattr(torch, args.dtype),
        fp8=args.fp8,
        execution=args.execution,
        guidance="separate" if args.separate else "batched",
    )
    if not mode.is_exact:
        return print_deviations(args.files, mode)
    clean = True
    for path in args.files:
        report = check(path, mode)
        ok = report.clean(args.tolerance)
        clean &= ok
        print(f"{path.stem}: {'ok' if ok else 'BEYOND TOLERANCE'}")
        for name, error in report.errors.items():
            print(f"    {name:16} largest error {error:.1e}")
        print(f"    DiT forwards     {report.forwards} counted, {report.forwards_expected} expected", flush=True)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
