"""What operations on a device that is not there gave before, so that they need not be faked again."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # looks at what torch is built with, and must see the truth
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True)
class Known:
    """The result of an operation: kind "new", "view" of the first argument, the "first argument", or "unlike" these."""

    kind: str
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None


KNOWN: dict[Any, Known] = {}


def describe(result: Any, args: Any) -> Known:
    if not isinstance(result, FakeTensor) or result.device.type != "cuda":
        return Known("unlike")
    if args and result is args[0]:
        return Known("first argument")
    storage = result.untyped_storage()._cdata
    given = [tensor.untyped_storage()._cdata for tensor in tensors_in(args)]
    like = (tuple(result.shape), result.stride(), result.storage_offset(), result.dtype, result.device)
    if storage not in given:
        return Known("new", *like)
    is_view = isinstance(args[0], FakeTensor) and storage == given[0] and result.dtype == args[0].dtype
    return Known("view", *like) if is_view else Known("unlike")


def key_of(values: Any) -> Any:
    """Equal where an operation gives tensors alike; None where that cannot be said."""
    key: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            key.append((value.shape, value.stride(), value.storage_offset(), value.dtype, value.device))
        elif isinstance(value, (tuple, list)):
            key.append(key_of(value))
        else:
            key.append((type(value), value))
    try:
        hash(found := tuple(key))
    except TypeError:
        return None
    return found


def tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
