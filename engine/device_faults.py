"""What a device that fails raises, and whether it lives on. Needs no torch where none has been imported."""

import sys


class DeviceUnavailable(RuntimeError):
    """The device cannot serve as things are; it may when whoever else uses it has left. One line says why."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory left; it lives."""
    torch = sys.modules.get("torch")  # who never imported torch cannot have raised its error
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def is_lost(error: Exception) -> bool:
    """Whether the thread's CUDA device refuses all further work, as it does for the process's life after a fault.

    torch has an error of its own for it, but Triton, cuBLAS and cuDNN raise theirs, for this and for less: then the
    device is asked.
    """
    torch = sys.modules.get("torch")
    if torch is None or is_out_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False
