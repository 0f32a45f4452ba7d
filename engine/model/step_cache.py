"""Which denoising steps run the DiT; at the others the solver goes on with the last velocity (spec section 4)."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor
from torch.nn.functional import cosine_similarity

RELEASE_MASKS = {
    8: "1110001000100111",
    7: "1110001000100011",
    6: "1100010000100011",
    5: "1110000100001000",
}
"""The release's fixed masks over 16 steps, by the number of steps that run."""


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


def parse_step_cache(
    name: str, steps: int, velocity_thresholds: str = "0.95,0.93", velocity_countdowns: str = "4,2"
) -> StepCacheSettings:
    """Settings by their name on the command line: "none", "mask-5" to "mask-8", "velocity".

    velocity_thresholds, velocity_countdowns: for "velocity", numbers with commas between; the release's by default.
    Raises ValueError naming the choices, or where a mask does not fit the number of steps or the numbers each other.
    """
    if name == "none":
        return StepCacheSettings()
    if name == "velocity":
        return _velocity(velocity_thresholds, velocity_countdowns)
    masks = {f"mask-{count}": mask for count, mask in RELEASE_MASKS.items()}
    if name not in masks:
        raise ValueError(f"step cache must be one of none, velocity, {', '.join(sorted(masks))}; found {name!r}")
    mask = tuple(digit == "1" for digit in masks[name])
    if steps != len(mask):
        raise ValueError(f"step cache {name} is made for {len(mask)} steps, not for {steps}")
    return StepCacheSettings(mask=mask)


def _velocity(thresholds_text: str, countdowns_text: str) -> StepCacheSettings:
    try:
        thresholds = tuple(float(text) for text in thresholds_text.split(","))
    except ValueError:
        thresholds = ()
    falling = all(high > low for high, low in pairwise((*thresholds, -1.0)))
    if not thresholds or not falling or thresholds[0] >= 1:
        raise ValueError(
            f"velocity thresholds must be falling numbers between 1 and -1 such as 0.95,0.93; found {thresholds_text!r}"
        )
    countdowns = tuple(int(text) if text.strip().isdecimal() else 0 for text in countdowns_text.split(","))
    if len(countdowns) != len(thresholds) or min(countdowns) < 1:
        raise ValueError(
            f"velocity countdowns must be {len(thresholds)} whole numbers of at least 1, one for each threshold; "
            f"found {countdowns_text!r}"
        )
    return StepCacheSettings(thresholds=thresholds, countdowns=countdowns)


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
