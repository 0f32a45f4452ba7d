"""Warm-up at start-up: the whole window is walked, nothing is left behind, and what fails is said."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from engine.policy import Chunk, Policy
from engine.settings import EngineSettings
from engine.startup import PolicyLoadError, load_policy
from engine.warmup import warm_up
from tests.checkpoints import observation

QUICK = EngineSettings(device="cpu", steps=2)
FILLS = 4


def silent(status: str) -> None:
    """A progress that nobody looks at."""


@pytest.fixture(scope="module")
def cold() -> Policy:
    return load_policy(replace(QUICK, warm_up="off"), silent)


def trace(policy: Policy) -> tuple[object, ...]:
    """All that a policy says of itself and its pool, and the blocks that its next sessions would get."""
    session = policy._cache.session("probe")
    with policy._cache.call(session), policy._cache.lease(session, 2, commit=True) as plan:
        blocks = plan.stored.tolist()
    policy._cache.forget("probe")
    return policy.stats(), policy.kv_report(), policy.info(), blocks


def test_warm_up_walks_the_window_and_leaves_no_trace(cold: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(replace(QUICK, warm_up="off"), silent)
    trace(policy), policy.reset_counters()
    before = trace(policy)
    policy.reset_counters()
    said: list[str] = []
    restarted: list[bool] = []
    infer = Policy.infer

    def watched(*args: object) -> Chunk:
        chunk = infer(*args)
        restarted.append(chunk.begins_window)
        return chunk

    monkeypatch.setattr(Policy, "infer", watched)
    warm_up(policy, said.append, decode=False)
    monkeypatch.undo()
    assert restarted == [True, *[False] * (FILLS - 1), True]
    assert said == [f"warming up: call {n} of 5" for n in range(1, 6)]
    assert trace(policy) == before
    np.testing.assert_array_equal(
        policy.infer("robot", observation()).actions, cold.infer("robot", observation()).actions
    )
    cold.end_session("robot")


def test_a_failure_leaves_no_trace(cold: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    trace(cold), cold.reset_counters()
    before = trace(cold)
    cold.reset_counters()
    infer, calls = Policy.infer, 0

    def fails(*args: object) -> Chunk:
        nonlocal calls
        calls += 1
        chunk = infer(*args)  # so that there is a trace to be left
        if calls == 2:
            raise RuntimeError("no kernel for this card")
        return chunk

    monkeypatch.setattr(Policy, "infer", fails)
    with pytest.raises(RuntimeError, match="no kernel for this card"):
        warm_up(cold, silent, decode=False)
    assert trace(cold) == before


def test_what_decodes_video_is_warmed_up_where_episodes_are_recorded(cold: Policy) -> None:
    said: list[str] = []
    decoded: list[torch.Tensor] = []
    decode = cold._rollout.decode

    def watched(latents: torch.Tensor):
        decoded.append(latents)
        return decode(latents)

    cold._rollout.decode = watched  # type: ignore[method-assign]
    warm_up(cold, said.append, decode=True)
    del cold._rollout.decode
    assert said[-1] == "warming up: decoding video"
    assert [latents.shape[1] for latents in decoded] == [3]
    assert cold.stats().sessions == 0


def fail(*_: object) -> Chunk:
    raise RuntimeError("no kernel for this card\nand a long story")


def test_a_warm_up_that_fails_ends_the_start_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "infer", fail)
    with pytest.raises(PolicyLoadError, match=r"the warm-up failed \(RuntimeError: no kernel for this card\)") as said:
        load_policy(QUICK, silent)
    assert "--execution eager" in str(said.value)
    assert "\n" not in str(said.value)


def test_a_warm_up_that_may_fail_is_logged_and_the_server_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Policy, "infer", fail)
    policy = load_policy(replace(QUICK, warm_up="optional"), silent)
    assert "the warm-up failed (RuntimeError: no kernel for this card)" in caplog.text
    monkeypatch.undo()
    assert policy.infer("robot", observation()).actions.shape == (24, 8)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_after_start_up_nothing_compiles() -> None:
    torch.compiler.reset()
    counters.clear()
    policy = load_policy(replace(QUICK, execution="compile"), silent)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled == 3, "prefill of one frame and of two, and denoising; for all blocks and fills"
    for _ in range(FILLS + 1):
        policy.infer("robot", observation())
    assert counters["stats"]["unique_graphs"] == compiled


def test_graphs_without_a_cuda_device_are_refused_in_a_line() -> None:
    with pytest.raises(PolicyLoadError, match=r"^execution graph needs a CUDA device, not cpu; try compile$"):
        load_policy(replace(QUICK, execution="graph"), silent)
