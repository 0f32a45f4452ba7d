"""The numbers that the public release computed are reproduced, and the comparison can fail."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.golden import FILES, TOLERANCE, Golden, Report, check
from engine.checkpoint.synthetic import BUILTIN_CONFIGS, BUILTIN_STATISTICS
from engine.model.config import parse_config

SHARED = Path(__file__).parents[3] / "shared" / "golden"


QUICK = ("session", "step_mask_8", "dit_window")
PARAMETERS = [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.slow, id=path.stem) for path in FILES]


@pytest.mark.parametrize("path", PARAMETERS)
def test_golden_file_is_reproduced(path: Path) -> None:
    report = check(path)
    assert report.clean(TOLERANCE), report
    if Golden(path).kind == "rollout":
        exact = {name: report.errors[name] for name in ("images", "token_ids", "state", "start_frame")}
        assert set(exact.values()) == {0.0}, exact


@pytest.mark.slow
def test_the_command_exits_1_beyond_tolerance(tmp_path: Path) -> None:
    """A file whose expected actions are moved by 2e-4 is not clean."""
    source = next(path for path in FILES if path.stem == "step_mask_8")
    with safe_open(source, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no dict
        metadata = file.metadata()
    tensors["00.action"] += 2e-4
    save_file(tensors, tmp_path / "moved.safetensors", metadata)
    run = subprocess.run(
        [sys.executable, "-m", "tests.golden", tmp_path / "moved.safetensors"],
        capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert run.returncode == 1, run.stderr
    assert "moved: BEYOND TOLERANCE" in run.stdout
    assert "action           largest error 2.0e-04" in run.stdout
    assert "36 counted, 36 expected" in run.stdout


@pytest.mark.slow
def test_the_command_prints_the_deviation_of_another_arithmetic() -> None:
    """Measured in bfloat16: 42.1 dB and 0.023 rad."""
    files = [path for path in FILES if path.stem in ("dit_window", "step_mask_8")]
    run = subprocess.run(
        [sys.executable, "-m", "tests.golden", "--dtype", "bfloat16", *files],
        capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert first == "dit_window: no rollout"
    numbers = re.fullmatch(r"step_mask_8: video (.+) dB, joints (.+) rad, gripper (.+)", second)
    assert numbers, second
    psnr, joints, gripper = map(float, numbers.groups())
    assert psnr > 33
    assert 1e-4 < joints < 0.1
    assert 1e-4 < gripper < 0.1


def test_a_deviation_that_is_no_number_is_not_finite() -> None:
    latents, action = torch.zeros(1, 1, 2, 2), torch.zeros(24, 8)
    expected = torch.tensor([[[[0.0, 1.0], [2.0, 4.0]]]])
    report = Report()
    report.measure(latents + expected + 0.04, expected, (action + 0.5).numpy(), action)
    assert report.finite
    assert (report.psnr, report.joints, report.gripper) == (pytest.approx(40, abs=1e-3), 0.5, 0.5)
    for broken in ((latents * math.nan, action), (expected, action * math.nan), (expected * math.inf, action)):
        report = Report()
        report.measure(broken[0], expected, broken[1].numpy(), action)
        assert not report.finite


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/golden")
def test_the_copies_are_the_originals() -> None:
    shared = [*SHARED.glob("*.safetensors"), SHARED / "wan22" / "wan22.safetensors"]
    originals = {path.name: path.read_bytes() for path in shared}
    assert {path.name: path.read_bytes() for path in FILES} == originals


@pytest.mark.parametrize("path", [path for path in FILES if path.stem == "session"], ids=lambda path: path.stem)
def test_builtin_tiny_is_the_golden_size(path: Path) -> None:
    golden = Golden(path)
    assert parse_config(BUILTIN_CONFIGS["tiny"]) == parse_config(golden.config)
    assert golden.statistics == BUILTIN_STATISTICS


@pytest.mark.parametrize("path", [path for path in FILES if path.stem == "wan22"], ids=lambda path: path.stem)
def test_builtin_wan22_tiny_is_the_golden_size(path: Path) -> None:
    assert parse_config(BUILTIN_CONFIGS["wan22-tiny"]) == parse_config(Golden(path).config)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/golden/mid")
def test_builtin_mid_is_the_golden_size() -> None:
    assert parse_config(BUILTIN_CONFIGS["mid"]) == parse_config(Golden(SHARED / "mid" / "mid.safetensors").config)
