"""Requests as robots send them, and every way in which one can be wrong."""

from typing import Any

import numpy as np
import pytest
from openpi_client import msgpack_numpy as openpi_numpy

from protocol.codec import Dialect, decode
from protocol.handshake import HANDSHAKE
from protocol.messages import (
    InferRequest,
    RequestError,
    ResetRequest,
    Style,
    infer_reply,
    parse_request,
    size_warnings,
)
from tests.droid import DROID

EXTERIOR = [f"observation/exterior_image_{number}_left" for number in range(3)]
WRIST = "observation/wrist_image_left"
JOINTS = "observation/joint_position"
GRIPPER = "observation/gripper_position"


def image(*shape: int, value: int = 7) -> np.ndarray:
    return np.full(shape or (180, 320, 3), value, np.uint8)


def observation(**changes: object) -> dict[str, Any]:
    """A RoboArena observation; changes are by key, `...` takes a key away."""
    value = {
        EXTERIOR[0]: image(value=1),
        EXTERIOR[1]: image(value=2),
        WRIST: image(value=3),
        JOINTS: np.arange(7, dtype=np.float32),
        GRIPPER: np.array([0.5]),
        "observation/cartesian_position": np.zeros(6),
        "prompt": "fold the towel",
        "session_id": "episode 1",
        "endpoint": "infer",
    }
    return {key: item for key, item in {**value, **changes}.items() if item is not ...}


def parse(value: object, dialect: Dialect = Dialect.OPENPI) -> InferRequest:
    request = parse_request(value, dialect, DROID)
    assert isinstance(request, InferRequest)
    return request


def test_a_roboarena_observation() -> None:
    request = parse(observation(), Dialect.NATIVE)
    assert {name: int(frames[0, 0, 0, 0]) for name, frames in request.views.items()} == {
        "exterior_left": 1,
        "exterior_right": 2,
        "wrist": 3,
    }
    assert all(frames.shape == (1, 180, 320, 3) and frames.dtype == np.uint8 for frames in request.views.values())
    assert request.state["joint_position"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert {numbers.dtype for numbers in request.state.values()} == {np.dtype(np.float64)}
    assert request.state["gripper_position"].tolist() == [0.5]
    assert (request.prompt, request.session_id) == ("fold the towel", "episode 1")
    assert (request.style, request.dialect) == (Style.ROBOARENA, Dialect.NATIVE)


def test_an_openpi_observation_has_no_endpoint() -> None:
    request = parse(observation(endpoint=..., session_id=...))
    assert request.style is Style.OPENPI
    assert request.session_id is None


def test_a_reset_needs_nothing_else() -> None:
    assert parse_request({"endpoint": "reset"}, Dialect.NATIVE, DROID) == ResetRequest(Style.ROBOARENA, Dialect.NATIVE)


@pytest.mark.parametrize(
    ("sent", "expected"), [("a", "a"), ("", None), (3, None), (np.zeros(2), None), ("x" * 257, None)]
)
def test_a_reset_may_name_its_session_and_may_carry_anything(sent: object, expected: str | None) -> None:
    request = parse_request({"endpoint": "reset", "session_id": sent, "success": True}, Dialect.OPENPI, DROID)
    assert isinstance(request, ResetRequest)
    assert request.session_id == expected


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
    views = parse(observation(**cameras)).views
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
    views = parse(observation(**{key: sent.copy() for key in (EXTERIOR[0], EXTERIOR[1], WRIST)})).views
    for frames in views.values():
        assert np.array_equal(frames, expected)
        assert frames.dtype == np.uint8
        assert frames.flags.c_contiguous
        assert frames.flags.writeable


def test_float_images_are_rounded_and_may_miss_the_range_by_a_rounding_error() -> None:
    sent = np.full((16, 16, 3), 0.5, np.float32)
    sent[0, 0] = [1.0004, -0.0004, 1.0]
    frames = parse(observation(**{WRIST: sent})).views["wrist"]
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
    ],
)
def test_states_may_come_as_any_kind_of_numbers(joints: object, gripper: object) -> None:
    request = parse(observation(**{JOINTS: joints, GRIPPER: gripper}))
    assert request.state["joint_position"].tolist() == [0] * 7
    assert request.state["gripper_position"].tolist() == [1]


def test_what_is_not_needed_is_not_looked_at() -> None:
    request = parse(
        observation(prompt="", **{"observation/cartesian_position": "junk", "step": object(), "extra": {"a": [1]}})
    )
    assert request.prompt == ""


