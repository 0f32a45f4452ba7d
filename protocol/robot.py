"""What a server and one kind of robot agree on: the handshake, which cameras and numbers a request holds, and one
observation as both sides of the server know it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

HANDSHAKE: Final[dict[str, object]] = {
    "image_resolution": [180, 320],
    "needs_wrist_camera": True,
    "n_external_cameras": 2,
    "needs_stereo_camera": False,
    "needs_session_id": True,
    "action_space": "joint_position",
}
"""What robots of the RoboArena kind are told first on every connection; `image_resolution` is height and width.

RoboArena clients build a dataclass from it with `Config(**metadata)`: a key more breaks them, a key less as well.
"""

REQUEST_KEYS = ("endpoint", "prompt", "session_id", "session_ids")
"""What a request may hold whatever the robot."""


@dataclass(frozen=True)
class View:
    """A camera view.

    keys: keys of a request that may carry its images. Where views have several, a request uses one numbering: the i-th
        key of each.
    required: whether a request without it is refused. one_of: views of that name may be missing, but not all of them.
    """

    name: str
    keys: tuple[str, ...]
    required: bool = True
    one_of: str | None = None


@dataclass(frozen=True)
class StateVector:
    """`size` numbers that a robot sends under `key`. meaning: what they are, in words ("joint angles")."""

    name: str
    size: int
    key: str
    meaning: str


@dataclass(frozen=True)
class ObservationSpec:
    """All that is looked at in an observation, beside prompt and session id.

    resolution: height and width that images should have; others are resized.
    """

    views: tuple[View, ...]
    state: tuple[StateVector, ...]
    resolution: tuple[int, int]

    @cached_property
    def wanted(self) -> dict[bytes, str]:
        """All keys of a request that are looked at, by their bytes."""
        keys = [*REQUEST_KEYS, *(key for view in self.views for key in view.keys)]
        keys += [vector.key for vector in self.state]
        return {key.encode(): key for key in keys}

    @cached_property
    def groups(self) -> dict[str, dict[str, View]]:
        """By `one_of`: the views of that name, by theirs."""
        groups: dict[str, dict[str, View]] = {}
        for view in self.views:
            if view.one_of is not None:
                groups.setdefault(view.one_of, {})[view.name] = view
        return groups


@dataclass(frozen=True)
class Observation:
    """What a robot saw at one call.

    views: view to frames (T, H, W, 3) uint8 RGB, T the same for all; a view that may be missing and is has no entry,
        and is black for the model.
    state: state vector to (size,) floats, finite.
    prompt: the task, as the robot's user wrote it; may be empty.
    enlarge_to: height and width that smaller frames are brought to first, where they are not the size of a camera's.
    """

    views: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    prompt: str
    enlarge_to: tuple[int, int] | None = None
