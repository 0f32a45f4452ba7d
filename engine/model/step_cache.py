"""Which denoising steps run the DiT; at others the solver goes on with the last velocity (model.md section 4.11)."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn.functional import cosine_similarity

RELEASE_MASKS = {
    "mask-8": "1110001000100111",
    "mask-7": "1110001000100011",
    "mask-6": "1100010000100011",
    "mask-5": "1110000100001000",
}
"""The release's fixed masks over 16 steps; the name says how many run."""


class StepCache(Protocol):
    """The decisions of one call, asked step by step."""

    def runs(self, step: int) -> bool:
        """Whether the DiT runs at this step, asked once for each step in order."""
        ...

    def computed(self, velocity: Tensor) -> None:
        """Told the guided video velocity of a step that ran."""
        ...


@dataclass(frozen=True)
class StepCacheSettings:
    """How steps are skipped: `mask` where given, else by velocity where thresholds are given, else never.

    mask: one entry per step. thresholds: falling cosine similarities. countdowns: steps skipped above each.
    """

    mask: tuple[bool, ...] | None = None
    thresholds: tuple[float, ...] = ()
    countdowns: tuple[int, ...] = ()

    def start(self) -> StepCache:
        """The decisions of a new call."""
        if self.mask is not None:
            return MaskCache(self.mask)
        return VelocityCache(self.thresholds, self.countdowns)


def step_cache_settings(
    name: str, velocity_thresholds: tuple[float, ...] = (0.95, 0.93), velocity_countdowns: tuple[int, ...] = (4, 2)
) -> StepCacheSettings:
    """By the name on the command line: "none", "mask-5" to "mask-8" for 16 steps, "velocity" by these numbers."""
    if name == "velocity":
        return StepCacheSettings(thresholds=velocity_thresholds, countdowns=velocity_countdowns)
    if name == "none":
        return StepCacheSettings()
    return StepCacheSettings(mask=tuple(digit == "1" for digit in RELEASE_MASKS[name]))


class MaskCache:
    """Runs the steps that a fixed mask names."""

    def __init__(self, mask: tuple[bool, ...]) -> None:
        self._mask = mask

    def runs(self, step: int) -> bool:
        """As StepCache."""
        return self._mask[step]

    def computed(self, velocity: Tensor) -> None:
        """As StepCache; a mask does not care."""


class VelocityCache:
    """Skips steps while the last two computed velocities point the same way. Without thresholds it never skips."""

    def __init__(self, thresholds: tuple[float, ...], countdowns: tuple[int, ...]) -> None:
        self._rules = list(zip(thresholds, countdowns, strict=True))
        self._last: list[Tensor] = []
        self._skips_left = 0
        self._must_run = False

    def runs(self, step: int) -> bool:
        """As StepCache. Reads the velocities back from the device where it must decide."""
        if self._skips_left:
            self._skips_left -= 1
            return False
        if self._must_run or len(self._last) < 2 or not self._rules:
            self._must_run = False
            return True
        similarity = float(cosine_similarity(self._last[0].flatten(), self._last[1].flatten(), dim=0))
        for threshold, countdown in self._rules:
            if similarity > threshold:
                self._skips_left = countdown - 1
                self._must_run = True
                return False
        return True

    def computed(self, velocity: Tensor) -> None:
        """As StepCache."""
        self._last = [*self._last[-1:], velocity]
