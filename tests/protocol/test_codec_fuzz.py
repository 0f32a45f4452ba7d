"""Random and spoiled frames: no crash, no other error than the documented ones, no memory beyond a small multiple.

`python -m tests.protocol.fuzz_codec --examples 2000000` does the same at length.
"""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol.codec import Dialect, decode, encode
from tests.protocol.frames import digest, ending, memory_bombs, odd_message, spoiled, valid_frames
from tests.protocol.fuzz_codec import check, check_memory

BOUNDED = settings(max_examples=1000, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SEEDS = valid_frames()

numbers = st.one_of(
    hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.unsigned_integer_dtypes(), hnp.floating_dtypes(sizes=(16, 32, 64))
)
arrays = hnp.arrays(numbers, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=300),
    arrays,
)
ordinary_keys = st.text(max_size=8).filter(lambda key: key not in ("__ndarray__", "__npgeneric__", "nd"))
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ordinary_keys, inner, max_size=4), max_leaves=12
)


def in_native_order(value: object) -> object:
    match value:
        case np.ndarray():
            return value.astype(value.dtype.newbyteorder("="))
        case dict():
            return {key: in_native_order(item) for key, item in value.items()}
        case list():
            return [in_native_order(item) for item in value]
        case _:
            return value


@pytest.mark.slow
@BOUNDED
@given(values, st.sampled_from(Dialect))
def test_any_value_comes_back_as_it_was(value: object, dialect: Dialect) -> None:
    assert digest(decode(encode(value, dialect))[0]) == digest(in_native_order(value))


@pytest.mark.slow
@BOUNDED
@given(values, values)
def test_what_is_not_wanted_is_passed_over_whatever_it_is(junk: object, kept: object) -> None:
    packed = [encode(value, Dialect.OPENPI) for value in (junk, kept)]
    frame = b"\x84" + b"\xa1a" + packed[0] + packed[0] + packed[1] + b"\xc4\x01b" + packed[1] + b"\xa1c" + packed[0]
    value, _ = decode(frame, wanted={b"b": "b"})
    assert digest(value) == digest({"b": in_native_order(kept)})


@BOUNDED
@given(st.binary(max_size=400))
def test_random_bytes_end_as_documented(frame: bytes) -> None:
    check(frame, number=1)


@BOUNDED
@given(st.sampled_from(SEEDS), st.randoms(use_true_random=False))
def test_spoiled_messages_end_as_documented_and_in_little_memory(seed: bytes, rng: random.Random) -> None:
    check(spoiled(seed, SEEDS, rng), number=0)


@BOUNDED
@given(st.randoms(use_true_random=False))
def test_odd_messages_end_as_documented(rng: random.Random) -> None:
    frame = odd_message(rng)
    assert not check(frame, number=1).startswith("undecodable")


@pytest.mark.parametrize("frame", memory_bombs(), ids=lambda frame: f"{frame[:6].hex()}-{len(frame)}")
def test_frames_made_to_fill_memory_do_not(frame: bytes) -> None:
    check_memory(frame)


def test_the_seeds_are_requests() -> None:
    for seed in SEEDS:
        assert ending(seed)[0].startswith("accepted")
