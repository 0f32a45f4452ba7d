"""Synthetic weights: every tensor is a function of its checkpoint name and shape alone.

The rule is the one the golden rollouts were made with, so a model of any size can be rebuilt from its config and no
weights need to be stored. Such a model moves a robot about at random: it is for tests, demonstrations, benchmarks.
"""

import math
import zlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def unit_uniform(name: str, count: int) -> np.ndarray:
    """`count` float32 values of mean 0 and variance 1: splitmix64 over a counter, seeded with the CRC-32 of `name`."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        state = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        state += np.uint64(zlib.crc32(name.encode())) * np.uint64(0x100000001B3)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
        state ^= state >> np.uint64(31)
    fraction = (state >> np.uint64(40)).astype(np.float64) / 2**24
    return ((2 * fraction - 1) * math.sqrt(3)).astype(np.float32)


def synthetic_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """The float32 tensor of checkpoint entry `name`."""
    return as_trained(name, torch.from_numpy(unit_uniform(name, math.prod(shape)).reshape(shape)))


def as_trained(name: str, values: Tensor) -> Tensor:
    """Values of mean 0 and variance 1, scaled as the trained ones of checkpoint entry `name` would roughly be."""
    shape = values.shape
    leaf = name.rpartition(".")[2]
    if "norm_q." in name or "norm_k" in name:  # sharp attention, so that errors in it show
        return 2 * (1 + 0.1 * values)
    if leaf == "gamma" or (leaf == "weight" and len(shape) == 1):
        return 1 + 0.1 * values
    if leaf in ("bias", "b"):
        return 0.02 * values
    if leaf in ("cls_embedding", "pos_embedding") or name.endswith("pos_embedding.embedding.weight"):
        return 0.5 * values
    if name.endswith("token_embedding.weight"):
        return values
    fan_in = {"W": shape[1:2], "modulation": shape[-1:]}.get(leaf, shape[1:])
    return values / math.sqrt(math.prod(fan_in))


class SyntheticWeights:
    """A source of weights that makes each when it is asked for."""

    def where(self, name: str) -> str:
        """The weight, for a message."""
        return f"synthetic entry {name!r}"

    def read(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """Each weight in its shape, float32 on the CPU."""
        return ((name, synthetic_tensor(name, shape)) for name, shape in shapes.items())
