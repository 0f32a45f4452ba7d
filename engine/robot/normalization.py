"""Normalisation statistics of a checkpoint (model.md section 6)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.robot.embodiment import EMBODIMENT_HINT, ActionVector
from protocol.robot import StateVector

_LARGEST = torch.finfo(torch.float32).max


class StatisticsError(ValueError):
    """Normalisation statistics that are missing or of the wrong form; the message says which."""


@dataclass(frozen=True)
class Range:
    """The 1st and 99th percentile of several quantities in a row, (n,) float32 each."""

    q01: Tensor
    q99: Tensor


def read_range(
    metadata: Mapping[str, Any], embodiment: str, kind: str, parts: Sequence[StateVector | ActionVector]
) -> Range:
    """The statistics of `kind` ("state" or "action") from a checkpoint's `experiment_cfg/metadata.json`, parsed.

    parts: the vectors that make up the row, in order.
    Raises StatisticsError naming the entry that is missing or has the wrong length.
    """
    if embodiment not in metadata:
        raise StatisticsError(
            f"metadata.json has no embodiment {embodiment!r}; it has {sorted(metadata)}: {EMBODIMENT_HINT}"
        )
    values = []
    for quantile in ("q01", "q99"):
        row: list[float] = []
        for part in parts:
            path = (embodiment, "statistics", kind, part.name, quantile)
            numbers: Any = metadata
            for key in path:
                numbers = numbers.get(key) if isinstance(numbers, Mapping) else None
            if not isinstance(numbers, list) or len(numbers) != part.size or not all(map(_is_number, numbers)):
                raise StatisticsError(f"metadata.json needs a list of {part.size} numbers at {'.'.join(path)}")
            row += numbers
        values.append(torch.tensor(row, dtype=torch.float32))
    return Range(*values)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST  # type: ignore[arg-type]  # NaN fails
