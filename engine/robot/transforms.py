"""Between a robot's numbers and the model's: the stitched picture, state and action scaling (model.md section 6)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from engine.model.config import ModelConfig
from engine.robot.embodiment import Cell, Embodiment, EmbodimentError
from engine.robot.normalization import read_range


class Transforms:
    """One embodiment for one checkpoint.

    statistics: the checkpoint's `experiment_cfg/metadata.json`, parsed.
    Raises StatisticsError for what is missing there, EmbodimentError where the embodiment does not fit the model.
    """

    def __init__(self, embodiment: Embodiment, config: ModelConfig, statistics: Mapping[str, Any]) -> None:
        self.embodiment = embodiment
        self._state = read_range(statistics, embodiment.name, "state", embodiment.state)
        self._action = read_range(statistics, embodiment.name, "action", embodiment.action)
        self._state_width = config.max_state_dim
        for kind, held, most in (
            ("state", self._state, config.max_state_dim),
            ("action", self._action, config.max_action_dim),
        ):
            if held.q01.numel() > most:
                raise EmbodimentError(
                    f"embodiment {embodiment.name} has {held.q01.numel()} numbers of {kind}, the checkpoint room for "
                    f"{most}"
                )
        rows, columns = embodiment.grid
        height, width = 2 * config.view_height, 2 * config.view_width
        if height % rows or width % columns:
            raise EmbodimentError(
                f"embodiment {embodiment.name} lays out {rows} x {columns} views, which do not divide the checkpoint's "
                f"picture of {height} x {width} pixels"
            )
        self._view = (height // rows, width // columns)

    def stitch(self, views: Mapping[str, np.ndarray], enlarge_to: tuple[int, int] | None = None) -> Tensor:
        """One picture (T, h, w, 3) uint8 of frames (T, H, W, 3) uint8 of each view; a missing view is black.

        enlarge_to: height and width that frames of less height are brought to first. The share of a frame that is
        cropped is whole pixels: of 126 rows it is another share than of 180, and what is seen would be shifted.
        """
        frames = len(next(iter(views.values())))
        resized = {name: self._resize(view, enlarge_to) for name, view in views.items()}
        rows = [
            torch.cat([self._place(cell, resized, frames) for cell in row], dim=2) for row in self.embodiment.layout
        ]
        return torch.cat(rows, dim=1)

    def normalize_state(self, state: Mapping[str, np.ndarray]) -> Tensor:
        """The state vectors scaled to [-1, 1] by the statistics, zero-padded to (max_state_dim,) float32."""
        row = np.concatenate([state[vector.name] for vector in self.embodiment.state])
        x = torch.from_numpy(row.astype(np.float32))
        low, high = self._state.q01, self._state.q99
        scaled = torch.where(low == high, x, 2 * (x - low) / torch.where(low == high, 1.0, high - low) - 1)
        return pad(scaled.clamp(-1, 1), (0, self._state_width - x.numel()))

    def state_warnings(self, state: Mapping[str, np.ndarray]) -> list[str]:
        """One sentence for each state vector that lies far from what the statistics know: degrees for radians, say.

        Far is more than half the width of a number's range outside of it. `normalize_state` takes such a number for the
        range's end.
        """
        warnings, start = [], 0
        for vector in self.embodiment.state:
            low, high = (
                bound[start : start + vector.size].double().numpy() for bound in (self._state.q01, self._state.q99)
            )
            start += vector.size
            values = state[vector.name]
            slack = (high - low) / 2
            far = np.flatnonzero((slack > 0) & ((values < low - slack) | (values > high + slack)))
            if far.size:
                index = far[0]
                warnings.append(
                    f"{vector.key}[{index}] is {values[index]:.4g}, far outside the {low[index]:.4g} to "
                    f"{high[index]:.4g} of the checkpoint's training: are its units right?"
                )
        return warnings

    def actions(self, latents: Tensor, state: Mapping[str, np.ndarray]) -> np.ndarray:
        """Action latents (horizon, max_action_dim) to the robot's own numbers, (horizon, action_size) float32.

        Relative actions are added to the state that was observed.
        """
        low, high = self._action.q01, self._action.q99
        actions = (latents[:, : low.numel()].float().cpu() + 1) / 2 * (high - low) + low
        start = 0
        for vector in self.embodiment.action:
            if vector.relative_to is not None:
                observed = torch.from_numpy(state[vector.relative_to].astype(np.float32))
                actions[:, start : start + vector.size] += observed
            start += vector.size
        return actions.numpy()

    def _place(self, cell: Cell, views: Mapping[str, Tensor], frames: int) -> Tensor:
        """A view of single size, each pixel repeated as its cell says."""
        if cell.view not in views:
            return torch.zeros((frames, self._view[0] * cell.height, self._view[1] * cell.width, 3), dtype=torch.uint8)
        return views[cell.view].repeat_interleave(cell.width, dim=2).repeat_interleave(cell.height, dim=1)

    def _resize(self, frames: np.ndarray, enlarge_to: tuple[int, int] | None) -> Tensor:
        """Frames (T, H, W, 3) uint8, cropped to their middle, at the size of a view: (T, h, w, 3) uint8."""
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255
        if enlarge_to is not None and pixels.shape[2] < enlarge_to[0]:
            pixels = interpolate(pixels, enlarge_to, mode="bilinear", align_corners=False)
        height, width = pixels.shape[2:]
        crop_height, crop_width = (max(1, int(self.embodiment.crop * side)) for side in (height, width))
        top, left = round((height - crop_height) / 2), round((width - crop_width) / 2)
        middle = pixels[:, :, top : top + crop_height, left : left + crop_width]
        view = interpolate(middle, self._view, mode="bilinear", align_corners=False, antialias=True)
        return (view * 255).to(torch.uint8).permute(0, 2, 3, 1)
