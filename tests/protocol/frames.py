"""Frames for fuzzing the wire: valid ones of every kind, and ways to spoil them."""

import random
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
from openpi_client import msgpack_numpy as openpi_numpy

from protocol.codec import CodecError, Dialect, Limits, decode, encode
from protocol.messages import InferRequest, RequestError, infer_reply, parse_request, read_request
from tests.droid import DROID

PEAK_PER_BYTE = 5
PEAK_CONSTANT = 4 * 2**20
"""Decoding and parsing a frame of n bytes may take PEAK_PER_BYTE * n + PEAK_CONSTANT bytes of memory."""


def observation(image: np.ndarray, first_camera: int, **more: object) -> dict[str, Any]:
    return {
        f"observation/exterior_image_{first_camera}_left": image,
        f"observation/exterior_image_{first_camera + 1}_left": image,
        "observation/wrist_image_left": image,
        "observation/joint_position": np.linspace(-1, 1, 7),
        "observation/gripper_position": np.float32(0.25),
        "prompt": "fold the towel",
        **more,
    }


def valid_frames() -> list[bytes]:
    """Small messages in every array dialect, keys as bin and as str."""
    image = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    values: list[dict[str, Any]] = [
        observation(image, 0, endpoint="infer", session_id="episode"),
        observation(image[np.newaxis].repeat(4, axis=0), 1, **{"observation/cartesian_position": np.zeros(6)}),
        observation((image.transpose(2, 0, 1) / 255).astype(np.float16), 1, session_id="episode"),
        {"endpoint": "reset", "session_id": "episode", "info": [1, -2, 2.5, None, True, b"raw", {"a": {}}]},
    ]
    frames = [pack(value) for value in values for pack in (openpi_numpy.packb, msgpack_numpy.packb)]
    frames += [encode(value, Dialect.NATIVE) for value in values]
    return frames + [msgpack.packb(msgpack.unpackb(frame, raw=False)) for frame in frames[:4]]


def memory_bombs() -> list[bytes]:
    """Frames that cost a careless decoder many times their size."""
    count = 5_000_000
    return [
        b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count,
        b"\xdd" + count.to_bytes(4, "big") + b"\x81\xa0\x90" * count,
        b"\xdd" + (9_999).to_bytes(4, "big") + b"\x90" * 9_999,
        b"\xdd" + (3_333).to_bytes(4, "big") + b"\x81\xa0\x90" * 3_333,
        b"\xdd\xff\xff\xff\xff" * 100_000,
        b"\x91" * count,
        msgpack.packb(["a" * 65_000 + "\U0001f600"] * 100),
        msgpack.packb({str(i): "\u00e9" * 100 for i in range(4_000)}),
        msgpack.packb([bytes(65_000)] * 100),
        msgpack.packb([{"__ndarray__": True, "data": b"", "dtype": "<f4", "shape": [0] * 8}] * 500),
        openpi_numpy.packb(observation(np.zeros((32, 64, 64, 3)), 0)),
        openpi_numpy.packb(observation(np.zeros((32, 3, 64, 64), np.float16), 0)),
        openpi_numpy.packb({"prompt": np.zeros(8 * 2**20, "S1")}),
        openpi_numpy.packb({"endpoint": "reset", "session_ids": np.zeros(8 * 2**20, np.uint8)}),
        openpi_numpy.packb(
            {**observation(np.zeros((8, 8, 3), np.uint8), 0), "observation/joint_position": [np.zeros(2**23, np.uint8)]}
        ),
    ]


_TELLING = [bytes([code]) for code in range(0x80, 0x100)] + [
    b"\x00",
    b"\x01",
    b"\x7f",
    b"\xff" * 4,
    b"nd",
    b"data",
    b"|O",
]


def spoiled(frame: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """The frame after one to four random accidents."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(frame) + 1)
        end = min(len(frame), at + rng.choice((1, 1, 2, 4, 16, 200)))
        match rng.randrange(7):
            case 0:
                frame = frame[:at] + rng.choice(_TELLING) + frame[end:]
            case 1:
                frame = frame[:at] + rng.choice(_TELLING) + frame[at:]
            case 2:
                frame = frame[:at] + frame[end:]
            case 3:
                frame = frame[:end] + frame[at:]
            case 4:
                frame = frame[:at] + rng.randbytes(end - at) + frame[end:]
            case 5:
                other = rng.choice(others)
                start = rng.randrange(len(other) + 1)
                frame = frame[:at] + other[start : start + rng.choice((8, 64, 1000))] + frame[end:]
            case 6 if at < len(frame):
                frame = frame[:at] + bytes([frame[at] ^ (1 << rng.randrange(8))]) + frame[at + 1 :]
    return frame


def odd_message(rng: random.Random) -> bytes:
    """A well-formed message in which one to three values are not what belongs there."""
    image = np.zeros((8, 8, 3), np.uint8)
    message = observation(image, rng.choice((0, 1)), endpoint="infer", session_id="episode")
    dtypes = ("?", "i1", "u1", "u2", "i4", "f2", "f4", "f8", ">f4")
    sides = (0, 1, 2, 3, 4, 7, 8, 9, 33)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([*message, "extra", "observation/exterior_image_2_left"])
        shape = tuple(rng.choice(sides) for _ in range(rng.randint(0, 5)))
        with np.errstate(invalid="ignore"):
            array = np.full(shape, rng.choice((0, 1, np.nan, np.inf, -1))).astype(rng.choice(dtypes))
        odd = [
            array,
            np.float32(rng.random()),
            rng.choice((None, True, 0, -1, 2**64 - 1, 1.5, float("nan"), "", "text", b"raw", "infer", "reset")),
            [rng.choice((0, 1.5, None, "x", float("nan")))] * rng.choice((0, 1, 7)),
            {},
        ]
        message[key] = rng.choice(odd)
        if rng.random() < 0.2:
            del message[key]
    return encode(message, rng.choice(list(Dialect)))


def digest(value: object) -> object:
    """Equal for equal values, arrays included."""
    match value:
        case np.ndarray() | np.generic():
            return type(value), value.dtype.str, value.shape, value.tobytes()
        case dict():
            return [(key, digest(item)) for key, item in value.items()]
        case list():
            return [digest(item) for item in value]
        case _:
            return repr(value)


def ending(frame: bytes) -> tuple[str, object]:
    """How a frame ends at a server, and all that is in it, None where that cannot be decoded.

    Only the documented errors are caught. What the server does not look at must not change how the rest ends.
    """
    try:
        request = read_request(frame, DROID, Limits())
    except CodecError as error:
        end = f"undecodable: {error}"
    except RequestError as error:
        end = f"refused: {error}"
    else:
        end = f"accepted: {type(request).__name__}"
        if isinstance(request, InferRequest):
            decode(infer_reply(request, np.zeros((24, 8), np.float32), {"infer_ms": 1.0}))
            assert all(frames.dtype == np.uint8 and frames.ndim == 4 for frames in request.observation.views.values())
            assert np.isfinite(request.observation.state["joint_position"]).all()
    try:
        value, dialect = decode(frame)
    except CodecError:
        return end, None
    if isinstance(value, dict):
        try:
            end_of_all = f"accepted: {type(parse_request(value, dialect, DROID)).__name__}"
        except RequestError as error:
            end_of_all = f"refused: {error}"
        assert end == end_of_all, f"as a whole it is {end_of_all}"
    return end, value
