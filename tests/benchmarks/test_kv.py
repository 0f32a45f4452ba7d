"""The KV benchmark's two sides compute the same, differ in what it counts, and it runs from end to end."""

import re
from itertools import pairwise

import pytest
import torch

from benchmarks import kv
from engine.checkpoint.builtin import BUILTIN_CONFIGS, BUILTIN_STATISTICS
from engine.checkpoint.opening import synthetic_checkpoint
from engine.model.weights import Model, load_model
from tests.golden import TOLERANCE

TINY = synthetic_checkpoint("tiny", BUILTIN_CONFIGS["tiny"], BUILTIN_STATISTICS)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(TINY.config, TINY.weights, kv.CPU, torch.float32)


@pytest.fixture
def robots(model: Model) -> tuple[kv.Robot, kv.Robot]:
    """Paged and dense."""
    paged, dense = (kv.make_robot(model, TINY.tokenizer, dense, steps=2) for dense in (False, True))
    return paged, dense


def test_both_sides_give_the_same_over_a_window_and_its_restart(robots: tuple[kv.Robot, kv.Robot]) -> None:
    """As near as the engine is to the release: the sides sum over the keys in different orders."""
    lengths = []
    for _ in range(kv.FILLS + 2):
        paged, dense = (robot.chunk() for robot in robots)
        torch.testing.assert_close(dense.action_latents, paged.action_latents, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(dense.video_latents, paged.video_latents, rtol=0, atol=TOLERANCE)
        lengths.append(paged.video_latents.shape[1])
    assert lengths == [3, 2, 2, 2, 3, 2], "the image latent is in front at a restart"


def test_what_the_window_holds_shows_in_the_dense_side_s_results(robots: tuple[kv.Robot, kv.Robot]) -> None:
    """Otherwise a side that forgets its window would agree as well."""
    paged, dense = robots
    while dense.session.kv.resident_frames != 5:
        paged.chunk(), dense.chunk()
    for layer in dense.cache.paged.layers:
        layer.window = None  # type: ignore[attr-defined]
    difference = (paged.chunk().action_latents - dense.chunk().action_latents).abs().max()
    assert difference > 1e-4


def test_the_dense_side_alone_makes_window_sized_allocations(model: Model, robots: tuple[kv.Robot, kv.Robot]) -> None:
    paged, dense = robots
    assert kv.large_allocations(model, paged) == 0
    assert kv.large_allocations(model, dense) > 0


def test_the_benchmark_runs_from_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    kv.main(["--size", "tiny", "--rounds", "1", "--steps", "1", "--chunks", "4"])
    printed = capsys.readouterr().out
    assert "Size tiny, float32, " in printed
    assert re.search(r"\| DiT time of one chunk, 1 steps \| \S+ s \| \S+ s \| \S+ \|", printed)
    assert re.search(r"\| window-sized allocations .* \| 0 \| [1-9]\d* \|", printed)
    assert len(re.findall(r"\| \d+ MiB, then [+-]\d+, [+-]\d+, [+-]\d+, [+-]\d+ MiB \|", printed)) == 2


def test_a_tensor_that_stays_shows_in_the_peaks(robots: tuple[kv.Robot, kv.Robot]) -> None:
    paged, _ = robots
    flat = [peak.tensors for peak in kv.peaks(paged, 16)]
    assert flat[1:] == flat[:1] * 4
    kept: list[torch.Tensor] = []
    chunk = paged.chunk

    class Leaking:
        def chunk(self) -> None:
            chunk()
            kept.append(torch.ones(2**20))

    growing = [peak.tensors for peak in kv.peaks(Leaking(), 16)]  # type: ignore[arg-type]
    assert all(later - earlier >= 4 * 4 * 2**20 for earlier, later in pairwise(growing[1:]))
    assert kv.growth_text([2**20, 2**20, 3 * 2**20]) == "1 MiB, then +0, +2 MiB"
