"""What a measurement ran on, for the line above its table."""

import platform
from pathlib import Path

import torch


def machine() -> str:
    """The processor's name and what torch uses of it."""
    info = Path("/proc/cpuinfo").read_text()
    name = info.split("model name")[1].split(":")[1].splitlines()[0].strip() if "model name" in info else ""
    return f"{name or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def peak_resident_bytes() -> int:
    """The process's high-water mark."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
