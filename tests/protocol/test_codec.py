"""The codec against the packers that robots really use, and against everything they should not send."""

import tracemalloc

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from openpi_client import msgpack_numpy as openpi_numpy

from protocol.codec import Dialect, decode, encode

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
FOREIGN_PACK = {Dialect.OPENPI: openpi_numpy.packb, Dialect.MSGPACK_NUMPY: msgpack_numpy.packb}
FOREIGN_UNPACK = {Dialect.OPENPI: openpi_numpy.unpackb, Dialect.MSGPACK_NUMPY: msgpack_numpy.unpackb}


def native_pack(value: object) -> bytes:
    """An independent rendering of the third row of the array table."""

    def fields(item: np.ndarray | np.generic) -> dict[str, object]:
        common = {"type": item.dtype.str, "kind": item.dtype.kind, "data": item.tobytes()}
        return {"nd": True, "shape": item.shape, **common} if isinstance(item, np.ndarray) else {"nd": False, **common}

    return msgpack.packb(value, default=fields)


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    values = [(rng.random((3, 4)) * 100).astype(dtype) for dtype in DTYPES]
    grid = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    return [
        *values,
        np.array(2.5),
        np.array(True),
        np.zeros((0, 3), np.float32),
        np.array([1.5, -2.0], ">f4"),
        np.array([1, 2**40], ">i8"),
        grid[:, ::2, ::-1],
        np.asfortranarray(grid),
        rng.integers(0, 256, (4, 30, 40, 3), dtype=np.uint8),
    ]


def assert_same(found: np.ndarray, sent: np.ndarray) -> None:
    assert isinstance(found, np.ndarray)
    assert found.dtype == sent.dtype.newbyteorder("=")
    assert found.dtype.isnative
    assert found.shape == sent.shape
    assert np.array_equal(found, sent)
    assert found.flags.writeable
    assert found.flags.c_contiguous
    assert found.flags.aligned


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("array", arrays(), ids=lambda a: f"{a.dtype.str}{a.shape}")
def test_an_array_comes_back_as_it_was(array: np.ndarray, dialect: Dialect) -> None:
    value, found_dialect = decode(encode({"a": array}, dialect))
    assert found_dialect is dialect
    assert_same(value["a"], array)


@pytest.mark.parametrize("dialect", FOREIGN_PACK)
@pytest.mark.parametrize("array", arrays(), ids=lambda a: f"{a.dtype.str}{a.shape}")
def test_arrays_pass_between_the_real_packers_and_this_codec(array: np.ndarray, dialect: Dialect) -> None:
    value, found_dialect = decode(FOREIGN_PACK[dialect]({"a": array}))
    assert found_dialect is dialect
    assert_same(value["a"], array)
    theirs = FOREIGN_UNPACK[dialect](encode({"a": array}, dialect))["a"]
    assert theirs.dtype == array.dtype
    assert np.array_equal(theirs, array)


@pytest.mark.parametrize("dialect", FOREIGN_PACK)
def test_what_is_encoded_is_byte_for_byte_what_the_real_packers_write(dialect: Dialect) -> None:
    value = {
        "image": np.arange(70_000, dtype=np.uint8).reshape(100, 700),
        "state": np.arange(7.0),
        "nested": [1, -5, 2**40, 1.5, True, None, "text", b"raw", {"scalar": np.float32(2.5)}],
    }
    assert encode(value, dialect) == FOREIGN_PACK[dialect](value)


@pytest.mark.parametrize("array", arrays(), ids=lambda a: f"{a.dtype.str}{a.shape}")
def test_native_arrays_are_read_and_written_as_the_table_says(array: np.ndarray) -> None:
    frame = native_pack({"a": array})
    value, dialect = decode(frame)
    assert dialect is Dialect.NATIVE
    assert_same(value["a"], array)
    assert msgpack.unpackb(encode({"a": array}, dialect)) == msgpack.unpackb(frame)


@pytest.mark.parametrize("pack", [openpi_numpy.packb, msgpack_numpy.packb, native_pack])
@pytest.mark.parametrize(
    "scalar",
    [np.bool_(True), np.int8(-3), np.uint64(2**64 - 1), np.float16(0.5), np.float32(1.25), np.dtype(">i4").type(7)],
    ids=repr,
)
def test_scalars_come_back_as_they_were(scalar: np.generic, pack) -> None:
    value, dialect = decode(pack([scalar]))
    assert type(value[0]) is type(scalar)
    assert value[0] == scalar
    assert decode(encode([scalar], dialect)) == ([scalar], dialect)


