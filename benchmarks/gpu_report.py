"""What a run on a GPU prints, row by row, and what it is judged by."""

import json
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


def show(*lines: str) -> None:
    """Print at once: a run that is cut off has left what it measured."""
    print(*lines, sep="\n", flush=True)


@dataclass
class _Table:
    """What rows are said to belong to, and the file that takes each as a line of JSON when it is shown."""

    path: Path | None = None
    part: str = ""
    columns: tuple[str, ...] = ()


_table = _Table()


def write_rows_to(path: Path | None) -> None:
    """Have each row from here on appended to a file too, as one line: what a run that dies has measured is there."""
    _table.path = path


def begin_part(name: str) -> None:
    _table.part = name


def begin_table(*columns: str) -> None:
    _table.columns = columns
    show("", _row(columns), "|---" * len(columns) + "|")


def show_row(*cells: str) -> None:
    show(_row(cells))
    write_row(dict(zip(_table.columns, cells, strict=True)))


def write_row(row: dict[str, object]) -> None:
    if _table.path is not None:
        with _table.path.open("a") as file:
            file.write(json.dumps({"part": _table.part} | row) + "\n")


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
            write_row({"fault": self.faults[-1]})

    def conclude(self) -> int:
        """Say which bounds were not kept; returns the exit code, 1 where there is one."""
        verdicts = [f"BEYOND ITS BOUND: {fault}" for fault in self.faults] or ["Everything is within its bounds."]
        show("", *verdicts)
        return 1 if self.faults else 0
