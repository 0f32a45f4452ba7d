"""bytes <-> Python and NumPy: one WebSocket frame is one msgpack value, arrays in one of three dialects. No I/O."""

from __future__ import annotations

import msgpack
import numpy as np

from protocol.array_dialects import Dialect, array_fields, scalar_fields
from protocol.errors import CodecError, described
from protocol.layout import Layout
from protocol.msgpack_reader import Limits, Reader

__all__ = ["CodecError", "Decoder", "Dialect", "Limits", "decode", "encode"]

_DEEPEST = 64


def decode(frame: bytes, limits: Limits = Limits()) -> tuple[object, Dialect]:  # noqa: B008 (frozen)
    """The value in a frame, and the dialect of its first array or NumPy scalar (OPENPI where it has none).

    Map keys come out as str, arrays as np.ndarray and NumPy scalars as np.generic. Arrays are writable, C-contiguous,
    in native byte order and have memory of their own: their data is copied once.
    Raises CodecError, and nothing else, where the frame is invalid or over a limit.
    """
    reader = Reader(bytes(frame), limits)
    return reader.read_whole(), reader.dialect or Dialect.OPENPI


class Decoder:
    """Decodes the frames of one connection: as `decode` does, and faster where a frame repeats the last one's layout.

    A robot's observations differ in array data alone. Where all other bytes of a frame are those of the frame before,
    nothing but the data has to be looked at.

    repeated: whether that was so for the last frame decoded.
    """

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008 (frozen)
        self.repeated = False
        self._limits = limits
        self._layout: Layout | None = None

    def decode(self, frame: bytes) -> tuple[object, Dialect]:
        """As the function `decode`."""
        frame = bytes(frame)
        if self._layout is not None:
            repeated = self._layout.decode(frame)
            if repeated is not None:
                self.repeated = True
                return repeated, self._layout.dialect
        self.repeated = False
        reader = Reader(frame, self._limits)
        value, dialect = reader.read_whole(), reader.dialect or Dialect.OPENPI
        self._layout = Layout.of(frame, value, reader.arrays, dialect)
        return value, dialect


def encode(value: object, dialect: Dialect) -> bytes:
    """A value as one frame: maps with text keys, lists, tuples, text, bytes, numbers, booleans, None, NumPy values.

    Array data is copied once, into the result (twice where the array is not C-contiguous).
    Raises CodecError where the value holds anything else.
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
            if not isinstance(key, (str, bytes)):
                raise CodecError(f"expected a text as map key, found {described(key)}")
            parts.append(packer.pack(key))
            _write(item, dialect, packer, parts, depth + 1)
    elif isinstance(value, (list, tuple)):
        parts.append(packer.pack_array_header(len(value)))
        for item in value:
            _write(item, dialect, packer, parts, depth + 1)
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


def _binary_header(size: int) -> bytes:
    if size < 2**8:
        return b"\xc4" + size.to_bytes(1, "big")
    if size < 2**16:
        return b"\xc5" + size.to_bytes(2, "big")
    if size < 2**32:
        return b"\xc6" + size.to_bytes(4, "big")
    raise CodecError(f"{size} bytes of binary data, more than msgpack can hold")
