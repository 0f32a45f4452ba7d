"""Which steps run: the release's masks, and a worked example of the velocity cache."""

import math

import pytest
import torch

from engine.model.step_cache import StepCacheSettings, VelocityCache, step_cache_settings


def velocity_at(angle: float) -> torch.Tensor:
    return torch.tensor([[math.cos(angle), math.sin(angle)]])


def run(cache: VelocityCache, similarities: list[float], steps: int = 16) -> str:
    """Run a call in which each computed velocity has the next of `similarities` to the one before."""
    angle, pending, ran = 0.0, iter(similarities), ""
    for step in range(steps):
        runs = cache.runs(step)
        ran += str(int(runs))
        if runs:
            cache.computed(velocity_at(angle))
            angle += math.acos(next(pending, 0.0))
    return ran


def test_the_velocity_cache_decides_as_in_the_worked_example() -> None:
    """Similarities of consecutive computed velocities: .884 before step 2, .733 .809 .816 ..., .849 before step 10."""
    cache = VelocityCache((0.86, 0.82), (4, 2))
    assert run(cache, [0.884, 0.733, 0.809, 0.816, 0.849, 0.738, 0.825]) == "1100001111001100"


def test_after_a_skip_one_step_runs_without_a_check() -> None:
    """Velocities that never turn: four steps are skipped, one runs, again and again."""
    assert run(VelocityCache((0.95, 0.93), (4, 2)), [1.0] * 16) == "1100001000010000"


def test_without_thresholds_every_step_runs() -> None:
    assert run(StepCacheSettings().start(), [1.0] * 16) == "1" * 16  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [5, 6, 7, 8])
def test_a_mask_runs_as_many_steps_as_its_name_says(count: int) -> None:
    cache = step_cache_settings(f"mask-{count}").start()
    assert sum(cache.runs(step) for step in range(16)) == count


def test_names_on_the_command_line() -> None:
    assert step_cache_settings("none") == StepCacheSettings()
    assert step_cache_settings("velocity") == StepCacheSettings(thresholds=(0.95, 0.93), countdowns=(4, 2))