@pytest.mark.parametrize("dialect", FOREIGN_PACK)
def test_map_keys_of_arrays_may_be_bin_or_str(dialect: Dialect) -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    as_bin = msgpack.unpackb(FOREIGN_PACK[dialect](array))
    as_str = {key.decode(): value for key, value in as_bin.items()}
    value, found_dialect = decode(msgpack.packb(as_str))
    assert found_dialect.value == (dialect.value[0], str)
    assert_same(value, array)
    fields = msgpack.unpackb(encode(array, found_dialect))
    assert {type(key) for key in fields} == {str}, "and the answer has keys of that type"


def test_ordinary_values_come_back_with_text_keys() -> None:
    value = {b"bin key": 1, "str key": [-1, 2**63, -(2**63), 0.1, None, True, b"raw", "text \u00e9", {}, []]}
    assert decode(msgpack.packb(value)) == (
        {"bin key": 1, "str key": [-1, 2**63, -(2**63), 0.1, None, True, b"raw", "text \u00e9", {}, []]},
        Dialect.OPENPI,
    )
    assert decode(msgpack.packb(1.5, use_single_float=True))[0] == 1.5
    assert decode(msgpack.packb(b"top"))[0] == b"top"
    for number in (127, 128, 255, 256, 65535, 65536, 2**32, 2**64 - 1, -1, -32, -33, -129, -32769, -(2**31) - 1):
        assert decode(msgpack.packb(number))[0] == number
    for size in (31, 32, 255, 256, 65536):
        assert decode(msgpack.packb("x" * size))[0] == "x" * size
        assert decode(msgpack.packb({"k" * size: 1}))[0] == {"k" * size: 1}
        assert decode(msgpack.packb({b"k" * size: 1}))[0] == {"k" * size: 1}
    assert decode(msgpack.packb([0] * 5000))[0] == [0] * 5000
    big_map = {str(i): i for i in range(3000)}
    assert decode(msgpack.packb(big_map))[0] == big_map


def test_the_first_array_decides_the_dialect() -> None:
    first, second = msgpack_numpy.packb(np.zeros(2)), openpi_numpy.packb(np.zeros(2))
    assert decode(b"\x92" + first + second)[1] is Dialect.MSGPACK_NUMPY
    assert decode(b"\x92" + second + first)[1] is Dialect.OPENPI
    assert decode(encode({"no": "array"}, Dialect.NATIVE))[1] is Dialect.OPENPI


def test_a_boolean_array_holds_only_zero_and_one() -> None:
    frame = encode(np.array([True, False, True]), Dialect.OPENPI).replace(b"\x01\x00\x01", b"\x07\x00\xff")
    value, _ = decode(frame)
    assert isinstance(value, np.ndarray)
    assert value.view(np.uint8).tolist() == [1, 0, 1]


def test_decoded_arrays_own_their_memory_and_cost_one_copy() -> None:
    frame = openpi_numpy.packb({"a": np.zeros((4, 180, 320, 3), np.uint8), "b": np.zeros((180, 320))})
    alias = np.frombuffer(frame, np.uint8)
    decode(frame)  # whatever is allocated once
    tracemalloc.start()
    value, _ = decode(frame)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.05 * len(frame)
    assert isinstance(value, dict)
    for array in value.values():
        assert not np.shares_memory(array, alias)
    value["a"][:] = 9
    value["b"][:] = 9
    assert not alias[-1000:-100].any()


def test_texts_in_numpy_dress_and_keys_that_are_numbers_can_be_sent() -> None:
    value = {
        "a": np.array("pick"),
        "b": np.array([["j1", "j2"]]),
        "c": np.array(b"raw"),
        "d": np.str_("e"),
        "f": {1: 2},
    }
    assert msgpack.unpackb(encode(value, Dialect.OPENPI), strict_map_key=False) == {
        "a": "pick", "b": [["j1", "j2"]], "c": "raw", "d": "e", "f": {1: 2},
    }  # fmt: skip


def test_encoding_costs_one_copy() -> None:
    value = {"a": np.zeros((4, 180, 320, 3), np.uint8)}
    tracemalloc.start()
    frame = encode(value, Dialect.OPENPI)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.05 * len(frame)
