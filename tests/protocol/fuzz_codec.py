"""python -m tests.protocol.fuzz_codec --examples 2000000: codec and message parser against random and spoiled frames.

Every frame must end as a request or as one of the documented errors, whatever it holds that nobody looks at, and within
the memory that tests.protocol.frames allows. Exits 1 where one does not, and prints it.
"""

import argparse
import random
import sys
import time
import traceback
import tracemalloc
from collections import Counter

from tests.protocol.frames import PEAK_CONSTANT, PEAK_PER_BYTE, ending, memory_bombs, odd_message, spoiled, valid_frames

_MEASURED = 50  # one frame in so many has its memory measured, which is slow


def peak_memory(frame: bytes) -> int:
    """Bytes allocated at once, at most, while a frame is decoded and parsed."""
    tracemalloc.start()
    ending(frame)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def check_memory(frame: bytes) -> float:
    """Raises AssertionError where a frame takes more memory than allowed; returns the part of it that it took."""
    peak = peak_memory(frame)
    allowed = PEAK_PER_BYTE * len(frame) + PEAK_CONSTANT
    assert peak <= allowed, f"{peak} bytes of memory for a frame of {len(frame)}"
    return peak / allowed


def check(frame: bytes, number: int) -> str:
    """Raises where a frame ends otherwise than documented; returns how it ended, in a word."""
    end, _ = ending(frame)
    if number % _MEASURED == 0:
        check_memory(frame)
    return end.split(":")[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol.fuzz_codec")
    parser.add_argument("--examples", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    seeds = valid_frames()
    ends: Counter[str] = Counter()
    start = time.perf_counter()
    worst = max(check_memory(frame) for frame in memory_bombs())
    for number in range(options.examples):
        seed = rng.choice(seeds)
        match number % 10:
            case 0:
                frame = rng.randbytes(rng.randrange(300))
            case 1 | 2:
                frame = odd_message(rng)
            case _:
                frame = spoiled(seed, seeds, rng)
        try:
            ends[check(frame, number)] += 1
        except Exception:
            traceback.print_exc()
            print(f"example {number} of seed {options.seed}: bytes.fromhex('{frame.hex()}')")
            return 1
    rate = options.examples / (time.perf_counter() - start)
    print(f"{options.examples} frames, {rate:.0f} a second: {dict(ends.most_common())}")
    print(f"memory: at most {worst:.0%} of what is allowed, {PEAK_PER_BYTE} times the frame and {PEAK_CONSTANT} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
