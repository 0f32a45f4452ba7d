"""Requests as robots send them, and every way in which one can be wrong."""

import functools
from typing import Any

import msgpack
import numpy as np
import pytest
from openpi_client import msgpack_numpy as openpi_numpy

from protocol.codec import CodecError, Dialect, Limits, decode
from protocol.messages import (
    InferRequest,
    RequestError,
    ResetRequest,
    infer_reply,
    parse_request,
    read_request,
)
from protocol.robot import HANDSHAKE
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
    assert {name: int(frames[0, 0, 0, 0]) for name, frames in request.observation.views.items()} == {
        "exterior_left": 1,
        "exterior_right": 2,
        "wrist": 3,
    }
    assert all(
        frames.shape == (1, 180, 320, 3) and frames.dtype == np.uint8 for frames in request.observation.views.values()
    )
    assert request.observation.state["joint_position"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert {numbers.dtype for numbers in request.observation.state.values()} == {np.dtype(np.float64)}
    assert request.observation.state["gripper_position"].tolist() == [0.5]
    assert (request.observation.prompt, request.session_id) == ("fold the towel", "episode 1")
    assert (request.dialect, request.warnings) == (Dialect.NATIVE, ())


def test_an_openpi_observation_has_no_endpoint() -> None:
    assert parse(observation(endpoint=..., session_id=...)).session_id is None


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (None, None),
        ("", None),
        (5, "5"),
        (7.0, "7"),
        (np.int64(7), "7"),
        (np.array([3]), "3"),
        (-1, "-1"),
        (1764558000000.0, "1764558000000"),
        ("x" * 256, "x" * 256),
    ],
)
def test_an_episode_may_be_named_by_a_number_or_not_at_all(sent: object, expected: str | None) -> None:
    assert parse(observation(session_id=sent)).session_id == expected


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, None),
        ({"session_id": None}, None),
        ({"session_id": None, "session_ids": None}, ()),
        ({"session_id": "a", "session_ids": None}, ("a",)),
        ({"session_id": ""}, None),
        ({"session_id": "a", "success": True}, ("a",)),
        ({"session_id": 3}, ("3",)),
        ({"session_ids": ["a", "b", "a", 4]}, ("a", "b", "4")),
        ({"session_id": "c", "session_ids": ["a"]}, ("c", "a")),
        ({"session_id": ["a", "b"]}, ("a", "b")),
        ({"session_ids": "a"}, ("a",)),
        ({"session_ids": np.array([1, 2])}, ("1", "2")),
        ({"session_ids": []}, ()),
        ({"session_id": np.full(2, 0.5)}, ()),
        ({"session_id": "x" * 257}, ()),
        ({"session_id": {"a": 1}}, ()),
    ],
)
def test_a_reset_names_the_episodes_it_ends_and_may_carry_anything(
    sent: dict[str, object], expected: tuple[str, ...] | None
) -> None:
    assert parse_request({"endpoint": "reset", **sent}, Dialect.OPENPI, DROID) == ResetRequest(expected)


def test_what_is_not_needed_is_not_looked_at() -> None:
    request = parse(
        observation(prompt="", **{"observation/cartesian_position": "junk", "step": object(), "extra": {"a": [1]}})
    )
    assert request.observation.prompt == ""