BAD_REQUESTS = {
    "not a map": ([1], "message", "a map", "a list of 1 entries"),
    "empty map": ({}, EXTERIOR[0], "at least one exterior camera", "nothing"),
    "unknown endpoint": (observation(endpoint="warmup"), "endpoint", "'infer' or 'reset'", "text 'warmup'"),
    "endpoint not text": (observation(endpoint=3), "endpoint", "'infer' or 'reset'", "int 3"),
    "endpoint an array": (observation(endpoint=np.zeros(2)), "endpoint", "'infer' or 'reset'", "float64 array"),
    "no exterior": (observation(**{EXTERIOR[0]: ..., EXTERIOR[1]: ...}), EXTERIOR[0], "exterior camera", "nothing"),
    "no numbering": (
        observation(**{EXTERIOR[1]: ..., EXTERIOR[2]: image()}),
        EXTERIOR[2],
        EXTERIOR[1],
        "cameras 0 and 2",
    ),
    "no wrist": (observation(**{WRIST: ...}), WRIST, "RGB image", "nothing"),
    "no joints": (observation(**{JOINTS: ...}), JOINTS, "7 joint angles", "nothing"),
    "no gripper": (observation(**{GRIPPER: ...}), GRIPPER, "1 number", "nothing"),
    "no prompt": (observation(prompt=...), "prompt", "text", "nothing"),
    "prompt of bytes": (observation(prompt=b"fold"), "prompt", "text", "4 raw bytes"),
    "prompt nil": (observation(prompt=None), "prompt", "text", "nil"),
    "prompt a list": (observation(prompt=["fold"]), "prompt", "text", "a list of 1 entries"),
    "session empty": (observation(session_id=""), "session_id", "text of 1 to 256", "text ''"),
    "session number": (observation(session_id=5), "session_id", "text of 1 to 256", "int 5"),
    "session nil": (observation(session_id=None), "session_id", "text of 1 to 256", "nil"),
    "session long": (observation(session_id="x" * 257), "session_id", "text of 1 to 256", "text 'xxx"),
    "image text": (observation(**{WRIST: "image"}), WRIST, "RGB image", "text 'image'"),
    "image list": (observation(**{WRIST: [[0]]}), WRIST, "RGB image", "a list of 1 entries"),
    "image nil": (observation(**{EXTERIOR[0]: None}), EXTERIOR[0], "RGB image", "nil"),
    "image flat": (observation(**{WRIST: image(180, 320)}), WRIST, "(H,W,3)", "uint8 array of shape (180, 320)"),
    "image of rank 5": (observation(**{WRIST: image(1, 1, 18, 32, 3)}), WRIST, "(T,H,W,3)", "(1, 1, 18, 32, 3)"),
    "RGBA": (observation(**{WRIST: image(180, 320, 4)}), WRIST, "RGB image", "(180, 320, 4)"),
    "one channel": (observation(**{WRIST: image(1, 180, 320)}), WRIST, "RGB image", "(1, 180, 320)"),
    "thin image": (observation(**{WRIST: image(3, 320, 3)}), WRIST, "sides 8 to 4096", "(3, 320, 3)"),
    "small image": (observation(**{WRIST: image(7, 320, 3)}), WRIST, "sides 8 to 4096", "(7, 320, 3)"),
    "vast image": (observation(**{WRIST: image(4097, 8, 3)}), WRIST, "sides 8 to 4096", "(4097, 8, 3)"),
    "no frames": (observation(**{WRIST: image(0, 16, 16, 3)}), WRIST, "T 1 to 32", "(0, 16, 16, 3)"),
    "many frames": (observation(**{WRIST: image(33, 16, 16, 3)}), WRIST, "T 1 to 32", "(33, 16, 16, 3)"),
    "int image": (observation(**{WRIST: np.zeros((16, 16, 3), np.int32)}), WRIST, "uint8 or float", "int32 array"),
    "bool image": (observation(**{WRIST: np.zeros((16, 16, 3), bool)}), WRIST, "uint8 or float", "bool array"),
    "float 0..255": (observation(**{WRIST: np.full((16, 16, 3), 255.0)}), WRIST, "float values in [0,1]", "to 255"),
    "float below": (observation(**{WRIST: np.full((16, 16, 3), -0.1)}), WRIST, "in [0,1]", "from -0.1"),
    "float NaN": (observation(**{WRIST: np.full((16, 16, 3), np.nan)}), WRIST, "in [0,1]", "nan"),
    "float infinite": (observation(**{WRIST: np.full((16, 16, 3), np.inf)}), WRIST, "in [0,1]", "inf"),
    "unequal frames": (observation(**{EXTERIOR[1]: image(4, 18, 32, 3)}), EXTERIOR[1], "1 frames, as many as", "4"),
    "six joints": (observation(**{JOINTS: np.zeros(6)}), JOINTS, "numbers of shape (7,)", "(6,)"),
    "joints in a row": (observation(**{JOINTS: np.zeros((1, 7))}), JOINTS, "shape (7,)", "(1, 7)"),
    "joints NaN": (observation(**{JOINTS: np.full(7, np.nan)}), JOINTS, "finite numbers of shape (7,)", "nan"),
    "joints infinite": (
        observation(**{JOINTS: np.array([0.0] * 6 + [-np.inf])}),
        JOINTS,
        "finite numbers of shape (7,)",
        "-inf",
    ),
    "joints beyond float32": (
        observation(**{JOINTS: np.full(7, 1e39)}),
        JOINTS,
        "finite numbers of shape (7,)",
        "1e+39",
    ),
    "joints bool": (observation(**{JOINTS: np.zeros(7, bool)}), JOINTS, "numbers of shape (7,)", "bool array"),
    "joints text": (observation(**{JOINTS: "0000000"}), JOINTS, "numbers of shape (7,)", "text '0000000'"),
    "joints of texts": (observation(**{JOINTS: ["0"] * 7}), JOINTS, "numbers of shape (7,)", "a list of 7 entries"),
    "joints of bools": (observation(**{JOINTS: [True] * 7}), JOINTS, "numbers of shape (7,)", "a list of 7 entries"),
    "joints one number": (observation(**{JOINTS: 0.0}), JOINTS, "numbers of shape (7,)", "float 0.0"),
    "gripper NaN": (observation(**{GRIPPER: float("nan")}), GRIPPER, "finite numbers of shape (1,)", "nan"),
    "gripper true": (observation(**{GRIPPER: True}), GRIPPER, "numbers of shape (1,)", "bool True"),
    "gripper bool": (observation(**{GRIPPER: np.bool_(True)}), GRIPPER, "numbers of shape (1,)", "bool"),
    "gripper text": (observation(**{GRIPPER: "open"}), GRIPPER, "numbers of shape (1,)", "text 'open'"),
    "gripper of two": (observation(**{GRIPPER: np.zeros(2)}), GRIPPER, "numbers of shape (1,)", "(2,)"),
    "gripper in a row": (observation(**{GRIPPER: np.zeros((1, 1))}), GRIPPER, "shape (1,)", "(1, 1)"),
}


