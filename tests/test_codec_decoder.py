"""The decoder that remembers a robot's layout gives what plain decoding gives."""

import struct
import tracemalloc
from collections.abc import Callable

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from openpi_client import msgpack_numpy as openpi_numpy

from protocol.codec import CodecError, Decoder, decode
from tests.test_codec import native_pack


def observation(fill: int, prompt: str = "fold the towel", dtype: str = "<f8") -> dict[str, object]:
    return {
        "image": np.full((1, 60, 80, 3), fill, np.uint8),
        "state": np.full(7, fill / 3, dtype),
        "flags": np.array([fill % 2 == 0, True]),
        "prompt": prompt,
        "step": 3,
        "scale": np.float32(2),
    }


def same(found: object, sent: dict[str, object]) -> bool:
    if not isinstance(found, dict) or list(found) != list(sent):
        return False
    return all(np.array_equal(found[key], item) for key, item in sent.items())


def outcome(decoded: Callable[[bytes], object], frame: bytes) -> str:
    """The value or the refusal, as text."""
    try:
        return repr(decoded(frame))
    except CodecError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("pack", [openpi_numpy.packb, msgpack_numpy.packb, native_pack])
def test_a_decoder_gives_each_frame_its_own_values(pack) -> None:
    decoder = Decoder()
    sent = [
        observation(1),
        observation(2),
        observation(3),
        observation(3, prompt="wipe the table"),
        observation(4, prompt="wipe the stable"),
        observation(5, dtype=">f8"),
        observation(6, dtype=">f8"),
        observation(7, dtype="<i8"),
        {"nested": {"state": np.zeros(3)}},
        {"nested": {"state": np.ones(3)}},
        {"list": [1, 2], "state": np.zeros(3)},
        {"list": [1, 2], "state": np.ones(3)},
        observation(8),
    ]
    found = [decoder.decode(pack(value)) for value in sent]  # all kept, so that shared memory would show
    for (value, dialect), original, frame in zip(found, sent, map(pack, sent), strict=True):
        assert dialect is decode(frame)[1]
        if "nested" in original:
            assert np.array_equal(value["nested"]["state"], original["nested"]["state"])
        else:
            assert same(value, original)
            arrays_found = [item for item in value.values() if isinstance(item, np.ndarray)]
            assert all(item.flags.aligned and item.flags.writeable for item in arrays_found)


def test_what_is_done_to_one_result_does_not_show_in_the_next() -> None:
    decoder, frame = Decoder(), openpi_numpy.packb(observation(1))
    for _ in range(3):
        value, _ = decoder.decode(frame)
        assert same(value, observation(1))
        value["image"][:] = 99
        value["extra"] = "mine"
        del value["prompt"]


def test_a_decoder_checks_every_byte_around_the_data() -> None:
    frame = openpi_numpy.packb(observation(1))
    data = observation(1)["image"].tobytes()
    start = frame.index(data)
    around = [*range(start), *range(start + len(data), len(frame))]
    for at in around:
        changed = frame[:at] + struct.pack("B", frame[at] ^ 0x01) + frame[at + 1 :]
        decoder = Decoder()
        decoder.decode(frame)
        assert outcome(decoder.decode, changed) == outcome(decode, changed)


def test_a_decoder_remembers_no_more_than_a_little() -> None:
    decoder = Decoder()
    frame = msgpack.packb({str(i): bytes(60_000) for i in range(100)})
    decoder.decode(frame)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    value, _ = decoder.decode(frame)
    del value
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000
