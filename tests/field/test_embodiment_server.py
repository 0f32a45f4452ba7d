"""A robot of another kind, described by the documentation's example file, from its socket to the model and back."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checkpoint.synthetic import BUILTIN_CONFIGS, BUILTIN_STATISTICS
from engine.model.config import parse_config
from engine.robot.embodiment import Cell, EmbodimentError
from engine.robot.embodiment_file import read_embodiment
from engine.robot.transforms import Transforms
from engine.settings import EngineSettings
from engine.startup import PolicyLoadError, load_policy
from policy_server.server import PolicyServer
from policy_server.settings import ServerSettings, SettingsError
from protocol.robot import Observation, StateVector
from tests.checkpoints import tiny_checkpoint
from tests.robot.test_embodiment_file import EXAMPLE
from tests.serving import Robot

TINY = parse_config(BUILTIN_CONFIGS["tiny"])
ARM = read_embodiment(str(EXAMPLE))
STATISTICS = {
    "two_camera_arm": {
        "statistics": {
            "state": {
                "joints": {"q01": [-1.0] * 6, "q99": [1.0] * 6},
                "fingers": {"q01": [0.0] * 3, "q99": [2.0] * 3},
            },
            "action": {
                "joints": {"q01": [-0.5] * 6, "q99": [0.5] * 6},
                "fingers": {"q01": [0.0] * 3, "q99": [2.0] * 3},
            },
        }
    }
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny checkpoint that was trained on both robots."""
    directory = tiny_checkpoint(tmp_path / "tiny")
    conf("", directory)
    (directory / "experiment_cfg" / "metadata.json").write_text(json.dumps(BUILTIN_STATISTICS | STATISTICS))
    return directory


def conf(text: str, checkpoint: Path) -> None:
    """Have the checkpoint's conf.yaml say its view size and `text`."""
    view = "image_resolution_height: 32\nimage_resolution_width: 64\n"
    (checkpoint / "experiment_cfg" / "conf.yaml").write_text(view + text)


@asynccontextmanager
async def serving_the_arm(checkpoint: Path) -> AsyncIterator[PolicyServer]:
    engine = EngineSettings(checkpoint=str(checkpoint), embodiment=str(EXAMPLE), device="cpu", steps=1)
    async with PolicyServer(
        ServerSettings(port=0, engine=engine), lambda report: load_policy(engine, report)
    ) as server:
        await asyncio.wait_for(server.ready(), 60)
        yield server


def request(**changes: object) -> dict[str, object]:
    """What the arm sends; `...` takes a key away."""
    frames = np.random.default_rng(0).integers(0, 256, (1, 240, 320, 3), np.uint8)
    message: dict[str, object] = {
        "images/front": frames,
        "images/hand": frames[:, ::-1].copy(),
        "state/joints": np.full(6, 0.25),
        "state/fingers": np.zeros(3),
        "prompt": "pick up the block",
    }
    return {key: value for key, value in (message | changes).items() if value is not ...}


async def test_an_arm_of_another_kind_is_served_over_a_socket(checkpoint: Path) -> None:
    async with serving_the_arm(checkpoint) as server, await Robot.connect(server) as robot:
        assert robot.handshake == {
            "image_resolution": [240, 320],
            "needs_wrist_camera": False,
            "n_external_cameras": 1,
            "needs_stereo_camera": False,
            "needs_session_id": True,
            "action_space": "joint_position",
        }
        first = (await robot.ask(request(session_id="a")))["actions"]
        assert (first.shape, first.dtype) == ((24, 9), np.float32)
        assert np.isfinite(first).all()
        again = await robot.ask(request(session_id="a", **{"images/front": np.zeros((4, 240, 320, 3), np.uint8),
                                                           "images/hand": ...}))  # fmt: skip
        assert again["actions"].shape == (24, 9)

        other_keys = request(session_id="b")
        for view in ("front", "hand"):
            other_keys[f"{view}_rgb"] = other_keys.pop(f"images/{view}")
        np.testing.assert_array_equal((await robot.ask(other_keys))["actions"], first)

        assert (await robot.ask(request(**{"images/front": ...}))).startswith("images/front: expected an RGB image")
        assert "state/joints: expected numbers of shape (6,)" in await robot.ask(request(**{"state/joints": [1, 2]}))
        assert "state/fingers: expected 3 finger positions" in await robot.ask(request(**{"state/fingers": ...}))
    info = server.engine.loaded.result()
    assert (info["embodiment"], info["action_size"]) == ("two_camera_arm", 9)


async def test_relative_joints_are_added_to_those_observed_and_fingers_are_not(checkpoint: Path) -> None:
    """Joints beyond the statistics look the same to the model, so what differs is what the server adds."""
    near, far = np.full(6, 2.0), np.arange(3.0, 9.0)
    async with serving_the_arm(checkpoint) as server, await Robot.connect(server) as robot:
        replies = [
            (await robot.ask(request(session_id=str(index), **{"state/joints": joints})))["actions"]
            for index, joints in enumerate((near, far))
        ]
    np.testing.assert_array_equal(replies[0][:, :3], replies[1][:, :3])
    np.testing.assert_allclose(replies[1][:, 3:] - replies[0][:, 3:], np.tile(far - near, (24, 1)), atol=1e-5)


