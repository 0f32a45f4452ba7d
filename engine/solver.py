"""The noise schedule and the UniPC solver (spec section 4, "Solver")."""

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor


def flow_sigmas(steps: int, shift: float, final_noise: float = 0.0) -> np.ndarray:
    """Noise levels (steps + 1,) float64, falling from nearly 1 to `final_noise`, bent towards noise by `shift`."""
    s = np.linspace(0.999, 0, steps + 1)[:-1]
    sigmas = np.append(shift * s / (1 + (shift - 1) * s), 0.0)
    return sigmas * (sigmas[0] - final_noise) / sigmas[0] + final_noise


class FlowSolver:
    """UniPC over one call's denoising of one tensor; a new one is made for every call."""

    def __init__(self, sigmas: np.ndarray) -> None:
        self._scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000
        )
        self._scheduler.set_timesteps(len(sigmas) - 1)
        self._scheduler.sigmas = torch.tensor(sigmas, dtype=torch.float32)
        self._scheduler.timesteps = flow_timesteps(sigmas)
        self._scheduler.set_begin_index(0)
        self._step = 0

    def step(self, velocity: Tensor, sample: Tensor) -> Tensor:
        """The sample one noise level further down, in its own shape and dtype."""
        timestep = self._scheduler.timesteps[self._step]
        self._step += 1
        return self._scheduler.step(velocity, timestep, sample, return_dict=False)[0]


def flow_timesteps(sigmas: np.ndarray) -> Tensor:
    """Timesteps (steps,) int64 that the model is told for these noise levels."""
    return torch.from_numpy((1000 * sigmas[:-1]).astype(np.int64))
