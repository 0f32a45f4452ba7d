"""bytes <-> Python and NumPy: one WebSocket frame is one msgpack value, arrays in one of three dialects. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

import msgpack
import numpy as np

from protocol.array_dialects import Dialect, array_fields, scalar_fields
from protocol.errors import CodecError, described
from protocol.msgpack_reader import Limits, Reader

__all__ = ["CodecError", "Dialect", "Limits", "decode", "encode"]

_DEEPEST = 64


def decode(
    frame: bytes,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    wanted: Mapping[bytes, str] | None = None,
) -> tuple[object, Dialect]:
    """The value in a frame, and the dialect of its first array or NumPy scalar (OPENPI where it has none).

    Map keys come out as str, arrays as np.ndarray, NumPy scalars as np.generic, and text in either as str. Arrays are
    writable, C-contiguous, in native byte order and have memory of their own: their data is copied once.
    wanted: keys of the message's map, by their UTF-8 bytes, that are read. What else the map holds may be anything.
    Raises CodecError, and nothing else, where the frame is invalid or over a limit.
    """
    reader = Reader(bytes(frame), limits)
    return reader.read_whole(wanted), reader.dialect or Dialect.OPENPI


def encode(value: object, dialect: Dialect) -> bytes:
    """A value as one frame: maps, lists, tuples, text, bytes, numbers, booleans, None, NumPy values.

    Array data is copied once, into the result (twice where the array is not C-contiguous). NumPy's texts become texts.
    Raises CodecError, which names the place, where the value holds anything else.
    """
    parts: list[bytes | memoryview] = []
    _write(value, dialect, msgpack.Packer(), parts, 0)
    return b"".join(parts)


def _write(
    value: object, dialect: Dialect, packer: msgpack.Packer, parts: list[bytes | memoryview], depth: int
) -> None:
    """Append a value's pieces. msgpack writes everything but array data, which is joined in from where it lies."""
    if depth > _DEEPEST:
        raise CodecError(f"maps and lists nest deeper than {_DEEPEST} levels")
    if isinstance(value, dict):
        parts.append(packer.pack_map_header(len(value)))
        for key, item in value.items():
            if not isinstance(key, (str, bytes, int, float, type(None))):
                raise CodecError(f"expected a text or a number as map key, found {described(key)}")
            parts.append(packer.pack(key))
            _write_inside(key if isinstance(key, str) else repr(key), item, dialect, packer, parts, depth)
    elif isinstance(value, (list, tuple)):
        parts.append(packer.pack_array_header(len(value)))
        for index, item in enumerate(value):
            _write_inside(index, item, dialect, packer, parts, depth)
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "US":
        texts = np.char.decode(np.asarray(value)) if value.dtype.kind == "S" else value
        _write(texts.tolist(), dialect, packer, parts, depth)
    elif isinstance(value, np.ndarray):
        _write(array_fields(value, dialect), dialect, packer, parts, depth)
    elif isinstance(value, memoryview):
        parts.append(_binary_header(value.nbytes))
        parts.append(value)
    elif isinstance(value, np.generic) and not isinstance(value, (float, str, bytes)):
        _write(scalar_fields(value, dialect), dialect, packer, parts, depth)
    else:
        try:
            parts.append(packer.pack(value))
        except (TypeError, ValueError, OverflowError) as error:
            raise CodecError(f"cannot be sent: {error}") from error


def _write_inside(
    place: str | int,
    value: object,
    dialect: Dialect,
    packer: msgpack.Packer,
    parts: list[bytes | memoryview],
    depth: int,
) -> None:
    try:
        _write(value, dialect, packer, parts, depth + 1)
    except CodecError as error:
        raise error.inside(place) from error.__cause__


def _binary_header(size: int) -> bytes:
    if size < 2**8:
        return b"\xc4" + size.to_bytes(1, "big")
    if size < 2**16:
        return b"\xc5" + size.to_bytes(2, "big")
    if size < 2**32:
        return b"\xc6" + size.to_bytes(4, "big")
    raise CodecError(f"{size} bytes of binary data, more than msgpack can hold")
