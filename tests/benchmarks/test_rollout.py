"""The rollout's benchmark runs from end to end, and refuses to time an engine that computes something else."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks import plain_rollout, rollout
from benchmarks.golden import FILES

GOLDEN = next(path for path in FILES if path.stem == "step_mask_8")


@pytest.mark.slow
def test_both_sides_are_timed_and_agree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plain_rollout, "_plain_vae", lambda model: model.vae)  # saves seconds
    code = rollout.main(["--size", "tiny", "--steps", "2", "--rounds", "1", "--golden", str(GOLDEN)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "step_mask_8.safetensors, 2 calls, largest errors of the engine:\n    video_latents" in printed
    for row in ("restart, whole call", "restart, encoders", "continued, whole call", "continued, DiT"):
        assert f"| {row} | " in printed
    assert "Size tiny, 2 steps, float32, " in printed


@pytest.mark.slow
def test_an_engine_beyond_tolerance_is_not_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with safe_open(GOLDEN, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no dict
        metadata = file.metadata()
    tensors["00.video_latents"] += 1e-3
    save_file(tensors, tmp_path / "moved.safetensors", metadata)
    assert rollout.main(["--size", "tiny", "--golden", str(tmp_path / "moved.safetensors")]) == 1
    printed = capsys.readouterr().out
    assert "video_latents    1.0e-03 (at most 5e-04)" in printed
    assert printed.endswith("BEYOND TOLERANCE: the engine does not compute the release's numbers; nothing is timed.\n")


def test_sides_that_differ_are_no_comparison(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other:
        """Answers at once, with no motion."""

        def __init__(self, *_: object) -> None:
            self.seconds = {"encode": 0.0}

        def call(self, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros(16, 2, 8, 16), torch.zeros(24, 32)

    monkeypatch.setattr(rollout, "PlainRollout", Other)
    code = rollout.main(["--size", "tiny", "--steps", "1", "--rounds", "1", "--golden", str(tmp_path / "absent")])
    printed = capsys.readouterr().out
    assert code == 1
    assert printed.startswith(f"No golden file {tmp_path / 'absent'}: the engine's numbers are not checked.")
    assert "DIFFERENT ACTIONS, call by call: " in printed
    assert "| restart" not in printed
