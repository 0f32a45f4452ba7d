"""A connection's reader gives what decoding and parsing each frame alone gives, repeated or not."""

import random
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from openpi_client import msgpack_numpy as openpi_numpy

from protocol import request_reader
from protocol.codec import CodecError, decode
from protocol.messages import InferRequest, RequestError, ResetRequest, parse_request
from protocol.request_reader import RequestReader
from tests.droid import DROID
from tests.frames import digest, odd_message, spoiled, valid_frames
from tests.test_messages import EXTERIOR, GRIPPER, JOINTS, WRIST, image, observation

Request = InferRequest | ResetRequest


def alone(frame: bytes) -> Request:
    return parse_request(*decode(frame), DROID)


def outcome(read: Callable[[bytes], Request], frame: bytes) -> object:
    """Equal for equal requests and for equal refusals."""
    try:
        request = read(frame)
    except (CodecError, RequestError) as error:
        return repr(error), str(error)
    return digest(vars(request)) if isinstance(request, InferRequest) else request


def frames_of_an_episode() -> list[bytes]:
    """Runs of messages that differ in array data alone, with all that can come between them."""
    rng = np.random.default_rng(0)

    def message(frames: int = 4, **changes: object) -> dict[str, object]:
        images = {key: rng.integers(0, 256, (frames, 12, 16, 3), np.uint8) for key in (*EXTERIOR[:2], WRIST)}
        return observation(**{**images, JOINTS: rng.uniform(-1, 1, 7), **changes})

    small = image(8, 16, 3)
    messages = [message() for _ in range(3)]
    messages += [message(**{JOINTS: np.full(7, number)}) for number in (0.5, np.nan, 1.5, np.inf)]
    messages += [message(prompt=prompt) for prompt in ("wipe the table", "wipe the cable", "wipe the cable")]
    messages += [message(**{WRIST: rng.integers(0, 2, (4, 12, 16, 3)) / level}) for level in (1.0, 0.1, 2.0)]
    messages += [message(1, **{WRIST: small[..., :3] + 1}) for _ in range(2)]
    messages += [message(2, **{GRIPPER: grip}) for grip in (0.5, 0.5, np.float32(1), [0.5])]
    messages += [{"endpoint": "reset"}, message(), message(), message(endpoint=...), message(session_id="next")]
    messages += [message(**{EXTERIOR[0]: ..., EXTERIOR[2]: rng.integers(0, 9, (4, 12, 16, 3), np.uint8)})] * 2
    return [openpi_numpy.packb(each) for each in messages] + [b"rubbish", openpi_numpy.packb(messages[-1])]


def test_each_frame_of_an_episode_is_read_as_it_is_alone() -> None:
    reader = RequestReader(DROID)
    for frame in frames_of_an_episode():
        assert outcome(reader.read, frame) == outcome(alone, frame)


def test_any_frame_after_any_other_is_read_as_it_is_alone() -> None:
    rng = random.Random(0)
    seeds = valid_frames()
    for _ in range(2000):
        reader = RequestReader(DROID)
        seed = rng.choice(seeds)
        frames = [seed, rng.choice((odd_message(rng), spoiled(seed, seeds, rng))), seed]
        for frame in frames:
            assert outcome(reader.read, frame) == outcome(alone, frame)


def test_what_was_checked_in_one_frame_is_not_checked_again_in_its_like(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = RequestReader(DROID)
    alike = {key: image(4, 12, 16, 3) for key in EXTERIOR[:2]}
    first, second = (
        openpi_numpy.packb(observation(**alike, **{WRIST: image(4, 12, 16, 3, value=value)})) for value in (1, 2)
    )
    reader.read(first)
    monkeypatch.setattr(request_reader, "parse_request", None)
    request = reader.read(second)
    assert isinstance(request, InferRequest)
    assert (request.views["wrist"] == 2).all()
    assert all(frames.flags.writeable for frames in request.views.values())


def test_a_reader_keeps_no_images() -> None:
    reader = RequestReader(DROID)
    frame = openpi_numpy.packb(observation(**{key: image(4, 12, 16, 3) for key in (*EXTERIOR[:2], WRIST)}))
    for _ in range(2):
        request = reader.read(frame)
        assert isinstance(request, InferRequest)
        held = [weakref.ref(frames) for frames in request.views.values()]
        del request
        assert [reference() for reference in held] == [None] * 3
