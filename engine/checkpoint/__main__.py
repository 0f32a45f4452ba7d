"""`python -m engine.checkpoint`: look at a checkpoint, check it, or make one."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.checkpoint.error import CheckpointError
from engine.checkpoint.inspect import CARDS_GIB, find_problems, summarize
from engine.checkpoint.open import read_files
from engine.checkpoint.synthetic import BUILTIN_CONFIGS, synthesize

EXIT_PROBLEMS = 1
EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, without the program's name (default: that of the process); returns the exit code."""
    args = _parser().parse_args(arguments)
    try:
        if args.command == "synthesize":
            synthesize(args.size, args.directory, getattr(torch, args.dtype))
            return 0
        if args.command == "inspect":
            files = read_files(args.checkpoint, args.base_checkpoint, args.revision)
            print(*summarize(args.checkpoint, files, args.gpu_gib or CARDS_GIB), sep="\n")
            return 0
    except CheckpointError as error:
        print(f"engine.checkpoint: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return _verify(args)


def _verify(args: argparse.Namespace) -> int:
    count = 0
    try:
        for problem in find_problems(read_files(args.checkpoint, args.base_checkpoint, args.revision)):
            print(problem, flush=True)
            count += 1
    except CheckpointError as error:
        print(error)
        count += 1
    print(f"{args.checkpoint}: {count or 'no'} problem{'s' if count != 1 else ''}")
    return EXIT_PROBLEMS if count else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.checkpoint", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="print what a checkpoint holds and what serving it needs")
    verify = commands.add_parser("verify", help="read every weight; exits 1 and lists what is wrong")
    for command in (inspect, verify):
        command.add_argument("checkpoint", help="directory or hub id")
        command.add_argument("--base-checkpoint", help="directory or hub id of what a LoRA fine-tune is based on")
        command.add_argument("--revision", help="branch, tag or commit of a hub id")
    inspect.add_argument(
        "--gpu-gib", type=float, action="append", metavar="N",
        help=f"a GPU's memory to say the number of sessions for; may be repeated (default: {CARDS_GIB})",
    )  # fmt: skip
    make = commands.add_parser("synthesize", help="write a checkpoint with synthetic weights")
    make.add_argument("--size", choices=sorted(BUILTIN_CONFIGS), default="tiny")
    make.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    make.add_argument("directory", type=Path, help="where to; missing or empty")
    return parser


if __name__ == "__main__":
    sys.exit(main())
