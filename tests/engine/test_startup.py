"""Each setting of a rollout, from its flag to what it does to the calls of the real tiny policy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.model.weights import Model
from engine.policy import Policy
from engine.session import Session
from engine.startup import load_policy
from kv_cache.cache import SessionKV
from policy_server.settings import parse_settings
from protocol.robot import Observation
from tests.checkpoints import observation


def load(*flags: str, steps: int = 2) -> Policy:
    torch.set_num_threads(1)
    settings = parse_settings(["--device", "cpu", "--steps", str(steps), *flags], {})
    return load_policy(settings.engine, lambda _: None)


def actions(policy: Policy, session_id: str = "a", seen: Observation | None = None) -> np.ndarray:
    return policy.infer(session_id, seen or observation()).actions


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    """The first actions with two steps and nothing else asked for."""
    return actions(load())


def counted(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the DiT has run with an action register, both branches counted."""
    runs = 0
    model: Model = policy._rollout._model
    embed = model.dit.embed_tokens

    def count(*arguments: Any) -> Any:
        nonlocal runs
        runs += len(arguments) == 3
        return embed(*arguments)

    monkeypatch.setattr(model.dit, "embed_tokens", count)
    return lambda: runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "steps", "runs"),
    [
        ((), 3, 3),
        ((), 16, 8),
        (("--preset", "quality"), 16, 16),
        (("--preset", "fast"), 16, 5),
        (("--preset", "fast"), 3, 3),
        (("--preset", "fast", "--step-cache", "none"), 16, 16),
        (("--step-cache", "mask-5"), 16, 5),
        (("--step-cache", "mask-8"), 16, 8),
        (("--step-cache", "velocity", "--velocity-thresholds", "-0.99", "--velocity-countdowns", "3"), 16, 5),
        (("--step-cache", "velocity", "--velocity-thresholds", "0.999999", "--velocity-countdowns", "3"), 16, 16),
    ],
)
def test_steps_and_step_cache(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], steps: int, runs: int) -> None:
    """Where every pair of velocities is above the threshold, two steps run, three are skipped, one runs, and so on."""
    policy = load(*flags, steps=steps)
    count = counted(policy, monkeypatch)
    actions(policy)
    assert count() == runs


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--guidance-scale", "2"), ("--sigma-shift", "3"), ("--seed", "1")])
def test_numbers_change_the_actions(plain: np.ndarray, flags: tuple[str, ...]) -> None:
    changed = actions(load(*flags))
    assert np.isfinite(changed).all()
    assert np.abs(changed - plain).max() > 1e-4


def test_a_policy_says_what_its_preset_stands_for(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the environment gives a setting singly."""
    environment = {"DREAMZERO_PRESET": "fast", "DREAMZERO_STEP_CACHE": "velocity"}
    settings = parse_settings(["--device", "cpu", "--warm-up", "off"], environment).engine
    with caplog.at_level("INFO"):
        policy = load_policy(settings, lambda _: None)
    assert policy.info()["preset"] == {
        "name": "fast", "steps": 16, "step_cache": "velocity", "fp8": False, "given": ["step_cache"]
    }  # fmt: skip
    assert "preset fast: --steps 16 --step-cache velocity --no-fp8 (step-cache given)" in caplog.messages


def test_the_defaults_are_the_release_s(plain: np.ndarray) -> None:
    same = load(
        "--guidance-scale", "5", "--sigma-shift", "5", "--seed", "1140", "--seed-per", "call", "--dtype", "auto"
    )
    np.testing.assert_array_equal(actions(same), plain)


def noise_of(policy: Policy, session_id: str, calls: int) -> torch.Tensor:
    """The video noise of the call that follows so many others."""
    return policy._rollout.noise(Session(SessionKV(session_id, 2), calls=calls)).video


def test_a_seed_per_call_is_the_same_for_every_session_and_call(plain: np.ndarray) -> None:
    policy = load()
    np.testing.assert_array_equal(actions(policy, "b"), plain)
    assert torch.equal(noise_of(policy, "a", 0), noise_of(policy, "b", 7))


@pytest.mark.slow
def test_a_seed_per_session_differs_between_sessions_and_calls_and_repeats_on_rerun() -> None:
    policy = load("--seed-per", "session")
    a, b = actions(policy, "a"), actions(policy, "b")
    assert np.abs(a - b).max() > 1e-3
    policy.end_session("a")
    np.testing.assert_array_equal(actions(policy, "a"), a)
    again = load("--seed-per", "session")
    np.testing.assert_array_equal(actions(again, "b"), b)
    noises = [noise_of(policy, session_id, calls) for session_id in "ab" for calls in (0, 1)]
    noises.append(noise_of(load("--seed-per", "session", "--seed", "1"), "a", 0))
    for index, noise in enumerate(noises):
        assert abs(noise.std() - 1) < 0.1
        assert all(not torch.equal(noise, other) for other in noises[:index])
    assert torch.equal(noise_of(again, "a", 1), noises[1])


def test_a_call_that_fails_does_not_use_up_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load("--seed-per", "session")
    expected = actions(policy, "a")
    policy.end_session("a")
    monkeypatch.setattr(policy._rollout, "_denoise", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        actions(policy, "a")
    monkeypatch.undo()
    np.testing.assert_array_equal(actions(policy, "a"), expected)


def test_dtype(plain: np.ndarray) -> None:
    half = load("--dtype", "bfloat16", "--warm-up", "off")  # slow on a CPU
    assert half.info()["dtype"] == "bfloat16"
    difference = np.abs(actions(half) - plain).max()
    assert 1e-5 < difference < 0.2
    assert load("--dtype", "float32").info()["dtype"] == "float32"
