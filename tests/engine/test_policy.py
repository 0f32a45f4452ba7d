"""The policy as the server uses it: sessions by id, failures kept to themselves, reports."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ftfy
import numpy as np
import pytest
import torch

from benchmarks.golden import FILES, Golden, build_engine
from engine.checkpoint.synthetic import BUILTIN_CONFIGS
from engine.model.config import parse_config
from engine.model.text import LONGEST_PROMPT
from engine.model.weights import build_model, weight_bytes
from engine.policy import Policy
from engine.rollout import NotFinite, Rollout
from engine.session import Window
from engine.settings import EngineSettings
from engine.startup import build_cache, load_policy, require_memory
from engine.warmup import profile_calls
from kv_cache.sizing import NotEnoughMemory
from protocol.robot import Observation
from tests.checkpoints import observation


@pytest.fixture(scope="module")
def shared_policy() -> Policy:
    said: list[str] = []
    policy = load_policy(EngineSettings(device="cpu", steps=2), said.append)
    assert said[:3] == ["reading the checkpoint", "loading weights", "sizing the KV cache"]
    return policy


@pytest.fixture
def policy(shared_policy: Policy) -> Iterator[Policy]:
    yield shared_policy
    for name in ("a", "b"):
        shared_policy.end_session(name)


def four_frames() -> Observation:
    one = observation()
    return replace(one, views={name: np.repeat(frames, 4, axis=0) for name, frames in one.views.items()})


def test_a_chunk_is_24_actions_of_8_and_the_same_for_the_same_episode(policy: Policy) -> None:
    chunks = [policy.infer(name, view()) for view in (observation, four_frames) for name in ("a", "b")]
    assert all((c.actions.shape, c.actions.dtype) == ((24, 8), np.float32) for c in chunks)
    assert all(np.isfinite(c.actions).all() for c in chunks)
    np.testing.assert_array_equal(chunks[0].actions, chunks[1].actions)
    np.testing.assert_array_equal(chunks[2].actions, chunks[3].actions)
    assert set(chunks[0].seconds) == {"encode", "prefill", "denoise"}


def test_ending_a_session_gives_everything_back_and_starts_a_new_episode(policy: Policy) -> None:
    first = policy.infer("a", observation()).actions
    policy.infer("a", four_frames())
    assert policy.stats().sessions == 1
    assert policy.stats().blocks_used == 2 * 3
    policy.end_session("a")
    policy.end_session("never seen")
    stats = policy.stats()
    assert (stats.sessions, stats.blocks_used, stats.blocks_free) == (0, 0, stats.blocks_total)
    np.testing.assert_array_equal(policy.infer("a", observation()).actions, first)


def test_a_changed_prompt_restarts_the_window(policy: Policy) -> None:
    policy.infer("a", observation())
    policy.infer("a", four_frames())
    policy.infer("a", replace(four_frames(), prompt="open the drawer"))
    assert policy.kv_report().blocks_by_session["a"] == 2 * 1


def test_running_out_of_memory_can_be_helped_by_idle_sessions(policy: Policy) -> None:
    policy.infer("a", observation())
    policy.free_caches()
    assert policy.stats().blocks_used == 0
    assert policy.stats().evictions == 1
    assert policy.infer("a", four_frames()).actions.shape == (24, 8)


def test_a_chunk_says_why_its_window_began(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(observation: Observation) -> tuple[str, int]:
        chunk = policy.infer("a", observation)
        return str(chunk.window), chunk.call

    other_task = replace(four_frames(), prompt="open the drawer")
    assert [told(each) for each in (observation(), four_frames())] == [("new", 1), ("continued", 2)]
    assert [told(other_task) for _ in range(5)] == [
        ("prompt", 3), ("continued", 4), ("continued", 5), ("continued", 6), ("boundary", 7),
    ]  # fmt: skip
    policy.free_caches()
    assert told(other_task) == ("evicted", 8)
    with monkeypatch.context() as patch:
        patch.setattr(Rollout, "_denoise", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            policy.infer("a", other_task)
    assert told(other_task) == ("failed", 9)
    policy.end_session("a")
    assert told(other_task) == ("new", 1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"joint_position": np.array([0.5, -0.7, 0.1, -2.2, 0.0, 1.6, 0.4])}, None),
        ({"joint_position": np.degrees([0.5, -0.7, 0.1, -2.2, 0.0, 1.6, 0.4])}, "joint_position[0] is 28.65"),
        ({"joint_position": np.array([0.0, 0.0, 0.0, -1.0, 0.0, 1.0, 6.4])}, "joint_position[6] is 6.4"),
        ({"gripper_position": np.array([85.0])}, "gripper_position[0] is 85"),
    ],
)
def test_a_state_far_from_the_statistics_is_used_and_warned_of(
    policy: Policy, changes: dict[str, np.ndarray], named: str | None
) -> None:
    seen = observation()
    warnings = policy.infer("a", replace(seen, state=seen.state | changes)).warnings
    assert len(warnings) == (named is not None)
    assert named is None or named in warnings[0]


@pytest.mark.parametrize(
    "prompt", ["\u0316\u0301" * 16_000, "a" + "\u0301" * 32_000, "&#" + "9" * 60_000, " " * 60_000 + "x"]
)
def test_a_prompt_made_to_take_long_is_cut_before_it_is_cleaned(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    cleaned: list[int] = []
    fix_text = ftfy.fix_text

    def spy(text: str) -> str:
        cleaned.append(len(text))
        return fix_text(text)

    monkeypatch.setattr("engine.model.text.ftfy.fix_text", spy)
    warnings = policy.infer("a", replace(observation(), prompt=prompt)).warnings
    assert [warning.partition(":")[0] for warning in warnings] == ["prompt"] * (prompt[0] != " ")
    assert len(cleaned) == 1
    assert cleaned[0] < 3 * LONGEST_PROMPT, "the template has the prompt twice"


def test_a_prompt_that_the_model_reads_in_part_is_warned_of(policy: Policy) -> None:
    for letters, expected in ((1, False), (400, True)):
        warnings = policy.infer("a", replace(observation(), prompt="a" * letters)).warnings
        assert any("prompt" in warning for warning in warnings) == expected


def test_what_is_served_is_said_in_json(policy: Policy) -> None:
    info = json.loads(json.dumps(policy.info()))
    assert info["checkpoint"] == "tiny"
    assert info["trained"] is False
    assert info["attention_backend"] == "sdpa"
    assert (info["action_horizon"], info["window_frames"]) == (24, 9)
    assert info["sizes"]["dit"]["dim"] == 128


def test_one_log_line_says_what_the_pool_holds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="engine.startup")
    config = parse_config(BUILTIN_CONFIGS["mid"])
    build_cache(config, 2**29, torch.device("cpu"), torch.float32)
    (line,) = caplog.messages
    assert line == (
        "KV cache: 57 blocks of 6.9 MiB, 506.4 MiB with cross-attention, room for 4 sessions, attention by sdpa"
    )


def test_too_little_memory_on_the_device_is_said_with_the_numbers() -> None:
    require_memory(free=70 * 2**30, weights=41 * 2**30, session=18 * 2**30)
    with pytest.raises(NotEnoughMemory, match=r"24.0 GiB free; the weights need 41.0 GiB and .* session 18.0 GiB"):
        require_memory(free=24 * 2**30, weights=41 * 2**30, session=18 * 2**30)
    config = parse_config(BUILTIN_CONFIGS["tiny"])
    assert weight_bytes(config, torch.float32).device == 4 * sum(
        p.numel()
        for module, _ in build_model(config).components()
        for name, p in module.named_parameters()
        if name != "shared.weight"
    )


def test_trial_calls_see_a_restart_and_a_continued_window() -> None:
    engine = build_engine(Golden(FILES[0]))
    kv = engine.cache.session("trial")
    profile_calls(engine.rollout, kv, decode=True)
    assert kv.resident_frames == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_policy_runs_in_bfloat16_on_cuda() -> None:
    policy = load_policy(EngineSettings(device="cuda", steps=2), lambda _: None)
    assert policy.info()["dtype"] == "bfloat16"
    assert policy.stats().sessions == 0, "the trial call has left nothing"
    for view in (observation(), four_frames(), four_frames()):
        assert np.isfinite(policy.infer("a", view).actions).all()


def test_actions_that_are_not_finite_reach_no_robot_and_a_window_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a call is undone as any that fails: its frames are not kept, and it is not counted."""
    policy = load_policy(EngineSettings(device="cpu", steps=1, warm_up="off"), lambda status: None)
    policy.infer("robot", observation())
    denoise = policy._rollout._denoise

    def spoiled(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
        video, action, steps_run = denoise(*arguments)
        return video, torch.full_like(action, torch.nan), steps_run

    monkeypatch.setattr(policy._rollout, "_denoise", spoiled)
    frames = list(policy._sessions["robot"].frames)
    with pytest.raises(NotFinite, match="not finite"):
        policy.infer("robot", observation())
    assert [id(frame) for frame in policy._sessions["robot"].frames] == [id(frame) for frame in frames]
    monkeypatch.undo()
    chunk = policy.infer("robot", observation())
    assert (chunk.window, chunk.call) == (Window.FAILED, 2)
    assert np.isfinite(chunk.actions).all()
