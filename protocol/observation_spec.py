"""What one kind of robot's requests hold: which cameras under which keys, which numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

REQUEST_KEYS = ("endpoint", "prompt", "session_id", "session_ids")
"""What a request may hold whatever the robot."""


@dataclass(frozen=True)
class Camera:
    """A camera by the server's name for it.

    keys: keys of a request that may carry its images. Where cameras have several, a request uses one numbering: the
        i-th key of each.
    required: whether a request without it is refused. one_of: cameras of that name may be missing, but not all of
        them.
    """

    name: str
    keys: tuple[str, ...]
    required: bool = True
    one_of: str | None = None


@dataclass(frozen=True)
class StateVector:
    """`size` numbers under `key`. meaning: what they are, in words ("joint angles")."""

    name: str
    key: str
    size: int
    meaning: str


@dataclass(frozen=True)
class ObservationSpec:
    """All that is looked at in an observation, beside prompt and session id.

    resolution: height and width that images should have; others are resized.
    """

    cameras: tuple[Camera, ...]
    state: tuple[StateVector, ...]
    resolution: tuple[int, int]

    @cached_property
    def wanted(self) -> dict[bytes, str]:
        """All keys of a request that are looked at, by their bytes."""
        keys = [*REQUEST_KEYS, *(key for camera in self.cameras for key in camera.keys)]
        keys += [vector.key for vector in self.state]
        return {key.encode(): key for key in keys}

    @cached_property
    def groups(self) -> dict[str, dict[str, Camera]]:
        """By `one_of`: the cameras of that name, by theirs."""
        groups: dict[str, dict[str, Camera]] = {}
        for camera in self.cameras:
            if camera.one_of is not None:
                groups.setdefault(camera.one_of, {})[camera.name] = camera
        return groups