JUNK: dict[Any, Any] = {
    "joint names": {"observation/joint_names": ["panda_joint1"] * 7},
    "JPEG bytes": {"observation/exterior_image_0_left/jpeg": b"\xff\xd8\xff" + bytes(200_000)},
    "a long text": {"note": "x" * 200_000},
    "bytes that are no text": {"raw": b"\xff" * 10},
    "a time stamp": {"stamp": msgpack.Timestamp(1, 2)},
    "an extension": {"ext": msgpack.ExtType(5, bytes(300))},
    "a long list": {"log": list(range(100_000))},
    "two long lists": {"log": [1.5] * 20_000, "more": [[b"a"] * 9_000, {"a": list(range(9_000))}]},
    "a list in lists": {"deep": functools.reduce(lambda inner, _: [inner], range(100), 0)},
    "int keys": {7: "seven", "by number": {1: {2: 3}}},
    "other keys": {None: 1, 1.5: 2, True: 3},
    "an array of objects": {"objects": {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": b"pickle"}},
    "a broken array": {"broken": {b"__ndarray__": True}},
    "a key twice": {b"step": 1, "step": 2},
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
@pytest.mark.parametrize("first", [False, True])
def test_what_nobody_asks_for_is_never_a_reason_to_refuse(junk: dict[Any, Any], first: bool) -> None:
    request = observation(**{WRIST: image(8, 8, 3), EXTERIOR[0]: image(8, 8, 3), EXTERIOR[1]: image(8, 8, 3)})
    parts = [msgpack.packb(junk), openpi_numpy.packb(request)]
    assert parts[0][0] & 0xF0 == parts[1][0] & 0xF0 == 0x80
    entries = [part[1:] for part in (parts if first else parts[::-1])]
    frame = bytes([0x80 + len(junk) + len(request)]) + b"".join(entries)
    read = read_request(frame, DROID, Limits())
    assert isinstance(read, InferRequest)
    assert read.session_id == "episode 1"
    assert read.observation.state["joint_position"].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_limits_on_the_message_as_a_whole_stay() -> None:
    with pytest.raises(CodecError, match="more than the 10000 values"):
        read_request(msgpack.packb({str(number): number for number in range(6_000)}), DROID, Limits())
    for spoiled in (
        b"\x81\xa1a\xdd\x00\x01\x00\x00" + b"\x01" * 65_000,
        b"\x81\xa1a\xc6\xff\xff\xff\xff",
        b"\x81\xa1a",
    ):
        with pytest.raises(CodecError, match="ends in the middle"):
            read_request(spoiled, DROID, Limits())
    for spoiled in (b"\x81\xa1a\xc1", b"\x81\xa1a\xdd\x00\x01\x00\x00" + b"\xc1" * 65_536):
        with pytest.raises(CodecError, match=r"0xc1|FormatError"):
            read_request(spoiled, DROID, Limits())
    with pytest.raises(CodecError, match="StackError"):
        read_request(b"\x81\xa1a" + b"\x91" * 10_000 + b"\x01", DROID, Limits())


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
    "prompt a list": (observation(prompt=["fold", "it"]), "prompt", "text", "a list of 2 entries"),
    "session fraction": (observation(session_id=5.5), "session_id", "text of 1 to 256", "float 5.5"),
    "session infinite": (observation(session_id=float("inf")), "session_id", "text of 1 to 256", "float inf"),
    "session true": (observation(session_id=True), "session_id", "text of 1 to 256", "bool True"),
    "session long": (observation(session_id="x" * 257), "session_id", "text of 1 to 256", "text 'xxx"),
    "image text": (observation(**{WRIST: "image"}), WRIST, "RGB image", "text 'image'"),
    "image list": (observation(**{WRIST: [[0]]}), WRIST, "RGB image", "a list of 1 entries"),
    "image frames unlike": (observation(**{WRIST: [image(), image(90)]}), WRIST, "RGB image", "a list of 2 entries"),
    "image JPEG": (
        observation(**{WRIST: b"\xff\xd8\xff\xe0" + bytes(9)}),
        WRIST,
        "RGB image",
        "compressed image (JPEG)",
    ),
    "image PNG": (observation(**{WRIST: b"\x89PNG\r\n\x1a\n"}), WRIST, "RGB image", "compressed image (PNG)"),
    "image JPEG as cv2 has it": (
        observation(**{WRIST: np.frombuffer(b"\xff\xd8\xff\xe0" + bytes(99), np.uint8)[:, None]}),
        WRIST,
        "RGB image",
        "uint8 array of shape (103, 1) of a compressed image (JPEG)",
    ),
    "images JPEG": (
        observation(**{WRIST: [b"\xff\xd8\xff\xe0" + bytes(99)] * 4}),
        WRIST,
        "RGB image",
        "a list of 4 entries, the first 103 raw bytes of a compressed image (JPEG)",
    ),
    "image base64": (
        observation(**{WRIST: "/9j/" + "A" * 99}),
        WRIST,
        "RGB image",
        "compressed image (JPEG in base64)",
    ),
    "image AVIF": (observation(**{WRIST: b"\0\0\0\x20ftypavif"}), WRIST, "RGB image", "(AVIF or HEIC)"),
    "image bytes": (observation(**{WRIST: bytes(9)}), WRIST, "RGB image", "9 raw bytes"),
    "image plain map": (
        observation(**{WRIST: {"data": bytes(9), "shape": [3], "dtype": "|u1"}}),
        WRIST,
        "RGB image",
        "a plain map with data, dtype, shape (an array's map has '__ndarray__'",
    ),
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
    "joints beside much": (
        observation(**{JOINTS: {"data": 1, "shape": 2, **{f"{number:040}": 0 for number in range(4000)}}}),
        JOINTS,
        "numbers of shape (7,)",
        "a plain map with data, shape (",
    ),
    "joints of two steps": (observation(**{JOINTS: np.zeros((2, 7))}), JOINTS, "shape (7,)", "(2, 7)"),
    "joints as bytes": (observation(**{JOINTS: bytes(56)}), JOINTS, "numbers of shape (7,)", "56 raw bytes"),
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
    request = parse(observation(), dialect)
    about = {"server_timing": {"infer_ms": 3.5}, "warnings": ["a"]}
    reply, found_dialect = decode(infer_reply(request, actions, about))
    assert found_dialect is dialect
    assert isinstance(reply, dict)
    assert np.array_equal(reply.pop("actions"), actions)
    assert reply == about
    bare, found_dialect = decode(infer_reply(request, actions, about, as_array=True))
    assert found_dialect is dialect
    assert np.array_equal(bare, actions)


def test_the_handshake_has_the_six_keys_that_clients_know() -> None:
    assert openpi_numpy.unpackb(openpi_numpy.packb(HANDSHAKE)) == {
        "image_resolution": [180, 320],
        "needs_wrist_camera": True,
        "n_external_cameras": 2,
        "needs_stereo_camera": False,
        "needs_session_id": True,
        "action_space": "joint_position",
    }
