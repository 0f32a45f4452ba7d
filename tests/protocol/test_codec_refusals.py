"""What the codec must refuse, frames made by hand as no packer would write them."""

import os

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from openpi_client import msgpack_numpy as openpi_numpy

from protocol.codec import CodecError, Dialect, Limits, decode, encode


def openpi_array(**changes: object) -> bytes:
    fields = {"__ndarray__": True, "data": bytes(8), "dtype": "<f4", "shape": [2]}
    return msgpack.packb({key: value for key, value in {**fields, **changes}.items() if value is not ...})


def numpy_array(**changes: object) -> bytes:
    fields = {"nd": True, "type": "<f4", "kind": b"", "shape": [2], "data": bytes(8)}
    return msgpack.packb({key: value for key, value in {**fields, **changes}.items() if value is not ...})


def openpi_scalar(dtype: str, data: object) -> bytes:
    return msgpack.packb({"__npgeneric__": True, "data": data, "dtype": dtype})


BAD_FRAMES = {
    "empty": (b"", "frame is empty"),
    "cut short": (b"\x92\x01", "ends in the middle"),
    "trailing bytes": (b"\x01\x02", "1 bytes follow"),
    "unused code": (b"\xc1", "0xc1"),
    "extension": (msgpack.packb({"a": msgpack.ExtType(5, b"x")}), "^a: msgpack extension types"),
    "timestamp": (msgpack.packb(msgpack.Timestamp(1)), "timestamps"),
    "bad utf8": (b"\x81\xa1a\xa2\xff\xfe", "^a: .*UTF-8"),
    "bad utf8 key": (b"\x81\xc4\x01\xff\x01", "UTF-8"),
    "integer key": (b"\x81\x01\x01", "text as map key, found int 1"),
    "list key": (b"\x81\x90\x01", "text as map key, found a list"),
    "map key": (b"\x81\x80\x01", "text as map key, found a map"),
    "duplicate key": (b"\x82\xa1a\x01\xa1a\x02", "^a: this key occurs twice"),
    "bin and str key": (b"\x82\xa1a\x01\xc4\x01a\x02", "^a: this key occurs twice"),
    "long list announced": (b"\xdd\xff\xff\xff\xff", "ends in the middle"),
    "long map announced": (b"\xdf\xff\xff\xff\xff", "ends in the middle"),
    "long bin announced": (b"\xc6\xff\xff\xff\xff", "ends in the middle"),
    "object dtype": (openpi_array(dtype="|O"), "^dtype: expected a boolean, integer or float"),
    "void dtype": (openpi_array(dtype="|V8"), "^dtype: expected"),
    "complex dtype": (openpi_array(dtype="<c8", shape=[1]), "^dtype: expected"),
    "datetime dtype": (openpi_array(dtype="<M8[ns]", shape=[1]), "^dtype: expected"),
    "texts of no length": (openpi_array(dtype="<U0", data=b""), "^data: shape .* of '<U0' needs 0 bytes"),
    "text of another size": (openpi_array(dtype="<U3", shape=[]), "^data: shape .* of '<U3' needs 12 bytes, found 8"),
    "text of no characters": (
        openpi_array(dtype="<U2", shape=[], data=b"\xff" * 8),
        "^data: text that is not valid utf-32",
    ),
    "extended float dtype": (openpi_array(dtype="<f16"), "^dtype: expected"),
    "comma dtype": (openpi_array(dtype="f4,f4", shape=[1]), "^dtype: expected"),
    "long dtype": (openpi_array(dtype="f" * 5000), "^dtype: .{1,150}$"),
    "structured type": (numpy_array(kind=b"V", type=[["a", "<f4"]]), "^type: expected .* found a list"),
    "kind without type": (numpy_array(kind=b"O"), "^kind: expected 'f'"),
    "kind of another type": (numpy_array(kind="i"), "^kind: expected 'f'"),
    "number as kind": (numpy_array(kind=3), "^kind: expected text"),
    "number as nd": (numpy_array(nd=1), "^nd: expected true or false, found int 1"),
    "no dtype": (openpi_array(dtype=...), "no 'dtype'"),
    "no data": (openpi_array(data=...), "no 'data'"),
    "no shape": (numpy_array(shape=...), "no 'shape'"),
    "text as data": (openpi_array(data="12345678"), "^data: expected raw bytes .*use_bin_type=True"),
    "bytes as text": (
        openpi_array(data=b"\xff" * 8).replace(b"\xc4\x08", b"\xa8"),
        "^data: .* UTF-8; .*use_bin_type=True",
    ),
    "many bytes as text": (
        msgpack.packb({"data": bytes(10**5)}, use_bin_type=False),
        "^data: a text of 100000 bytes, more than the 65536 allowed; .*use_bin_type=True",
    ),
    "number as shape": (openpi_array(shape=2), "^shape: expected a list of sizes"),
    "raw bytes as shape": (openpi_array(shape=b"12"), "^shape: expected a list of sizes, found 2 raw bytes$"),
    "raw bytes as scalar": (
        openpi_scalar("<f4", b"1234"),
        "^data: expected .*, found 4 raw bytes$",
    ),
    "negative size": (openpi_array(shape=[-2]), r"^shape\[0\]: expected a size"),
    "float size": (openpi_array(shape=[2.0]), r"^shape\[0\]: expected a size"),
    "boolean size": (openpi_array(shape=[2, True]), r"^shape\[1\]: expected a size"),
    "too little data": (openpi_array(shape=[3]), "^data: shape .* needs 12 bytes, found 8"),
    "too much data": (openpi_array(shape=[1]), "^data: shape .* needs 4 bytes, found 8"),
    "overflowing shape": (openpi_array(shape=[2**33, 2**33]), "^data: shape .* needs"),
    "wrapping shape": (openpi_array(shape=[2**63, 2**63, 4]), "^data: shape .* needs"),
    "vast empty shape": (openpi_array(shape=[0, 2**62, 2**62], data=b""), "^shape: .* too large"),
    "scalar of wrong size": (numpy_array(nd=False), "^data: expected 4 bytes for a '<f4', found 8"),
    "integer out of range": (openpi_scalar("|i1", 300), r"^data: expected a value of dtype '\|i1', found int 300"),
    "float as integer": (openpi_scalar("<i4", 1.5), "^data: expected a value of dtype '<i4'"),
    "text as float": (openpi_scalar("<f4", "1"), "^data: expected a value of dtype '<f4'"),
    "number as boolean": (openpi_scalar("|b1", 1), "^data: expected a value"),
    "boolean as float": (openpi_scalar("<f8", True), "^data: expected a value"),
    "complex scalar": (openpi_scalar("<c8", 1.0), "^dtype: expected"),
}


