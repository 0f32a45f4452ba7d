"""The plain rollout that the engine is timed against computes what the release computed, with nothing of the engine."""

from pathlib import Path

import pytest
import torch

from benchmarks.golden import FILES, TOLERANCE, Golden, Report, build_engine
from benchmarks.plain_rollout import PlainRollout
from engine.model.step_cache import StepCacheSettings
from engine.rollout import RolloutSettings

PATHS = [path for path in FILES if path.stem == "prompt_change"]


def check_plain(golden: Golden, plain: PlainRollout) -> Report:
    """The report of one golden file of one session."""
    report = Report()
    for index, call in enumerate(golden.calls):
        images, tokens, state = (golden.tensor(f"{index:02}.{name}") for name in ("images", "token_ids", "state"))
        video, action = plain.call(images, tokens, (tokens != 0).long(), state, golden.noise(index))
        report.compare("video_latents", video, golden.tensor(f"{index:02}.video_latents"))
        report.compare("action_latents", action, golden.tensor(f"{index:02}.action_latents"))
        report.compare("start_frame", torch.tensor(plain.start_frame), torch.tensor(call["start_frame_after"]))
    return report


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_plain_rollout_reproduces_the_golden_file(path: Path) -> None:
    golden = Golden(path)
    engine = build_engine(golden)
    plain = PlainRollout(engine.model, engine.checkpoint.tokenizer, golden.settings())
    report = check_plain(golden, plain)
    assert report.clean(TOLERANCE), report
    assert set(report.errors) == {"video_latents", "action_latents", "start_frame"}
    with pytest.raises(ValueError, match="it has no step cache"):
        PlainRollout(
            engine.model,
            engine.checkpoint.tokenizer,
            RolloutSettings(step_cache=StepCacheSettings(mask=(True,) * 16)),
        )
    # What the engine does to its VAE's convolutions, the plain one must not have.
    assert not any("_conv_forward" in vars(module) for module in plain.vae.modules())
    assert all(weight.is_contiguous() for weight in plain.vae.parameters())
