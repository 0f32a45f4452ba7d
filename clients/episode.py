"""What a robot saw during one episode, cut into the calls that DreamZero's own client would have made."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

CAMERAS = ("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left")
"""Camera names in DROID's numbering: left exterior, right exterior, wrist. A recording is NAME.mp4."""

FRAMES_PER_SECOND = 15
STEPS_PER_CALL = 24
_OFFSETS = (0, 7, 15, 23)  # of the frames sent in each run of 24: a-23, a-16, a-8, a


class EpisodeError(ValueError):
    """A recording is missing, broken, or does not fit the others; the message says which and how."""


@dataclass(frozen=True)
class Episode:
    """calls: for each call, camera name (one of CAMERAS) to frames (T,180,320,3) or other size, uint8 RGB."""

    name: str
    calls: list[dict[str, np.ndarray]]


def schedule(length: int) -> list[tuple[int, ...]]:
    """Frame numbers that each call sends: the first alone, then (a-23, a-16, a-8, a) for a = 23, 47, ... < length."""
    runs = range(0, length - STEPS_PER_CALL + 1, STEPS_PER_CALL)
    return [(0,), *(tuple(run + offset for offset in _OFFSETS) for run in runs)]


def is_scheduled(frame: int) -> bool:
    """Whether a long enough episode's schedule has this frame."""
    return frame % STEPS_PER_CALL in _OFFSETS


def cut_into_calls(name: str, length: int, frames: Mapping[str, Mapping[int, np.ndarray]]) -> Episode:
    """An episode of `length` frames; frames: camera to frame number to image (H,W,3), all that the schedule has."""
    calls = [
        {camera: np.stack([images[number] for number in numbers]) for camera, images in frames.items()}
        for numbers in schedule(length)
    ]
    return Episode(name, calls)
