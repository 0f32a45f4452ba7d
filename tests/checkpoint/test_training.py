"""`experiment_cfg/conf.yaml`: what is read, what stands in for what is missing, what is refused."""

from pathlib import Path

import pytest

from engine.checkpoint.error import CheckpointError
from engine.checkpoint.open import open_checkpoint
from engine.checkpoint.training import TrainingConfig, read_training
from tests.checkpoints import change_json, tiny_checkpoint

HYDRA = """
defaults: [base, {model: dreamzero}]
image_resolution_height: 88
image_resolution_width: 160
relative_action: ${train.relative_action}
train:
  relative_action: true
  steps: 100000
  datasets:
    - name: droid
      relative_action_keys: [joint_position, gripper_position]
      image_resolution_width: 7
    - name: other
      relative_action_keys: [joint_position, gripper_position]
      relative_action: null
"""


def conf(directory: Path, text: str) -> Path:
    (directory / "experiment_cfg").mkdir(parents=True, exist_ok=True)
    (directory / "experiment_cfg" / "conf.yaml").write_text(text)
    return directory


def test_keys_are_found_at_the_top_and_below(tmp_path: Path) -> None:
    assert read_training(conf(tmp_path, HYDRA)) == TrainingConfig(88, 160, True, ("joint_position", "gripper_position"))


@pytest.mark.parametrize("text", [None, "seed: 1", "relative_action: ${elsewhere}"])
def test_what_is_missing_is_as_in_the_release_or_left_to_the_embodiment(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        conf(tmp_path, text)
    training = read_training(tmp_path)
    assert training == TrainingConfig(176, 320, True, None)
    assert training.relative_keys is None


def test_without_relative_action_no_key_is_relative(tmp_path: Path) -> None:
    training = read_training(conf(tmp_path, "relative_action: false\nrelative_action_keys: [joint_position]"))
    assert training.relative_action_keys == ("joint_position",)
    assert training.relative_keys == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("relative_action: sometimes", "conf.yaml: relative_action must be true or false, found 'sometimes'"),
        (
            "relative_action_keys: joint_position",
            "keys must be a list of names, found 'joint_position'",
        ),
        ("relative_action_keys: [1]", "relative_action_keys must be a list of names"),
        ("image_resolution_height: 0", "image_resolution_height must be a number of pixels, found 0"),
        ("image_resolution_width: wide", "image_resolution_width must be a number of pixels, found 'wide'"),
        (
            "a: {relative_action: true}\nb: {relative_action: false}",
            "a.relative_action is True, but b.relative_action is False: expected one value",
        ),
        ("[]", "conf.yaml must hold a map, found list"),
        ("a: [", "conf.yaml: cannot be read as YAML"),
        ("a: !!python/object/apply:os.getcwd []", "conf.yaml: cannot be read as YAML"),
    ],
)
def test_what_cannot_be_meant_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_training(conf(tmp_path, text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_view_size_is_the_training_s_unless_config_json_has_one(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path / "tiny")
    conf(directory, "image_resolution_height: 32\nimage_resolution_width: 64\nrelative_action: false")
    change_json(directory / "config.json", lambda config: [config.pop(key) for key in ("view_height", "view_width")])
    checkpoint = open_checkpoint(str(directory))
    assert (checkpoint.config.view_height, checkpoint.config.view_width) == (32, 64)
    assert checkpoint.training.relative_keys == ()
    conf(directory, "image_resolution_height: 176\nimage_resolution_width: 320")
    with pytest.raises(CheckpointError, match=r"config\.json: .*the view size does not fit"):
        open_checkpoint(str(directory))
    change_json(directory / "config.json", lambda config: config.update(view_height=32, view_width=64))
    assert open_checkpoint(str(directory)).config.view_height == 32
