"""Which frames of a session are resident, and what leaves when frames come (model.md sections 3.6 and 4.2)."""

from dataclasses import dataclass
from enum import Enum


class Overflow(Enum):
    """What a window does when it is full."""

    RESET = "reset_at_boundary"
    """Start again from nothing once `capacity` frames have passed: DreamZero."""
    SLIDE = "sliding"
    """Drop the oldest frames that are not sinks, for ever."""


@dataclass(frozen=True)
class WindowPolicy:
    """The window of one guidance branch, counted in whole latent frames.

    capacity: resident and current frames that attention sees together (`local_attn_size`).
    overflow: what happens at the end of the window.
    sink_frames: oldest frames that never leave while the window slides.
    Raises ValueError where the sinks leave no room for another frame.
    """

    capacity: int
    overflow: Overflow = Overflow.RESET
    sink_frames: int = 0

    def __post_init__(self) -> None:
        if self.capacity < 1 or not 0 <= self.sink_frames < self.capacity:
            raise ValueError(
                f"a window of {self.capacity} frames cannot keep {self.sink_frames} sink frames and move on"
            )

    def restarts(self, frames_seen: int) -> bool:
        """Whether the next call starts the window again, after `frames_seen` frames have passed through it."""
        return self.overflow is Overflow.RESET and frames_seen >= self.capacity

    def most_held(self, incoming: int) -> int:
        """Most frames that are resident at once, where `incoming` come at a time.

        A window that starts again leaves room in sight for those that come; one that slides still holds the frames
        that leave while their successors come.
        """
        return self.capacity + (incoming if self.overflow is Overflow.SLIDE else -incoming)

    def leaving(self, resident: int, incoming: int) -> range:
        """Indices, oldest first, of the resident frames that `incoming` current frames push out of sight.

        For a forward that commits they leave the cache; for one that does not they are only not attended.
        Raises ValueError where `incoming` alone exceeds what the window holds beside its sinks.
        """
        room = self.capacity - self.sink_frames
        if incoming > room:
            raise ValueError(f"{incoming} frames at once do not fit a window with room for {room}")
        excess = max(0, resident + incoming - self.capacity)
        return range(self.sink_frames, self.sink_frames + excess)
