"""What a rollout remembers of an episode between calls (model.md section 4)."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from kv_cache.cache import SessionKV

BUFFERED_FRAMES = 4


class Window(StrEnum):
    """Whether a call continued its session's window or began one, and why."""

    CONTINUED = "continued"
    NEW = "new"  # the session's first call
    PROMPT = "prompt"  # another task than at the call before
    BOUNDARY = "boundary"  # the window was full
    EVICTED = "evicted"  # its K/V were given to another session
    FAILED = "failed"  # the call before did not come to its end


@dataclass
class Session:
    """One episode.

    frames: the last stitched frames, each (h, w, 3) uint8. prompt: token ids of the last call, as bytes.
    called: whether a call has been made. failed: whether the last one did not come to its end.
    calls: how many have given actions.
    """

    kv: SessionKV
    frames: deque[Tensor] = field(default_factory=lambda: deque(maxlen=BUFFERED_FRAMES))
    prompt: bytes = b""
    called: bool = False
    failed: bool = False
    calls: int = 0

    def push_frames(self, frames: Iterable[Tensor]) -> list[Tensor]:
        """Take the frames sent at a call into the buffer; returns those the model looks at.

        The newest alone at the first call; then always four, the oldest repeated where fewer have come.
        """
        self.frames.extend(frames)
        first, self.called = not self.called, True
        if first:
            return [self.frames[-1]]
        return [self.frames[0]] * (BUFFERED_FRAMES - len(self.frames)) + list(self.frames)
