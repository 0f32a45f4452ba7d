"""What a device that fails raises, and whether it lives on. Needs no torch where none has been imported."""

import logging
import sys
import time
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_CALLS_TO_GIVE_UP = 3
_SECONDS_WITHOUT_MEMORY = 30.0


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


class MemoryRetry:
    """Calls that are tried once more, with emptied caches, where the device has no memory left for them."""

    def __init__(self) -> None:
        self._failed = 0  # calls in a row
        self._lacking_until = 0.0

    @property
    def lacking(self) -> str | None:
        """After three calls in a row without memory: that it is so, until a call succeeds, or for half a minute.

        Where a balancer sends robots to servers that are ready, no call would ever come to show that there is memory
        again.
        """
        if time.monotonic() < self._lacking_until:
            return f"{self._failed} calls in a row ran out of device memory"
        return None

    def call(self, work: Callable[[], Result], free_caches: Callable[[], None]) -> Result:
        """The work's result. Raises what it raises, out of memory only at the second try."""
        try:
            result = work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.warning("out of device memory: freeing caches and trying once more")
        else:
            self._note(failed=0)
            return result
        # Outside the handler, where the error's traceback no longer holds the failed call's tensors.
        free_caches()
        try:
            result = work()
        except Exception as error:
            if is_out_of_memory(error):
                self._note(failed=self._failed + 1)
            raise
        self._note(failed=0)
        return result

    def _note(self, failed: int) -> None:
        self._failed = failed
        self._lacking_until = time.monotonic() + _SECONDS_WITHOUT_MEMORY if failed >= _CALLS_TO_GIVE_UP else 0.0
