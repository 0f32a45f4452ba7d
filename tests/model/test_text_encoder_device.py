"""The text encoder where the settings put it."""

from dataclasses import replace

import pytest
import torch

from benchmarks.golden import FILES, TOLERANCE, Golden, build_engine, check_rollout
from engine.checkpoint.open import open_checkpoint
from engine.checkpoint.synthetic import BUILTIN_CONFIGS
from engine.model.config import parse_config
from engine.model.weights import Model, WeightBytes, build_model, load_model, weight_bytes
from engine.rollout import Rollout, RolloutSettings
from engine.settings import EngineSettings
from engine.startup import build_cache, load_policy

META = torch.device("meta")
TINY = parse_config(BUILTIN_CONFIGS["tiny"])
DROID = parse_config({"action_head_cfg": {"config": {}}})


def test_on_the_cpu_by_setting_gives_the_release_s_numbers() -> None:
    settings = EngineSettings(checkpoint="tiny", device="cpu", text_encoder_device="cpu")
    model: Model = load_policy(settings, lambda _: None)._rollout._model

    file = Golden(next(path for path in FILES if path.stem == "prompt_change"))
    engine = build_engine(file)
    rollout = Rollout(model, engine.cache, engine.checkpoint.tokenizer, engine.settings)
    report = check_rollout(file, replace(engine, model=model, rollout=rollout))
    assert report.clean(TOLERANCE), report


@pytest.mark.parametrize("fp8", [False, True])
def test_each_weight_is_where_it_was_counted(monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    monkeypatch.setattr(
        "engine.model.weights.is_finite", lambda values: True
    )  # nothing can be read off the other device here
    checkpoint = open_checkpoint("tiny")
    for text_encoder_device in (META, torch.device("cpu")):
        on_host = text_encoder_device != META
        model = load_model(TINY, checkpoint.weights, META, torch.bfloat16, fp8, text_encoder_device)
        found = {"cpu": 0, "meta": 0}
        for module, _ in model.components():
            for tensor in (*module.parameters(), *(b for name, b in module.named_buffers() if name.endswith("scale"))):
                found[tensor.device.type] += tensor.nbytes
        assert weight_bytes(TINY, torch.bfloat16, fp8, on_host) == WeightBytes(found["meta"], found["cpu"])
        places = {p.device for p in model.text_encoder.encoder.final_layer_norm.parameters()}
        assert places == {text_encoder_device}


def test_what_it_gives_is_moved_to_where_the_transformer_is() -> None:
    """A rollout encodes the negative prompt when it is made: a transformer elsewhere would not take what is here."""
    checkpoint = open_checkpoint("tiny")
    model = load_model(TINY, checkpoint.weights, torch.device("cpu"), torch.float32)
    model.dit.to(META)
    rollout = Rollout(model, build_cache(TINY, 2**28, META, torch.float32), checkpoint.tokenizer, RolloutSettings())
    assert rollout.device == META


def test_bytes_of_the_14b_model() -> None:
    """5.68 billion parameters leave the device: 11.4 GB, of which 2.1 GB, the embedding table, never were there."""
    encoder = sum(p.numel() for p in build_model(DROID).text_encoder.parameters())
    plain, on_host = (weight_bytes(DROID, torch.bfloat16, text_encoder_on_host=on) for on in (False, True))
    assert on_host.host == 2 * encoder
    assert plain.host == 2 * 256384 * 4096
    assert on_host.device + on_host.host == plain.device + plain.host
    both = weight_bytes(DROID, torch.bfloat16, fp8=True, text_encoder_on_host=True)
    assert 18.3e9 < both.device < 18.4e9