@pytest.mark.parametrize(("value", "key", "expected", "found"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_a_bad_request_is_refused_by_key(value: object, key: str, expected: str, found: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request(value, Dialect.OPENPI, DROID)
    error = caught.value
    assert error.key == key
    assert expected in error.expected
    assert found in error.found
    assert str(error) == f"{error.key}: expected {error.expected}, found {error.found}"
    assert len(str(error)) < 400


@pytest.mark.parametrize("key", ["endpoint", "session_id", JOINTS, WRIST])
def test_what_a_client_sent_is_not_echoed_at_length_nor_as_a_line_of_its_own(key: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request(observation(**{key: "line\nforged\x1b[2J" * 1000}), Dialect.OPENPI, DROID)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("dialect", Dialect)
def test_replies(dialect: Dialect) -> None:
    actions = np.arange(192, dtype=np.float32).reshape(24, 8)
    bare, found_dialect = decode(infer_reply(parse(observation(), dialect), actions, {"infer_ms": 3.5}))
    assert found_dialect is dialect
    assert np.array_equal(bare, actions)
    reply, found_dialect = decode(infer_reply(parse(observation(endpoint=...), dialect), actions, {"infer_ms": 3.5}))
    assert found_dialect is dialect
    assert np.array_equal(reply.pop("actions"), actions)
    assert reply == {"server_timing": {"infer_ms": 3.5}}


def test_size_warnings() -> None:
    assert size_warnings(parse(observation()), (180, 320)) == []
    views = {EXTERIOR[0]: image(224, 224, 3), EXTERIOR[1]: image(360, 640, 3)}
    warnings = size_warnings(parse(observation(**views)), (180, 320))
    asked = "the handshake asks for 180x320"
    assert warnings == [
        f"exterior_left images are 224x224, {asked}: another aspect ratio, distorted when resized",
        f"exterior_right images are 360x640, {asked}: resized",
    ]


def test_the_handshake_has_the_six_keys_that_clients_know() -> None:
    assert openpi_numpy.unpackb(openpi_numpy.packb(HANDSHAKE)) == {
        "image_resolution": [180, 320],
        "needs_wrist_camera": True,
        "n_external_cameras": 2,
        "needs_stereo_camera": False,
        "needs_session_id": True,
        "action_space": "joint_position",
    }
