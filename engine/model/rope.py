"""Rotary position embedding: three axes for video tokens, one for the action register (model.md section 3.6)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of every token of a forward, each (L, 1, head_dim / 2) float32."""

    cos: Tensor
    sin: Tensor


def _angles(positions: Tensor, width: int) -> Tensor:
    """Angles (len(positions), width / 2) in float64 of a 1-D embedding of `width`."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return positions.to(torch.float64)[:, None] * frequencies


class Rope:
    """The rotations of one model: latent frames of `rows` x `columns` tokens, heads of `head_dim`.

    block_frames, block_actions, block_states: nf, actions and states of one block of the rollout.
    """

    def __init__(
        self, head_dim: int, rows: int, columns: int, block_frames: int, block_actions: int, block_states: int
    ) -> None:
        self._space_width = 2 * (head_dim // 6)
        self._head_dim = head_dim
        grid = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        self._space = torch.cat([_angles(axis.flatten(), self._space_width) for axis in grid], dim=1)
        self._block = (block_frames, block_actions, block_states)
        self._made: dict[tuple[int, int, bool, torch.device], Rotation] = {}  # as many as a window has fills

    def rotation(self, start_frame: int, frames: int, register: bool, device: torch.device) -> Rotation:
        """The rotation of `frames` latent frames from position `start_frame` on, and of the action register."""
        key = (start_frame, frames, register, device)
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, start_frame: int, frames: int, register: bool, device: torch.device) -> Rotation:
        time = _angles(torch.arange(start_frame, start_frame + frames), self._head_dim - 2 * self._space_width)
        tokens = self._space.shape[0]
        parts = [torch.cat([time.repeat_interleave(tokens, 0), self._space.repeat(frames, 1)], dim=1)]
        if register:
            block_frames, actions, states = self._block
            index = (start_frame - 1) // block_frames
            parts += [
                _angles(torch.arange(index * count, (index + 1) * count), self._head_dim) for count in (actions, states)
            ]
        angles = torch.cat(parts)[:, None]
        return Rotation(angles.cos().float().to(device), angles.sin().float().to(device))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of every head of x (B, L, heads, head_dim), in float32; returns x's dtype."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = (even * rotation.cos - odd * rotation.sin, even * rotation.sin + odd * rotation.cos)
    # Cast before they are joined: where this is compiled, what is joined is written to memory.
    return torch.stack([part.to(x.dtype) for part in turned], dim=-1).flatten(-2)
