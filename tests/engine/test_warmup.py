"""Warm-up at start-up: the whole window is walked, nothing is left behind, and what fails is said."""

import shutil
import statistics
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from engine.policy import Chunk, Policy
from engine.session import Window
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


@pytest.mark.parametrize("measure", [False, True])
def test_warm_up_walks_the_window_and_leaves_no_trace(
    cold: Policy, monkeypatch: pytest.MonkeyPatch, measure: bool
) -> None:
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
    warm_up(policy, said.append, decode=False, measure_guidance=measure)
    monkeypatch.undo()
    walk = [True, *[False] * (FILLS - 1), True]
    if measure:
        assert restarted[: 4 * len(walk)] == 4 * walk
        policy.set_batched(True)
    else:
        assert restarted == walk
        assert said == [f"warming up: call {n} of 5" for n in range(1, 6)]
    assert trace(policy) == before
    np.testing.assert_array_equal(
        policy.infer("robot", observation()).actions, cold.infer("robot", observation()).actions
    )
    cold.end_session("robot")


def chunk(**seconds: float) -> Chunk:
    """The answer of a call that took so long."""
    return Chunk(np.zeros((24, 8), np.float32), seconds, torch.zeros(0), Window.CONTINUED, 1)


@pytest.fixture
def policy() -> Policy:
    return load_policy(replace(QUICK, steps=1, warm_up="off"), silent)


@pytest.mark.parametrize("faster", ["batched", "separate"])
def test_measuring_keeps_the_faster_guidance_by_what_the_dit_takes(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, faster: str
) -> None:
    """By the second walk alone: the first one compiles. The encoders are not asked, they are the same either way."""
    modes: list[object] = []

    def timed(*_: object) -> Chunk:
        mode = policy.info()["guidance"]
        modes.append(mode)
        if mode != faster:
            return chunk(encode=0.0, prefill=0.1, denoise=1.1)
        return chunk(encode=9.0, prefill=0.1, denoise=1.0 if modes.count(mode) > FILLS + 1 else 100.0)

    monkeypatch.setattr(Policy, "infer", timed)
    warm_up(policy, silent, decode=False, measure_guidance=True)
    assert policy.info()["guidance"] == faster
    assert set(modes) == {"batched", "separate"}
    assert modes[-FILLS - 1 :] == (FILLS + 1) * [faster], "what is kept is walked last"


@pytest.mark.parametrize(("failing", "working"), [("batched", "separate"), ("separate", "batched")])
@pytest.mark.parametrize("call", [2, FILLS + 3], ids=["first walk", "measured walk"])
def test_a_failure_while_guidance_is_measured_leaves_the_mode_that_works_and_no_trace(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, failing: str, working: str, call: int
) -> None:
    trace(policy), policy.reset_counters()
    policy.set_batched(working == "batched")
    before = trace(policy)
    policy.reset_counters()
    policy.set_batched(True)
    infer = Policy.infer
    calls = 0  # of the mode that fails

    def fails(*args: object) -> Chunk:
        nonlocal calls
        calls += policy.info()["guidance"] == failing
        if calls == call:
            infer(*args)  # so that there is a trace to be left
            raise RuntimeError("no kernel for so large a batch")
        return chunk(prefill=0.0, denoise=1.0)

    monkeypatch.setattr(Policy, "infer", fails)
    with pytest.raises(RuntimeError, match="no kernel for so large a batch"):
        warm_up(policy, silent, decode=False, measure_guidance=True)
    assert calls == call
    assert trace(policy) == before
    assert policy.info()["guidance"] == working
    monkeypatch.undo()
    assert policy.infer("robot", observation()).actions.shape == (24, 8)


def test_what_decodes_video_is_warmed_up_where_episodes_are_recorded(cold: Policy) -> None:
    said: list[str] = []
    decoded: list[torch.Tensor] = []
    decode = cold._rollout.decode

    def watched(latents: torch.Tensor):
        decoded.append(latents)
        return decode(latents)

    cold._rollout.decode = watched  # type: ignore[method-assign]
    warm_up(cold, said.append, decode=True, measure_guidance=False)
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


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_after_start_up_nothing_compiles_and_first_calls_are_as_fast_as_later_ones() -> None:
    torch.compiler.reset()
    counters.clear()
    policy = load_policy(replace(QUICK, execution="compile", steps=4), silent)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled == 3, "prefill of one frame and of two, and denoising; for all blocks and fills"
    seconds: list[list[float]] = [[] for _ in range(FILLS)]
    seen = replace(observation(), views={name: np.repeat(v, 4, axis=0) for name, v in observation().views.items()})
    for _ in range(6):
        for of_fill in seconds:
            started_at = time.process_time()  # of this process alone: what else the machine does is not counted
            policy.infer("robot", seen)
            of_fill.append(time.process_time() - started_at)
    assert counters["stats"]["unique_graphs"] == compiled
    for first, *following in seconds:
        assert first <= 1.3 * statistics.median(following)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"execution": "fast"}, "execution: expected auto, eager, compile, graph, found 'fast'"),
        ({"execution": "graph"}, "execution graph needs a CUDA device, not cpu; try compile"),
        ({"guidance": "both"}, "guidance: expected batched, separate or measure, found 'both'"),
        ({"warm_up": "no"}, "warm-up: expected required, optional or off, found 'no'"),
        (
            {"guidance": "measure", "warm_up": "off"},
            "warm-up: expected no off where guidance is measured, found 'off'",
        ),
    ],
)
def test_settings_that_cannot_be_met_are_refused_in_a_line(changes: dict[str, str], message: str) -> None:
    with pytest.raises(PolicyLoadError, match=f"^{message}$"):
        load_policy(replace(QUICK, **changes), silent)
