"""Where the model runs: the device by its name, and why a GPU that is there may not be seen."""

import logging
import warnings
from pathlib import Path

import torch

from engine.device_faults import DeviceUnavailable
from engine.model.config import ModelConfig
from engine.model.weights import weight_bytes

logger = logging.getLogger(__name__)

DEVICE_FILES = Path("/dev")
MOST_BYTES_ON_CPU = 16 * 2**30
"""Weights that are loaded on a CPU without being asked for; a call of a larger model takes minutes there."""


def choose_device(name: str) -> torch.device:
    """A device by its name (auto, cpu, cuda, cuda:N); with an index where it is a CUDA device, as torch wants it.

    Raises DeviceUnavailable where there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and (hidden := unseen_gpu()) is not None:
            logger.warning("running on the CPU: %s", hidden)
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if (device.index or 0) >= torch.cuda.device_count():
        hidden = unseen_gpu()
        raise DeviceUnavailable(
            f"device {name!r} asked for, but torch sees {torch.cuda.device_count()} CUDA devices"
            + (f": {hidden}" if hidden is not None else "")
        )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def unseen_gpu() -> str | None:
    """Where there is an NVIDIA GPU and torch sees none: a line that says why; else None."""
    files = sorted(str(path) for path in DEVICE_FILES.glob("nvidia[0-9]*"))
    if not files or torch.cuda.is_available():
        return None
    built_for = f"torch {torch.__version__} is built " + (
        f"for CUDA {v}" if (v := torch.version.cuda) else "without CUDA"
    )
    reason = ""
    if v:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.cuda.init()
        except Exception as error:
            reason = f" ({str(error).splitlines()[0]})"
    there = f"{', '.join(files)} is there, but torch sees no GPU{reason}"
    return f"{there}; {built_for}, and CUDA 13 takes driver 580 or later"


def require_small_for_cpu(config: ModelConfig, dtype: torch.dtype) -> None:
    """Raises DeviceUnavailable where a model is too large for a CPU that nobody asked for."""
    size = sum(vars(weight_bytes(config, dtype)).values())
    if size > MOST_BYTES_ON_CPU:
        raise DeviceUnavailable(
            f"no GPU was found, and {size / 2**30:.1f} GiB of weights are too many for a CPU, where a call takes "
            f"minutes; --device cpu asks for it all the same" + (f". {hidden}" if (hidden := unseen_gpu()) else "")
        )
