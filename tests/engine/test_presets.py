"""What each preset stands for, on a device with and without float8, and what settings given singly change."""

import pytest
import torch

from benchmarks import presets
from benchmarks.golden import FILES
from engine.model.fp8 import has_fp8
from engine.presets import PRESETS, Preset, resolve
from engine.settings import EngineSettings
from policy_server.settings import parse_settings


def test_the_release_s_default_is_ours() -> None:
    assert resolve(EngineSettings(), has_fp8=True) == PRESETS["release"] == Preset("release", 16, "mask-8", fp8=False)


@pytest.mark.parametrize(
    ("given", "has_fp8", "expected"),
    [
        ({"preset": "quality"}, True, "quality: --steps 16 --step-cache none --no-fp8"),
        ({"preset": "fast"}, True, "fast: --steps 16 --step-cache mask-5 --fp8"),
        ({"preset": "fast"}, False, "fast: --steps 16 --step-cache mask-5 --no-fp8"),
        ({"preset": "fast", "fp8": "no"}, True, "fast: --steps 16 --step-cache mask-5 --no-fp8 (fp8 given)"),
        ({"fp8": "yes"}, False, "release: --steps 16 --step-cache mask-8 --fp8 (fp8 given)"),
        ({"steps": "4"}, True, "release: --steps 4 --step-cache none --no-fp8 (steps given)"),
        ({"steps": "16"}, True, "release: --steps 16 --step-cache mask-8 --no-fp8 (steps given)"),
        (
            {"steps": "16", "step_cache": "mask-6"},
            True,
            "release: --steps 16 --step-cache mask-6 --no-fp8 (steps, step-cache given)",
        ),
        ({"step_cache": "none"}, True, "release: --steps 16 --step-cache none --no-fp8 (step-cache given)"),
    ],
)
def test_single_settings_take_the_preset_s_place(given: dict[str, str], has_fp8: bool, expected: str) -> None:
    """From the command line and from the environment alike."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if name != "fp8"]
    flags += {"yes": ["--fp8"], "no": ["--no-fp8"], "": []}[given.get("fp8", "")]
    assert str(resolve(parse_settings(flags, {}).engine, has_fp8)) == expected
    environment = {f"DREAMZERO_{name.upper()}": value for name, value in given.items()}
    assert str(resolve(parse_settings([], environment).engine, has_fp8)) == expected


def test_fast_takes_float8_where_the_device_gains_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda")
    for capability, offered in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert has_fp8(card, torch.bfloat16) == offered
        assert not has_fp8(card, torch.float32)
        assert not has_fp8(torch.device("cpu"), torch.bfloat16), "computed in software there"


@pytest.mark.slow
def test_the_table_of_presets_is_made_from_real_calls(capsys: pytest.CaptureFixture[str]) -> None:
    """A file with a mask of its own has no 16 steps to be compared with, and is left out."""
    files = [path for path in FILES if path.stem in ("decoupled_noise", "step_mask_8")]
    assert presets.main([str(path) for path in files]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Rollouts decoupled_noise; 2 calls by each, eager, ")
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line[:3] == "| `"]
    assert [row[0] for row in rows] == ["quality", "release", "fast", "velocity", "fast"]
    assert [row[3] for row in rows[:3]] == ["16.0", "8.0", "5.0"]
    assert [row[4] for row in rows[:3]] == ["1,734", "909", "599"]
    assert rows[0][5] == "1.00"
    assert rows[4][5] == "", "computed in software"
    assert rows[4][1:3] == ["--steps 16 --step-cache mask-5 --fp8", "float32"]
    video = [float(row[6].removesuffix(" dB")) for row in rows]
    joints = [float(row[7].removesuffix(" rad")) for row in rows]
    assert video[0] > 100 > video[1] > video[2] > 5
    assert joints[0] < 1e-4 < joints[1]
    with pytest.raises(SystemExit):
        presets.main([str(files[1])])
    assert "none of the files is a rollout with every step computed" in capsys.readouterr().err
