"""The whole road as a newcomer goes it: a server process, and a replay process that drives it."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.process import server

ROOT = Path(__file__).parents[2]
DROID_EPISODE = ROOT.parent / "shared" / "data" / "droid_episode"
DROID_PROMPT = "Move the pan forward and use the brush in the middle of the plates to brush the inside of the pan"


def replay(url: str, out: Path, *arguments: str | Path) -> np.ndarray:
    """Run the replay command; returns the actions it wrote."""
    command = [sys.executable, "-m", "clients.replay", "--url", url, "--out", out, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert re.search(r"latency +min [\d.]+ ms, median [\d.]+ ms, p95 [\d.]+ ms, max [\d.]+ ms", run.stdout)
    assert re.search(r"throughput +[\d.]+ calls/s", run.stdout)
    with Image.open(out / "actions.png") as picture:
        assert min(picture.size) > 500
    return np.load(out / "actions.npz")["actions"]


def check_twice_the_same(episode: str | Path, prompt: str, calls: int, tmp_path: Path) -> None:
    with server("--port", "0") as running:
        url = running.url()
        ready = running.line("ready")
        assert "has synthetic weights, not trained ones" in ready
        first, second = (
            replay(url, tmp_path / name, "--episode", episode, "--prompt", prompt, "--calls", str(calls))
            for name in ("first", "second")
        )
    assert (first.shape, first.dtype) == ((calls, 24, 8), np.float32)
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, second)
    assert len({chunk.tobytes() for chunk in first}) == calls, "every call has an answer of its own"


@pytest.mark.slow
def test_the_project_s_own_episode_gives_the_same_actions_twice(tmp_path: Path) -> None:
    check_twice_the_same("synthetic", "put the block on the plate", 6, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not DROID_EPISODE.is_dir(), reason="needs ../shared/data/droid_episode")
def test_a_recorded_droid_episode_gives_the_same_18_chunks_twice(tmp_path: Path) -> None:
    check_twice_the_same(DROID_EPISODE, DROID_PROMPT, 18, tmp_path)
