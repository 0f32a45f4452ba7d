"""The noise schedule and the UniPC solver (model.md section 4.10)."""

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor


def flow_sigmas(steps: int, shift: float, final_noise: float = 0.0) -> np.ndarray:
    """Noise levels (steps + 1,) float64, falling from nearly 1 to `final_noise`, bent towards noise by `shift`."""
    s = np.linspace(0.999, 0, steps + 1)[:-1]
    sigmas = np.append(shift * s / (1 + (shift - 1) * s), 0.0)
    return sigmas * (sigmas[0] - final_noise) / sigmas[0] + final_noise


def flow_timesteps(sigmas: np.ndarray) -> Tensor:
    """Timesteps (steps,) int64 that the model is told for these noise levels."""
    return torch.from_numpy((1000 * sigmas[:-1]).astype(np.int64))


def unipc(sigmas: np.ndarray) -> UniPCMultistepScheduler:
    """The library's solver over these noise levels, for one tensor's denoising."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000
    )
    scheduler.set_timesteps(len(sigmas) - 1)
    scheduler.sigmas = torch.tensor(sigmas, dtype=torch.float32)
    scheduler.timesteps = flow_timesteps(sigmas)
    scheduler.set_begin_index(0)
    return scheduler


class FlowSolver:
    """UniPC over these noise levels, on `device`; one serves every call.

    Every step of UniPC is a sum of the noise and of the velocities so far, with weights that follow from the noise
    levels alone. They are found once, so a step is one product: no small solves, and nothing read back from the device.
    """

    def __init__(self, sigmas: np.ndarray, device: torch.device) -> None:
        self._weights = _step_weights(sigmas).float().to(device)

    def start(self, noise: Tensor) -> "FlowPath":
        """The way of one tensor from `noise` on."""
        return FlowPath(self._weights, noise)


class FlowPath:
    """One call's denoising of one tensor."""

    def __init__(self, weights: Tensor, noise: Tensor) -> None:
        self._weights = weights
        self._terms = noise.new_empty(len(weights) + 1, noise.numel())  # the noise, then the velocity of each step
        self._terms[0] = noise.flatten()
        self._step = 0

    def step(self, velocity: Tensor) -> Tensor:
        """The sample one noise level further down, in the noise's shape and dtype."""
        known = self._step + 2
        self._terms[known - 1] = velocity.flatten()
        weights = self._weights[self._step, :known]
        self._step += 1
        return (weights @ self._terms[:known]).view_as(velocity)


def _step_weights(sigmas: np.ndarray) -> Tensor:
    """Weights (steps, 1 + steps) float64 of the noise and of each velocity in the sample after each step.

    The library's solver runs once over unit vectors: what it makes of them are the weights.
    """
    steps, scheduler = len(sigmas) - 1, unipc(sigmas)
    noise, *velocities = torch.eye(1 + steps, dtype=torch.float64).split(1)  # the library wants a batch dimension
    weights, sample = [], noise
    for timestep, velocity in zip(scheduler.timesteps, velocities, strict=True):
        sample = scheduler.step(velocity, timestep, sample, return_dict=False)[0]
        weights.append(sample)
    return torch.cat(weights)
