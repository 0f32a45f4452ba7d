"""Camera views, prompt template, state and action scaling of one kind of robot (spec sections 5 and 6)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

EMBODIMENT = "oxe_droid"
"""The embodiment of DROID arms and RoboArena, as checkpoints name it."""

_TEMPLATE = (
    "A multi-view video shows that a robot {p} The video is split into three views: The top view shows the camera view "
    "from the robot's wrist, the bottom-left view shows the camera view from the left exterior camera, and the "
    "bottom-right view shows the camera view from the right exterior camera. During training, one of the two bottom "
    "exterior views may be a black screen (dropped view). The robot {p}"
)
_STATE_PARTS = ("joint_position", "gripper_position")


class StatisticsError(ValueError):
    """Normalisation statistics that are missing or of the wrong form; the message says which."""


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


@dataclass(frozen=True)
class Range:
    """The 1st and 99th percentile of a quantity, (8,) float32 each: seven joints and the gripper."""

    q01: Tensor
    q99: Tensor


class Embodiment:
    """One kind of robot, with a checkpoint's statistics. view_height and view_width: pixels of a view for the model."""

    def __init__(self, view_height: int, view_width: int, state: Range, action: Range) -> None:
        self._view = (view_height, view_width)
        self._state = state
        self._action = action

    def prompt_text(self, prompt: str) -> str:
        """The robot's prompt in the embodiment's template."""
        task = prompt.strip() or "Perform the default behavior."
        return _TEMPLATE.format(p=task.lower())

    def stitch(self, views: Mapping[str, np.ndarray]) -> Tensor:
        """One picture (T, 2 h, 2 w, 3) uint8 of the three views: wrist on top, exteriors below, a missing one black."""
        wrist = self._resize(views["wrist"])
        black = torch.zeros_like(wrist)
        below = [self._resize(views[name]) if name in views else black for name in ("exterior_left", "exterior_right")]
        return torch.cat([wrist.repeat_interleave(2, dim=2), torch.cat(below, dim=2)], dim=1)

    def normalize_state(self, joint_position: np.ndarray, gripper_position: np.ndarray, width: int) -> Tensor:
        """Joints (7,) and gripper (1,) scaled to [-1, 1] by the statistics, zero-padded to (width,) float32."""
        x = torch.from_numpy(np.concatenate([joint_position, gripper_position]).astype(np.float32))
        low, high = self._state.q01, self._state.q99
        scaled = torch.where(low == high, x, 2 * (x - low) / torch.where(low == high, 1.0, high - low) - 1)
        return torch.nn.functional.pad(scaled.clamp(-1, 1), (0, width - x.numel()))

    def actions(self, latents: Tensor, joint_position: np.ndarray) -> np.ndarray:
        """Action latents (24, 32) to absolute joint positions and gripper, (24, 8) float32.

        The model's joint actions are relative to the joint position (7,) that was observed.
        """
        low, high = self._action.q01, self._action.q99
        actions = (latents[:, : low.numel()].float().cpu() + 1) / 2 * (high - low) + low
        actions[:, :7] += torch.from_numpy(joint_position.astype(np.float32))
        return actions.numpy()

    def _resize(self, frames: np.ndarray) -> Tensor:
        """Frames (T, H, W, 3) uint8, cropped to their middle 95 %, at the size of a view: (T, h, w, 3) uint8."""
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255
        height, width = pixels.shape[2:]
        crop_height, crop_width = int(0.95 * height), int(0.95 * width)
        top, left = round((height - crop_height) / 2), round((width - crop_width) / 2)
        middle = pixels[:, :, top : top + crop_height, left : left + crop_width]
        view = interpolate(middle, self._view, mode="bilinear", align_corners=False, antialias=True)
        return (view * 255).to(torch.uint8).permute(0, 2, 3, 1)


def read_range(metadata: Mapping[str, Any], kind: str) -> Range:
    """The statistics of `kind` ("state" or "action") from a checkpoint's `experiment_cfg/metadata.json`, parsed.

    Raises StatisticsError naming the entry that is missing or has the wrong length.
    """
    if EMBODIMENT not in metadata:
        raise StatisticsError(f"metadata.json has no embodiment {EMBODIMENT!r}; it has {sorted(metadata)}")
    values = []
    for quantile in ("q01", "q99"):
        row: list[float] = []
        for part, length in zip(_STATE_PARTS, (7, 1), strict=True):
            path = (EMBODIMENT, "statistics", kind, part, quantile)
            numbers: Any = metadata
            for key in path:
                numbers = numbers.get(key) if isinstance(numbers, Mapping) else None
            if not isinstance(numbers, list) or len(numbers) != length:
                raise StatisticsError(f"metadata.json needs a list of {length} numbers at {'.'.join(path)}")
            row += numbers
        values.append(torch.tensor(row, dtype=torch.float32))
    return Range(*values)
