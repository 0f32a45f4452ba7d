"""A picture of a replay's actions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from clients.episode import FRAMES_PER_SECOND

NAMES = ("j1", "j2", "j3", "j4", "j5", "j6", "j7", "gripper")
_UNITS = ("rad",) * 7 + ("closed",)
_JOINT_COLOUR, _GRIPPER_COLOUR = "#1f5fa8", "#c05a1c"
_INK, _FAINT = "#30343a", "#d9dde2"


def plot_actions(actions: np.ndarray, title: str, path: Path) -> None:
    """Write a PNG of actions (calls, steps, 8): one panel for each dimension over time, chunk after chunk.

    Every chunk is a line of its own: a step between two of them is a change of the policy's mind and stays visible.
    """
    calls, steps, dimensions = actions.shape
    seconds = np.arange(calls * steps).reshape(calls, steps) / FRAMES_PER_SECOND
    end = calls * steps / FRAMES_PER_SECOND
    figure = Figure(figsize=(12, 8.4), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06))
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, color=_INK, parse_math=False)
    panels = figure.subplots(4, 2, sharex=True)
    for dimension in range(dimensions):
        panel = panels[dimension % 4, dimension // 4]
        colour = _JOINT_COLOUR if dimension < 7 else _GRIPPER_COLOUR
        for start in seconds[:, 0]:
            panel.axvline(start, color=_FAINT, linewidth=0.7, zorder=0)
        for chunk_seconds, chunk in zip(seconds, actions[:, :, dimension]):
            panel.plot(chunk_seconds, chunk, color=colour, linewidth=1.1, solid_capstyle="round")
            panel.plot(chunk_seconds[0], chunk[0], marker="o", markersize=2.4, color=colour)
        panel.set_title(NAMES[dimension], loc="left", fontsize=10, fontweight="bold", color=_INK, pad=3)
        panel.set_ylabel(_UNITS[dimension], fontsize=9, color=_INK)
        panel.set_xlim(0, end)
        panel.margins(y=0.12)
        panel.tick_params(labelsize=8, colors=_INK, length=3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color("#9aa1a9")
    for panel in panels[-1]:
        panel.set_xlabel(f"time (s) at {FRAMES_PER_SECOND} steps a second; grey: a new chunk", fontsize=9, color=_INK)
    figure.savefig(path, dpi=110, facecolor="white")
