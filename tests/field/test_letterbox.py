"""Pictures of other sizes than the model's: bars of openpi's own resizing are cut off, all else is warned of."""

import numpy as np
import pytest
from openpi_client.image_tools import resize_with_pad

from engine.checkpoint.synthetic import BUILTIN_CONFIGS, BUILTIN_STATISTICS
from engine.model.config import parse_config
from engine.robot.embodiment_file import read_embodiment
from engine.robot.transforms import Transforms
from protocol.codec import Dialect
from protocol.messages import InferRequest, parse_request
from tests.droid import DROID

KEYS = ("observation/exterior_image_0_left", "observation/exterior_image_1_left", "observation/wrist_image_left")


def scene(height: int, width: int, frames: int = 4, seed: int = 0) -> np.ndarray:
    """Smooth pictures (T,H,W,3), bright or dark down to black here and there, as a camera's are."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    waves = [np.sin(x * rng.uniform(3, 20) + y * rng.uniform(3, 20) + rng.uniform(0, 6)) for _ in range(3 * frames)]
    return (
        (127 + 128 * np.array(waves))
        .clip(0, 255)
        .astype(np.uint8)
        .reshape(frames, 3, height, width)
        .transpose(0, 2, 3, 1)
    )


def request(*pictures: np.ndarray) -> InferRequest:
    """The request of a robot whose cameras see these; with one, they all see the same."""
    images = dict(zip(KEYS, pictures if len(pictures) > 1 else pictures * 3, strict=True))
    state = {"observation/joint_position": np.zeros(7), "observation/gripper_position": np.zeros(1)}
    parsed = parse_request({**images, **state, "prompt": "a"}, Dialect.OPENPI, DROID)
    assert isinstance(parsed, InferRequest)
    return parsed


def picture_of(each: InferRequest) -> np.ndarray:
    """What the model is shown, at its real size."""
    config = parse_config(BUILTIN_CONFIGS["droid-2l"])
    transforms = Transforms(read_embodiment("oxe_droid"), config, BUILTIN_STATISTICS)
    return transforms.stitch(each.observation.views, each.observation.enlarge_to).numpy()


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """Mean absolute difference of two pictures, of 255."""
    return float(np.abs(one.astype(int) - other).mean())


@pytest.mark.parametrize("side", [112, 224, 225, 256, 448])
@pytest.mark.parametrize("source", [(180, 320), (720, 1280)])
def test_a_letterboxed_picture_is_shown_to_the_model_as_the_camera_s_own(side: int, source: tuple[int, int]) -> None:
    camera = scene(*source)
    told = request(resize_with_pad(camera, side, side))
    assert told.observation.views["wrist"].shape == (4, side * 9 // 16, side, 3)
    assert told.observation.views["wrist"].any(axis=(0, 2, 3)).all()
    assert len(told.warnings) == 3
    assert "black bars" in told.warnings[0]
    expected = picture_of(request(resize_with_pad(camera, 180, 320)))
    uncut = resize_with_pad(camera, side, side).copy()
    uncut[:, 0, 0] = 1  # a pixel that is not black, and the bars stay
    assert difference(picture_of(told), expected) < (3 if side > 112 else 6)
    assert difference(picture_of(request(uncut)), expected) > 20


def test_dark_rows_of_the_picture_itself_are_not_cut() -> None:
    camera = scene(180, 320)
    camera[:, :20] = 0
    camera[:, -30:] = 0
    assert request(resize_with_pad(camera, 224, 224)).observation.views["wrist"].shape == (4, 126, 224, 3)
    large = resize_with_pad(scene(720, 1280), 640, 640).copy()
    large[:, :200] = 0
    assert request(large).observation.views["wrist"].shape == (4, 360, 640, 3)


def test_a_camera_of_another_aspect_loses_its_bars_too_and_is_warned_of() -> None:
    told = request(resize_with_pad(scene(480, 640), 224, 224))
    assert told.observation.views["wrist"].shape == (4, 168, 224, 3)
    assert "another aspect" in told.warnings[0]


def test_a_camera_that_sees_nothing_says_nothing_of_the_others_bars() -> None:
    boxed = resize_with_pad(scene(180, 320), 224, 224)
    told = request(boxed, np.zeros_like(boxed), boxed)
    assert {frames.shape for frames in told.observation.views.values()} == {(4, 126, 224, 3)}


def spoiled(boxed: np.ndarray, where: tuple[int, ...]) -> np.ndarray:
    copy = boxed.copy()
    copy[where] = 1
    return copy


@pytest.mark.parametrize("where", [(0, 0, 0, 0), (3, 223, 223, 2)])
def test_what_is_not_exactly_black_everywhere_is_no_bar(where: tuple[int, ...]) -> None:
    """In any frame of any camera."""
    boxed = resize_with_pad(scene(180, 320), 224, 224)
    told = request(boxed, spoiled(boxed, where), boxed)
    assert told.observation.views["wrist"].shape[1] == 224
    assert any("distorted" in warning for warning in told.warnings)


@pytest.mark.parametrize(
    ("size", "effect"),
    [((180, 320), None), ((360, 640), "resized"), ((224, 224), "distorted"), ((240, 320), "distorted")],
)
def test_what_changes_the_picture_is_warned_of(size: tuple[int, int], effect: str | None) -> None:
    told = request(scene(*size, frames=1))
    assert {frames.shape[1:3] for frames in told.observation.views.values()} == {size}
    assert [warning.split()[0] for warning in told.warnings] == ([KEYS[2], *KEYS[:2]] if effect else [])
    assert all(str(effect) in warning for warning in told.warnings)


@pytest.mark.parametrize("side", [128, 224, 320])
def test_a_camera_whose_own_size_rounds_otherwise_keeps_no_black_row(side: int) -> None:
    """DROID's ZED cameras at VGA are 376x672, nearly 16:9."""
    told = request(resize_with_pad(scene(376, 672), side, side))
    assert told.observation.views["wrist"].any(axis=(0, 2, 3)).all()
    assert told.observation.enlarge_to == (180, 320)


@pytest.mark.parametrize("rows", [(20, 20), (20, 23), (40, 40), (0, 1), (1, 1), (60, 0)])
def test_dark_rows_elsewhere_are_the_picture_s_own(rows: tuple[int, int]) -> None:
    """A square picture before a black background, as a simulator renders it."""
    picture = scene(256, 256)
    picture[:, : rows[0]] = 0
    picture[:, 256 - rows[1] :] = 0
    assert request(picture).observation.views["wrist"].shape == (4, 256, 256, 3)


@pytest.mark.parametrize("change", ["float", "channels first", "one frame"])
def test_letterboxed_pictures_of_every_layout_are_cut(change: str) -> None:
    boxed = resize_with_pad(scene(180, 320), 224, 224)
    sent = {
        "float": boxed.astype(np.float32) / 255,
        "channels first": boxed.transpose(0, 3, 1, 2),
        "one frame": boxed[-1],
    }[change]
    assert request(sent).observation.views["wrist"].shape[1:] == (126, 224, 3)


def test_black_pictures_stay_as_they_are() -> None:
    assert request(np.zeros((224, 224, 3), np.uint8)).observation.views["wrist"].shape == (1, 224, 224, 3)
