"""Camera views, prompt template, state and action scaling of one kind of robot (spec sections 5 and 6)."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Observation:
    """What a robot saw at one call.

    views: camera name ("exterior_left", "exterior_right", "wrist") to frames (T, H, W, 3) uint8 RGB, T the same
        for all; a missing exterior camera has no entry and is black for the model.
    joint_position: (7,) radians. gripper_position: (1,).
    prompt: the task, as the robot's user wrote it.
    """

    views: dict[str, np.ndarray]
    joint_position: np.ndarray
    gripper_position: np.ndarray
    prompt: str