@pytest.mark.parametrize(
    ("text", "relative"),
    [
        ("", {"joints"}),
        ("relative_action: false", set()),
        ("relative_action: true\nrelative_action_keys: [fingers]", {"fingers"}),
        ("relative_action: true\nrelative_action_keys: [fingers, joints]", {"fingers", "joints"}),
    ],
)
def test_the_checkpoint_says_which_actions_are_relative(checkpoint: Path, text: str, relative: set[str]) -> None:
    """State beyond the statistics looks the same to the model, so what differs is what is added."""
    conf(text, checkpoint)
    policy = load_policy(
        EngineSettings(checkpoint=str(checkpoint), embodiment=str(EXAMPLE), device="cpu", steps=1), lambda _: None
    )
    frames = np.zeros((1, 8, 8, 3), np.uint8)
    states = [{"joints": np.full(6, value), "fingers": np.full(3, value)} for value in (3.0, 5.0)]
    near, far = (policy.infer(str(state), Observation({"front": frames}, state, "")) for state in states)
    added = (far.actions - near.actions).round(4)
    assert set(added[:, :3].ravel()) == {2.0 if "fingers" in relative else 0.0}
    assert set(added[:, 3:].ravel()) == {2.0 if "joints" in relative else 0.0}


def test_an_action_that_the_checkpoint_calls_relative_and_the_file_does_not_have_ends_the_start(
    checkpoint: Path,
) -> None:
    conf("relative_action_keys: [wings]", checkpoint)
    settings = EngineSettings(checkpoint=str(checkpoint), embodiment=str(EXAMPLE), device="cpu")
    with pytest.raises(PolicyLoadError, match="calls the actions wings relative; embodiment two_camera_arm has"):
        load_policy(settings, lambda _: None)


def test_views_are_laid_out_as_the_file_says() -> None:
    transforms = Transforms(ARM, TINY, STATISTICS)
    views = {name: np.full((2, 50, 70, 3), value, np.uint8) for name, value in (("front", 10), ("hand", 200))}
    picture = transforms.stitch(views)
    assert picture.shape == (2, 64, 128, 3)
    assert (picture[:, :, :64].int() - 10).abs().max() <= 1
    assert (picture[:, :, 64:].int() - 200).abs().max() <= 1
    assert (transforms.stitch({"front": views["front"]})[:, :, 64:] == 0).all()


def test_a_larger_view_repeats_its_pixels_and_a_crop_keeps_the_middle() -> None:
    layout = ((Cell(view="front", width=2, height=3),), (Cell(view="hand", width=1), Cell(view="side", width=1)))
    tall = Transforms(replace(ARM, layout=layout, crop=0.5), TINY, STATISTICS)
    front = np.zeros((1, 32, 128, 3), np.uint8)
    front[:, 8:24, 32:96] = np.arange(16, dtype=np.uint8)[:, None, None] * 10 + 5
    picture = tall.stitch({"front": front})
    assert picture.shape == (1, 64, 128, 3), "four rows of 16, two columns of 64"
    expected = torch.arange(16).repeat_interleave(3) * 10 + 5
    assert (picture[0, :48, 0, 0].int() - expected).abs().max() <= 1
    assert torch.equal(picture[0, :48, 0, 0], picture[0, :48, 127, 0])
    assert (picture[:, 48:] == 0).all()


def test_state_and_actions_are_in_the_file_s_order() -> None:
    transforms = Transforms(ARM, TINY, STATISTICS)
    state = {"fingers": np.full(3, 2.0), "joints": np.linspace(-1, 1, 6)}
    row = transforms.normalize_state(state)
    np.testing.assert_allclose(row[:9], [*np.linspace(-1, 1, 6), 1, 1, 1], atol=1e-6)
    assert (row[9:] == 0).all()
    latents = torch.zeros(24, 32)
    latents[:, 0] = 1.0
    actions = transforms.actions(latents, state)
    np.testing.assert_allclose(actions[7], [2, 1, 1, *np.linspace(-1, 1, 6)], atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": tuple((Cell(view="front"),) for _ in range(3))}, r"3 x 1 views, which do not divide .* 64 x 128"),
        ({"state": (StateVector(name="joints", size=65, key="a", meaning="numbers"),)}, "65 numbers of state, .* 64"),
    ],
)
def test_a_robot_that_does_not_fit_the_checkpoint_is_refused(changes: dict, message: str) -> None:
    statistics = {"two_camera_arm": {"statistics": dict(STATISTICS["two_camera_arm"]["statistics"])}}
    wide = {"q01": [0.0] * 65, "q99": [1.0] * 65}
    if "state" in changes:
        statistics["two_camera_arm"]["statistics"]["state"] = {"joints": wide}
    with pytest.raises(EmbodimentError, match=message):
        Transforms(replace(ARM, **changes), TINY, statistics)


def test_a_checkpoint_without_the_robot_s_statistics_is_refused_before_its_weights_are_read() -> None:
    said: list[str] = []
    with pytest.raises(PolicyLoadError, match=r"no embodiment 'two_camera_arm'; it has \['oxe_droid'\]"):
        load_policy(EngineSettings(embodiment=str(EXAMPLE), device="cpu"), said.append)
    assert said == ["reading the checkpoint"]


async def test_a_server_with_a_bad_file_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "robot.yaml").write_text("name: robot")
    settings = ServerSettings(port=0, engine=EngineSettings(embodiment=str(tmp_path / "robot.yaml")))
    with pytest.raises(SettingsError, match=r"robot\.yaml: views: expected an entry, found nothing"):
        await PolicyServer(settings, lambda report: load_policy(settings.engine, report)).start()
