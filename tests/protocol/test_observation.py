"""What pictures and numbers a robot may send: layouts, numberings, kinds of numbers."""

from collections.abc import Callable

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from openpi_client import msgpack_numpy as openpi_numpy

from protocol.codec import CodecError, Limits
from protocol.messages import (
    InferRequest,
    ResetRequest,
    read_request,
)
from tests.droid import DROID
from tests.protocol.test_messages import EXTERIOR, GRIPPER, JOINTS, WRIST, image, observation, parse


@pytest.mark.parametrize(
    ("sent", "left", "right"),
    [
        ((0, 1), 0, 1),
        ((0,), 0, None),
        ((1, 2), 1, 2),
        ((1,), 1, None),
        ((2,), None, 2),
        ((0, 1, 2), 0, 1),
    ],
)
def test_camera_numbering(sent: tuple[int, ...], left: int | None, right: int | None) -> None:
    cameras = {EXTERIOR[number]: image(value=number) if number in sent else ... for number in range(3)}
    views = parse(observation(**cameras)).observation.views
    found = {name: int(frames[0, 0, 0, 0]) for name, frames in views.items() if name != "wrist"}
    expected = {"exterior_left": left, "exterior_right": right}
    assert found == {name: number for name, number in expected.items() if number is not None}


def rgb(*shape: int) -> np.ndarray:
    """Frames whose channels differ: red 10, green 20, blue 30, plus row and frame number."""
    count, height, width = shape
    frames = np.zeros((count, height, width, 3), np.uint8)
    frames += np.array([10, 20, 30], np.uint8)
    frames += np.arange(count, dtype=np.uint8)[:, None, None, None]
    return frames + np.arange(height, dtype=np.uint8)[None, :, None, None]


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("count", [None, 1, 4])
def test_image_layouts(dtype: type, channels_first: bool, count: int | None) -> None:
    expected = rgb(count or 1, 24, 32)
    sent = expected if dtype is np.uint8 else (expected / 255).astype(dtype)
    sent = sent.transpose(0, 3, 1, 2) if channels_first else sent
    sent = sent if count else sent[0]
    views = parse(observation(**{key: sent.copy() for key in (EXTERIOR[0], EXTERIOR[1], WRIST)})).observation.views
    for frames in views.values():
        assert np.array_equal(frames, expected)
        assert frames.dtype == np.uint8
        assert frames.flags.c_contiguous
        assert frames.flags.writeable


def test_float_images_are_rounded_and_may_miss_the_range_by_a_rounding_error() -> None:
    sent = np.full((16, 16, 3), 0.5, np.float32)
    sent[0, 0] = [1.0004, -0.0004, 1.0]
    frames = parse(observation(**{WRIST: sent})).observation.views["wrist"]
    assert frames[0, 0, 0].tolist() == [255, 0, 255]
    assert frames[0, 1, 1, 0] == 128


@pytest.mark.parametrize(
    ("joints", "gripper"),
    [
        (np.zeros(7, np.float16), np.float32(1)),
        (np.zeros(7, np.int32), np.array(1.0)),
        ([0, 0.0, 0, 0, 0, 0, 0], 1),
        (np.zeros(7), 1.0),
        (np.zeros(7), [1]),
        (np.zeros(7), np.array([1], np.int64)),
        (np.zeros((1, 7)), np.ones((1, 1))),
        ([[0.0] * 7], [[1]]),
        ([np.zeros(7)], [np.ones(1)]),
        (list(np.zeros(7)), [np.float32(1)]),
        (np.zeros((7, 1)), np.int8(1)),
        ([[0]] * 7, [[[1]]]),
        ([np.zeros(1)] * 7, [np.ones((1, 1))]),
    ],
)
def test_states_may_come_as_any_kind_of_numbers(joints: object, gripper: object) -> None:
    request = parse(observation(**{JOINTS: joints, GRIPPER: gripper}))
    assert request.observation.state["joint_position"].tolist() == [0] * 7
    assert request.observation.state["gripper_position"].tolist() == [1]


@pytest.mark.parametrize("pack", [openpi_numpy.packb, msgpack_numpy.packb])
@pytest.mark.parametrize("text", ["stack the blöcke", ""])
def test_texts_may_come_in_numpy_dress(pack: Callable[[object], bytes], text: str) -> None:
    for dressed in (np.str_(text), np.array(text), np.array([text]), np.bytes_(text.encode())):
        if isinstance(dressed, bytes):
            dressed = np.array(dressed)
        request = read_request(pack(observation(prompt=dressed, session_id=np.array("a"))), DROID, Limits())
        assert isinstance(request, InferRequest)
        assert (request.observation.prompt, request.session_id) == (text, "a")


@pytest.mark.parametrize("pack", [openpi_numpy.packb, msgpack_numpy.packb])
def test_ids_may_be_masked_in_numpy(pack: Callable[[object], bytes]) -> None:
    ids = np.array(["a", "b", "see"])
    for mask, expected in (([True, False, True], ("a", "see")), ([False] * 3, ())):
        request = read_request(pack({"endpoint": "reset", "session_ids": ids[mask]}), DROID, Limits())
        assert request == ResetRequest(expected)


def test_a_long_text_that_is_an_image_is_told_apart() -> None:
    with pytest.raises(CodecError, match="a text of 160004 bytes of a compressed image"):
        read_request(msgpack.packb({WRIST: "/9j/" + "A" * 160_000}), DROID, Limits())


def test_frames_may_come_as_a_list() -> None:
    frames = [image(value=number) for number in range(4)]
    request = parse(observation(**dict.fromkeys((WRIST, EXTERIOR[0], EXTERIOR[1]), frames)))
    assert request.observation.views["wrist"].shape == (4, 180, 320, 3)
    assert request.observation.views["wrist"][:, 0, 0, 0].tolist() == [0, 1, 2, 3]
