"""How much the K/V may take, and what fits into it."""

import os
from dataclasses import dataclass

import torch

from kv_cache.paged_kv import KVGeometry
from kv_cache.window import WindowPolicy

CPU_DEFAULT_BYTES = 512 * 2**20
"""Without a setting, K/V on a CPU take this much: its free memory belongs to others too."""


class NotEnoughMemory(RuntimeError):
    """The K/V of a single session do not fit; the message has the numbers."""


@dataclass(frozen=True)
class KVBudget:
    """What the K/V memory is divided into.

    blocks: size of the pool. cross_bytes: for cross-attention K/V, the permanent ones included, and for what else
    windows are started with. sessions: how many hold their full window at once, each with a prompt of its own.
    """

    blocks: int
    cross_bytes: int
    sessions: int


def kv_bytes_available(device: torch.device, fraction: float, absolute: int | None, reserved: int = 0) -> int:
    """Bytes the K/V may take on `device`.

    absolute: taken as it is where given. Else `fraction` of what is free on a CUDA device after `reserved` bytes for
    activations, or CPU_DEFAULT_BYTES elsewhere. Raises NotEnoughMemory where `absolute` is more than there is at all.
    """
    if absolute is not None:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if device.type == "cuda":
            there = torch.cuda.mem_get_info(device)[1]
        if absolute > there:
            raise NotEnoughMemory(f"K/V memory of {_mib(absolute)} asked for, and {device} has {_mib(there)} in all")
        return absolute
    if device.type != "cuda":
        return CPU_DEFAULT_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(fraction * max(0, free - reserved))


def plan_budget(geometry: KVGeometry, policy: WindowPolicy, available: int) -> KVBudget:
    """Divide `available` bytes: one permanent (negative) prompt, whole sessions, and blocks for all that is left.

    Raises NotEnoughMemory where not even one session fits.
    """
    session = geometry.session_bytes(policy)
    sessions, left = divmod(available - geometry.text_bytes, session)
    if sessions < 1:
        raise NotEnoughMemory(
            f"K/V memory of {_mib(available)} is too little: one session needs {_mib(geometry.text_bytes + session)}, "
            f"of it {geometry.session_blocks(policy)} blocks of {_mib(geometry.block_bytes)}"
        )
    return KVBudget(
        blocks=sessions * geometry.session_blocks(policy) + left // geometry.block_bytes,
        cross_bytes=geometry.text_bytes + sessions * (geometry.text_bytes + geometry.start_bytes),
        sessions=sessions,
    )


def one_session_bytes(geometry: KVGeometry, policy: WindowPolicy) -> int:
    """The least that `plan_budget` can do with."""
    return geometry.text_bytes + geometry.session_bytes(policy)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
