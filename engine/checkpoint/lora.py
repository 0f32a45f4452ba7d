"""LoRA fine-tunes: small matrices A and B beside weights W, run on W + (alpha / rank) B A (model.md section 2).

Such checkpoints name the transformer's entries as the PEFT library does: `base_model.model.` in front, `.base_layer.`
before the leaf of a weight that has an adapter, `.lora_A.weight` and `.lora_B.weight` beside it, perhaps with the
adapter's name `default` in between.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from engine.checkpoint.error import CheckpointError
from engine.checkpoint.files import StoredTensor
from engine.checkpoint.names import DIT

Key = TypeVar("Key")

_WRAPPED = DIT + "base_model.model."
_HALF = re.compile(r"(?P<layer>.+)\.lora_(?P<half>[AB])(\.default)?\.weight")


@dataclass(frozen=True)
class Adapter:
    """The two halves for one weight: A (rank, in) and B (out, rank)."""

    a: StoredTensor
    b: StoredTensor


def split_adapters(
    entries: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, Adapter]]:
    """Plain weights, and adapters by the weight they belong to; all under the names that a plain checkpoint has.

    Raises CheckpointError for half an adapter and for names that cannot be told apart.
    """
    plain: dict[str, StoredTensor] = {}
    halves: dict[tuple[str, str], StoredTensor] = {}
    for name, stored in entries.items():
        short = DIT + name.removeprefix(_WRAPPED) if name.startswith(_WRAPPED) else name
        if match := _HALF.fullmatch(short):
            _put(halves, (match["layer"] + ".weight", match["half"]), stored)
        elif "lora_" in short:
            raise CheckpointError(f"{stored}: expected a LoRA entry to end in .lora_A[.default].weight or .lora_B...")
        else:
            _put(plain, short.replace(".base_layer.", "."), stored)
    for (target, half), stored in halves.items():
        other = "B" if half == "A" else "A"
        if (target, other) not in halves:
            raise CheckpointError(f"{stored} is half an adapter: its lora_{other} is missing")
    targets = dict.fromkeys(target for target, _ in halves)
    return plain, {target: Adapter(halves[target, "A"], halves[target, "B"]) for target in targets}


def _put(found: dict[Key, StoredTensor], key: Key, stored: StoredTensor) -> None:
    if key in found:
        raise CheckpointError(f"{stored} and {found[key].name!r} stand for the same weight")
    found[key] = stored


def check_adapter(target: str, shape: tuple[int, ...], adapter: Adapter, rank: int) -> None:
    """Raises CheckpointError where an adapter of `rank` does not fit its weight `target`, of `shape` (out, in)."""
    if len(shape) != 2:
        raise CheckpointError(f"{adapter.a} adapts {target!r} of shape {list(shape)}, expected a matrix")
    for stored, expected in ((adapter.a, (rank, shape[1])), (adapter.b, (shape[0], rank))):
        if stored.shape != expected:
            raise CheckpointError(
                f"{stored} has shape {list(stored.shape)}, expected {list(expected)} at 'lora_rank' {rank}"
            )


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Weight (out, in) with an adapter of A (rank, in) and B (out, rank) in it, float32."""
    return weight.float() + scale * (b.float() @ a.float())
