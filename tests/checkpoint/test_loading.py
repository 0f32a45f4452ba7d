"""Checkpoints on disk in the release's layout: read, placed, and served as those in memory are."""

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.golden import FILES, TOLERANCE, Golden, build_engine, check_rollout
from engine.checkpoint.files import read_header
from engine.checkpoint.names import UNUSED
from engine.checkpoint.open import Checkpoint, open_checkpoint
from engine.checkpoint.synthetic import BUILTIN_CONFIGS, release_shapes, synthetic_tensor, write_weights
from engine.model.config import parse_config
from engine.model.text import encode_text
from engine.model.weights import build_model, load_model
from engine.policy import PolicyStats
from engine.settings import EngineSettings
from engine.startup import load_policy
from protocol.robot import Observation
from tests.checkpoints import actions_of, droid_shapes, tiny_checkpoint
from tests.process import server
from tests.serving import Robot, observation

TINY = parse_config(BUILTIN_CONFIGS["tiny"])
RELEASE = parse_config({"action_head_cfg": {"config": {}}})


def message(call: int) -> dict[str, Any]:
    return observation(frames=1 if call == 0 else 4, seed=call)


def sharded(directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The tiny checkpoint in several files with an index."""
    tiny_checkpoint(directory)
    (directory / "model.safetensors").unlink()
    write_weights(directory, release_shapes(TINY), dtype, 4 * 2**20, synthetic_tensor)
    return directory


class OnDisk(Golden):
    """A golden file whose checkpoint is read from a directory."""

    def __init__(self, path: Path, directory: Path) -> None:
        super().__init__(path)
        self._directory = directory

    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(str(self._directory))


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_checkpoint, sharded])
def test_a_checkpoint_on_disk_gives_the_actions_of_the_one_in_memory(tmp_path: Path, make: object) -> None:
    written = make(tmp_path / "written")  # type: ignore[operator]
    assert len(list(written.glob("*.safetensors"))) == (1 if make is tiny_checkpoint else 5)
    np.testing.assert_array_equal(actions_of(written), actions_of("tiny"))


@pytest.mark.slow
async def test_the_server_answers_from_disk_what_the_policy_in_memory_answers(tmp_path: Path) -> None:
    """Three calls of an episode over the wire, bit for bit: what a client gets of `--checkpoint DIR`."""
    torch.set_num_threads(1)
    policy = load_policy(EngineSettings(checkpoint="tiny", device="cpu", steps=2), lambda status: None)
    directory = sharded(tmp_path / "written")
    with server("--checkpoint", str(directory), "--device", "cpu", "--steps", "2", "--port", "0") as running:
        url = running.url()
        running.line("ready")
        async with await Robot.connect(url) as robot:
            answers = [(await robot.ask(message(call)))["actions"] for call in range(3)]
    for call, answer in enumerate(answers):
        asked = message(call)
        seen = Observation(
            {
                "exterior_left": asked["observation/exterior_image_0_left"],
                "exterior_right": asked["observation/exterior_image_1_left"],
                "wrist": asked["observation/wrist_image_left"],
            },
            {name: asked[f"observation/{name}"] for name in ("joint_position", "gripper_position")},
            asked["prompt"],
        )
        np.testing.assert_array_equal(answer, policy.infer("robot", seen).actions)


@pytest.mark.parametrize("path", [path for path in FILES if path.stem == "step_mask_8"], ids=lambda path: path.stem)
def test_a_checkpoint_on_disk_reproduces_a_golden_rollout(tmp_path: Path, path: Path) -> None:
    golden = OnDisk(path, sharded(tmp_path / "written"))
    report = check_rollout(golden, build_engine(golden))
    assert report.clean(TOLERANCE), report
    assert report.forwards == 36


def test_every_entry_of_the_released_14b_checkpoint_finds_its_place() -> None:
    released = droid_shapes()
    assert len(released) == 2146
    model = build_model(RELEASE)
    assert model.entry_shapes() == {name: shape for name, shape in released.items() if name not in UNUSED}
    assert released.keys() >= UNUSED
    assert release_shapes(RELEASE).keys() == released.keys()
    assert all(p.is_meta for module, _ in model.components() for p in module.parameters())


def test_entries_that_no_forward_uses_are_counted_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    actions_of(tiny_checkpoint(tmp_path / "tiny"))
    assert "4 of 394 checkpoint entries are not used" in caplog.text


def test_every_parameter_is_put_in_the_target_dtype_and_no_weight_is_kept_twice(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(sharded(tmp_path / "written", torch.bfloat16)))
    model = load_model(checkpoint.config, checkpoint.weights, torch.device("cpu"), torch.float16)
    parameters = [p for module, _ in model.components() for p in module.parameters()]
    assert {p.dtype for p in parameters} == {torch.float16}
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    assert sum(storages.values()) == 2 * sum(p.numel() for p in parameters)


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_three_entries_of_self_attention_are_one_parameter(tmp_path: Path, part: str) -> None:
    checkpoint = open_checkpoint(str(sharded(tmp_path / "written")))
    model = load_model(checkpoint.config, checkpoint.weights, torch.device("cpu"), torch.float32)
    joined = model.dit.get_parameter(f"blocks.1.self_attn.qkv.{part}")
    names = [f"action_head.model.blocks.1.self_attn.{entry}.{part}" for entry in "qkv"]
    shapes = build_model(TINY).entry_shapes()
    assert torch.equal(joined, torch.cat([synthetic_tensor(name, shapes[name]) for name in names]))


def test_weights_come_shard_by_shard_in_the_order_they_lie_in(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(sharded(tmp_path / "written")))
    shapes = build_model(TINY).entry_shapes()
    read = [name for name, _ in checkpoint.weights.read(shapes)]
    stored = {}
    for path in sorted((tmp_path / "written").glob("*.safetensors")):
        stored |= read_header(path)
    in_order = sorted(shapes, key=lambda name: (stored[name].file, stored[name].start))
    assert read == in_order
    assert len({stored[name].file for name in read}) == 5


def test_reading_takes_two_buffers_of_the_largest_entry(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(sharded(tmp_path / "written")))
    shapes = build_model(TINY).entry_shapes()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for _, tensor in checkpoint.weights.read(shapes)
    }
    assert list(storages.values()) == 2 * [max(4 * math.prod(shape) for shape in shapes.values())]


def test_a_weight_stays_until_the_next_is_asked_for(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(sharded(tmp_path / "written")))
    shapes = build_model(TINY).entry_shapes()
    for name, tensor in checkpoint.weights.read(shapes):
        time.sleep(0.0005)  # whatever is read ahead is read now
        assert torch.equal(tensor, synthetic_tensor(name, shapes[name])), name


def test_the_embedding_table_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "engine.model.weights.is_finite", lambda values: True
    )  # nothing can be read off the other device here
    checkpoint = open_checkpoint("tiny")
    model = load_model(checkpoint.config, checkpoint.weights, torch.device("meta"), torch.float32)
    on_host = {
        name for module, _ in model.components() for name, p in module.named_parameters() if p.device.type == "cpu"
    }
    assert on_host == {"shared.weight"}


def test_a_prompt_s_rows_go_from_the_table_to_the_device_of_the_encoder() -> None:
    class Encoder:
        shared = torch.nn.Embedding(4, 3)
        encoder = SimpleNamespace(final_layer_norm=torch.nn.LayerNorm(3, device="meta"))

        def __call__(self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
            assert attention_mask.is_meta
            return SimpleNamespace(last_hidden_state=inputs_embeds)

    encoded = encode_text(Encoder(), torch.tensor([1, 2]), torch.ones(2))
    assert encoded.is_meta
    assert encoded.shape == (1, 2, 3)


def test_loading_leaves_a_policy_that_holds_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    policy = load_policy(EngineSettings(checkpoint=str(tiny_checkpoint(tmp_path / "tiny")), device="cpu"), said.append)
    assert said[:3] == ["reading the checkpoint", "loading weights", "sizing the KV cache"]
    assert isinstance(policy.stats(), PolicyStats)
    assert policy.info()["trained"] is False


def test_a_terminal_sees_a_progress_bar_and_a_log_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint(tmp_path / "tiny")))
    shapes = build_model(TINY).entry_shapes()
    for _ in checkpoint.weights.read(shapes):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for _ in checkpoint.weights.read(shapes):
        pass
    shown = capsys.readouterr().err
    assert "weights: 100%" in shown
    assert "19.6M/19.6M" in shown
