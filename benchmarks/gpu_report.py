"""What a run on a GPU prints, row by row, and what it is judged by."""

import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


def show(*lines: str) -> None:
    """Print at once: a run that is cut off has left what it measured."""
    print(*lines, sep="\n", flush=True)


def begin_table(*columns: str) -> None:
    show("", _row(columns), "|---" * len(columns) + "|")


def show_row(*cells: str) -> None:
    show(_row(cells))


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


@dataclass
class Verdict:
    """Bounds decide the exit code; targets are only told beside the numbers, on the machine that they are for.

    on_target_machine: whether targets are told at all. faults: what was beyond its bound or did not run.
    """

    on_target_machine: bool
    faults: list[str] = field(default_factory=list)

    def hold(self, what: str, error: float, largest: float) -> None:
        """Take note where an error is larger than allowed, infinite or no number."""
        if not (error <= largest and math.isfinite(error)):
            expected = f"at most {largest:.0e}" if math.isfinite(largest) else "a finite number"
            self.faults.append(f"{what}: {error:.1e}, expected {expected}")

    def beside(self, shown: str, value: float, target: float | None) -> str:
        """A number as it is shown; with its target, the most that it may be, and whether that is met."""
        if target is None or not self.on_target_machine:
            return shown
        return f"{shown} ({target:g}: {'met' if value <= target else 'missed'})"

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Take note where the body raises, and go on: a GPU is rarely at hand, and the other rows are wanted."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            reason = (str(error).splitlines() or ["no reason given"])[0]
            self.faults.append(f"{what}: {type(error).__name__}: {reason}")

    def conclude(self) -> int:
        """Say which bounds were not kept; returns the exit code, 1 where there is one."""
        verdicts = [f"BEYOND ITS BOUND: {fault}" for fault in self.faults] or ["Everything is within its bounds."]
        show("", *verdicts)
        return 1 if self.faults else 0
