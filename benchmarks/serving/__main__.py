"""`python -m benchmarks.serving`: what the server costs on the wire and under load, as Markdown tables.

`--soak-seconds 600` adds a soak with churn, disconnects and garbage against the real tiny policy.
"""

import argparse

from benchmarks.serving.crowd import crowd_table
from benchmarks.serving.load import load_table
from benchmarks.serving.processes import machine
from benchmarks.serving.soak import soak_table
from benchmarks.serving.wire import BLOCKS, wire_table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=400, help="calls of each side in the wire table")
    parser.add_argument("--load-seconds", type=float, default=20, help="per number of robots; 0 leaves it out")
    parser.add_argument("--crowd-seconds", type=float, default=10, help="per kind of company; 0 leaves it out")
    parser.add_argument("--soak-seconds", type=float, default=0, help="0 leaves the soak out")
    options = parser.parse_args()
    print(f"Measured on {machine()}.", flush=True)
    if options.rounds >= BLOCKS:
        _show(wire_table(options.rounds - options.rounds % BLOCKS))
    if options.load_seconds:
        _show(load_table(options.load_seconds))
    if options.crowd_seconds:
        _show(crowd_table(options.crowd_seconds))
    if options.soak_seconds:
        _show(soak_table(options.soak_seconds))


def _show(rows: list[str]) -> None:
    print("", *rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