@pytest.mark.parametrize(("frame", "problem"), BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_a_bad_frame_is_refused_with_the_reason(frame: bytes, problem: str) -> None:
    with pytest.raises(CodecError, match=problem):
        decode(frame)


def test_the_message_gives_the_place_of_the_fault() -> None:
    frame = msgpack.packb({"outer": [0, {"inner": msgpack.unpackb(openpi_array(shape=[1, -1]))}]})
    with pytest.raises(CodecError, match=r"^outer\[1\]\.inner\.shape\[1\]: expected a size, found int -1$"):
        decode(frame)


def test_the_message_is_short_and_on_one_line_whatever_came() -> None:
    for key in ("k" * 60_000, "\n\r\x1b[31m" * 2000, "\u2028" * 2000):
        with pytest.raises(CodecError) as caught:
            decode(msgpack.packb({key: msgpack.ExtType(1, b"")}))
        assert len(str(caught.value)) < 400
        assert str(caught.value).isprintable()


def test_every_truncation_of_a_frame_is_refused() -> None:
    frame = openpi_numpy.packb(
        {"a": np.zeros(3), "long": "x" * 300, "n": [2**40, -200, 1.5], "s": np.float32(1), "b": bytes(300)}
    )
    for size in range(len(frame)):
        with pytest.raises(CodecError):
            decode(frame[:size])


class Boom:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (os.environ["BOOM"],)


def test_a_pickle_inside_is_never_opened(tmp_path, monkeypatch) -> None:
    target = tmp_path / "boom"
    monkeypatch.setenv("BOOM", str(target))
    frame = msgpack_numpy.packb(np.array([Boom()], dtype=object))
    with pytest.raises(CodecError, match="dtype"):
        decode(frame)
    assert not target.exists()
    msgpack_numpy.unpackb(frame)  # the trap itself works
    assert target.exists()


@pytest.mark.parametrize(
    ("value", "limits", "problem"),
    [
        (np.zeros(100, np.uint8), Limits(max_array_bytes=99), "array of 100 bytes, more than the 99"),
        (np.zeros((1, 1, 1)), Limits(max_array_rank=2), "rank 3, more than the 2"),
        ([[[]]], Limits(max_depth=2), "deeper than the 2 levels"),
        ([0] * 11, Limits(max_items=10), "more than the 10 values"),
        ({str(i): i for i in range(6)}, Limits(max_items=10), "more than the 10 values"),
        ([[0] * 5, [0] * 5], Limits(max_items=10), "more than the 10 values"),
        ("x" * 33, Limits(max_text_bytes=32), "33 bytes, more than the 32"),
        ({"k" * 33: 1}, Limits(max_text_bytes=32), "33 bytes, more than the 32"),
        ({b"k" * 300: 1}, Limits(max_text_bytes=32), "300 bytes, more than the 32"),
    ],
)
def test_limits_hold_and_what_just_fits_them_passes(value: object, limits: Limits, problem: str) -> None:
    frame = openpi_numpy.packb(value)
    with pytest.raises(CodecError, match=problem):
        decode(frame, limits)
    decode(frame)


def test_a_frame_nested_without_end_is_refused_by_depth() -> None:
    for opening in (b"\x91", b"\x81\xa1a"):
        with pytest.raises(CodecError, match="deeper"):
            decode(opening * 1_000_000)


def test_a_full_size_message_passes_the_default_limits() -> None:
    array = np.zeros((64 * 2**20 - 4096,), np.uint8)
    assert decode(encode({"a": array}, Dialect.OPENPI))[0]["a"].nbytes == array.nbytes


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({(1,): 2}, "text or a number as map key"),
        ({"a": object()}, "^a: cannot be sent"),
        ({"a": [1, {"b": 1j}]}, r"^a\[1\]\.b: cannot be sent"),
        ({"a": 2**64}, "cannot be sent"),
        ({"a": "\ud800"}, "cannot be sent"),
        (np.array([object()]), "dtype object cannot be sent"),
        (np.zeros(2, complex), "cannot be sent"),
        (np.zeros(2, "M8[s]"), "cannot be sent"),
        (np.complex64(1), "cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_refused(value: object, problem: str) -> None:
    with pytest.raises(CodecError, match=problem):
        encode(value, Dialect.OPENPI)


def test_a_value_inside_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CodecError, match="deeper"):
        encode(loop, Dialect.OPENPI)


@pytest.mark.parametrize("further", ["zzz", "data2", ""])
@pytest.mark.parametrize("pack", [openpi_array, numpy_array])
def test_what_stands_for_an_array_and_carries_another_is_read_or_refused(pack: object, further: str) -> None:
    """Also where maps alike have been read before, in the same frame and in others."""
    outer = msgpack.unpackb(pack())  # type: ignore[operator]
    carrying = outer | {further: outer}
    carried = dict.fromkeys(outer, outer) | {key: outer[key] for key in outer if key in ("__ndarray__", "nd")}
    scalar = msgpack.unpackb(openpi_scalar("<f4", 1.5)) | {further: outer}
    for value in ([outer, carrying, outer], [carrying, outer], [outer, carried], [outer, scalar], [scalar, outer]):
        try:
            read, _ = decode(msgpack.packb({"a": value}))
        except CodecError:
            continue
        assert [np.shape(item) for item in read["a"]] == [() if item is scalar else (2,) for item in value]  # type: ignore[index]
