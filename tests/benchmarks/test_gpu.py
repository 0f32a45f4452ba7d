"""The GPU benchmark's road, walked on the CPU; what it holds a run to; and the operations that it counts."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_kernels
from benchmarks.flops import Flops, call_flops, forward_flops
from benchmarks.golden import Mode, Report
from benchmarks.gpu_model import RandomWeights, droid_14b, load
from benchmarks.gpu_report import Verdict
from benchmarks.gpu_speed import Way, begin_speed_table, time_calls
from engine.model.config import parse_config
from tests.checkpoints import small
from tests.fake_cuda import fake_cuda

CPU = torch.device("cpu")
DROID = parse_config(droid_14b())


@pytest.mark.slow
def test_the_road_is_walked_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "STEP_CACHES", ("mask-8",))
    rows = tmp_path / "rows.jsonl"
    assert gpu.main(["--device", "cpu", "--size", "tiny", "--calls", "1", "--rows", str(rows)]) == 0
    printed = capsys.readouterr().out
    at = 0
    for row in (
        "| started | cpu | eager | sdpa |",
        "| pytest -m gpu | 0 |",
        "| float32, eager, mask-5 | 5.0 |",
        "| the 15 longest kernels of one continued call |",
        "| golden session in float32, largest error (at most 1e-04) |",
        "| eager | ",
        "| 238 of 238 |",
        "| sdpa |",
        "| model |",
        "| a restart: an image and 32 grey frames |",
        "| fp8, eager, mask-5 | 5.0 |",
        "| eager, mask-5, branches separate | 0.0e+00 | 0.0e+00 |",
        "| eager, mask-5 |",
        "| float32, eager, mask-5, branches separate | 5.0 |",
        "| float32, eager, mask-5, 3 sessions | 5.0 |",
        "| float32, eager, mask-8 | 8.0 |",
        "Everything is within its bounds.",
    ):
        assert row in printed[at:], row
        at = printed.index(row, at)
    assert "missed" not in printed
    kept = [json.loads(line) for line in rows.read_text().splitlines()]
    assert list(dict.fromkeys(row["part"] for row in kept)) == list(gpu.PARTS)
    assert next(row for row in kept if row["part"] == "golden")["DiT forwards"] == "238 of 238"


@pytest.mark.slow
def test_the_server_s_start_and_the_main_number_go_through_on_a_cuda_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # in "auto" its kernels would be compiled
    monkeypatch.setitem(gpu.BUILTIN_CONFIGS, "small", small())
    profile = gpu.profile  # of this build of torch, which has none for CUDA
    monkeypatch.setattr(gpu, "profile", lambda activities: profile(activities=activities[:1]))
    monkeypatch.setattr(gpu, "PARTS", {name: (work, 3600) for name, (work, _) in gpu.PARTS.items()})
    parts = ["--parts", "start,main", "--rows", str(tmp_path / "rows.jsonl")]
    with fake_cuda() as cuda:
        assert gpu.main(["--size", "small", "--calls", "1", *parts]) == 0
    printed = capsys.readouterr().out
    assert "| started | cuda:0 | graph | triton |" in printed
    assert "| bfloat16, graph, mask-5 | 5.0 |" in printed
    assert cuda.used == {0}


def test_a_part_that_fails_or_takes_too_long_leaves_the_others_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(run: gpu.Run) -> None:
        raise RuntimeError("no kernel image")

    def never_ends(run: gpu.Run) -> None:
        while True:
            time.sleep(0.01)

    def fine(run: gpu.Run) -> None:
        gpu.begin_table("a table", "a number")
        gpu.show_row("a row", "1")

    monkeypatch.setattr(gpu, "PARTS", {"a": (fails, 1), "b": (never_ends, 1), "c": (fine, 1)})
    monkeypatch.setattr(gpu, "ON_CPU_TIMES", 1)
    rows = tmp_path / "rows.jsonl"
    assert gpu.main(["--device", "cpu", "--size", "tiny", "--parts", "a,b,c", "--rows", str(rows)]) == 1
    faults = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BEYOND")]
    assert [fault.partition(": ")[2] for fault in faults] == [
        "part a: RuntimeError: no kernel image",
        "part b: TimeoutError: not done in 1 s",
    ]
    assert json.loads(rows.read_text().splitlines()[-1]) == {"part": "c", "a table": "a row", "a number": "1"}
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--parts", "a,d"])


def test_a_golden_session_beyond_tolerance_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(path: object, mode: Mode) -> Report:
        if mode.execution == "compile":
            raise RuntimeError("no compiler\nnor anything else")
        off = 2e-4 if mode.execution == "graph" else 5e-5
        errors = {"video_latents": off, "action_latents": 0.0, "action": 0.0}
        return Report(errors=errors, forwards=8, forwards_expected=8)

    monkeypatch.setattr(gpu, "check", check)
    verdict = Verdict(on_target_machine=False)
    gpu.check_golden(CPU, ("eager", "compile", "graph"), verdict)
    assert verdict.conclude() == 1
    lines = capsys.readouterr().out.splitlines()
    assert "| graph | 2.0e-04 | 0.0e+00 | 0.0e+00 | 8 of 8 |" in lines
    assert [line for line in lines if line.startswith("BEYOND")] == [
        "BEYOND ITS BOUND: golden session, compile: RuntimeError: no compiler",
        "BEYOND ITS BOUND: golden session, graph, video_latents: 2.0e-04, expected at most 1e-04",
    ]


def test_attention_that_is_off_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = gpu_kernels.attend

    def off(*args: Any) -> torch.Tensor:
        return attend(*args) * (1 + 1e-3)

    verdict = Verdict(on_target_machine=False)
    config = parse_config(gpu.BUILTIN_CONFIGS["tiny"])
    gpu_kernels.compare_attention(config, CPU, torch.float32, verdict)
    assert not verdict.faults
    monkeypatch.setattr(gpu_kernels, "attend", off)
    gpu_kernels.compare_attention(config, CPU, torch.float32, verdict)
    assert [fault.partition(":")[0] for fault in verdict.faults] == ["attention by sdpa"]


@pytest.mark.parametrize("error", [2e-4, math.nan, math.inf])
def test_an_error_that_is_no_number_is_beyond_any_bound(error: float) -> None:
    verdict = Verdict(on_target_machine=False)
    verdict.hold("it", 1e-4, 1e-4)
    assert not verdict.faults
    verdict.hold("it", error, 1e-4 if error < 1 else math.inf)
    assert len(verdict.faults) == 1


def test_targets_are_told_on_the_machine_that_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert Verdict(True).beside("1.20", 1.2, 1.25) == "1.20 (1.25: met)"
    assert Verdict(True).beside("1.30", 1.3, 1.25) == "1.30 (1.25: missed)"
    assert Verdict(False).beside("1.30", 1.3, 1.25) == "1.30"
    bench = load("tiny", CPU, torch.float32, fp8=True, text_encoder=CPU)
    verdict = Verdict(True)
    begin_speed_table()
    time_calls(bench, Way("eager", "mask-5", main=True), 1, {"model": 1e9, "fp8": 1e9}, verdict, plain_dit=1e-6)
    printed = capsys.readouterr().out
    assert "of that without fp8 (0.65: missed)" in printed
    assert "(38: met)" in printed
    assert not verdict.faults  # a target decides nothing


def test_the_operations_are_the_spec_s() -> None:
    """Section 7: 43 TFLOP in linear layers, up to 12 in self-attention, 1 in cross-attention; 1.8 and 0.95 PFLOP."""
    tokens = 2 * 880 + 25
    assert forward_flops(DROID, tokens, 0).linear == pytest.approx(43e12, rel=0.01)
    assert forward_flops(DROID, tokens, 0).attention == pytest.approx(1e12, rel=0.15)
    assert forward_flops(DROID, tokens, 9 * 880 + 25).attention == pytest.approx((12 + 1) * 1e12, rel=0.03)
    assert call_flops(DROID, 7, 16).total == pytest.approx(1.8e15, rel=0.05)
    assert call_flops(DROID, 7, 8).total == pytest.approx(0.95e15, rel=0.05)


def test_attention_s_operations_have_a_rate_of_their_own() -> None:
    assert Flops(linear=6.0, attention=2.0).seconds(linear_rate=2.0, attention_rate=1.0) == 5.0
    assert (Flops(6.0, 2.0) + Flops(1.0, 1.0)) * 2 == Flops(14.0, 6.0)


def test_random_weights_are_the_same_for_the_same_model_and_scaled_as_trained_ones() -> None:
    shapes = {"action_head.model.blocks.0.ffn.0.weight": (64, 4096), "action_head.model.blocks.0.ffn.0.bias": (64,)}
    first, second = (dict(RandomWeights(CPU).read(shapes)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in shapes)
    assert float(first["action_head.model.blocks.0.ffn.0.weight"].float().std()) == pytest.approx(1 / 64, rel=0.05)
