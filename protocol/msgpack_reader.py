"""Reads one msgpack value out of a frame, without copying the binary data in it and within given limits.

The msgpack package copies each binary value out of the frame before an array can be made of it, and its limits count
neither depth nor the items of a whole message, so that a small frame can take hundreds of times its size in memory.
An observation is megabytes of image data in about a hundred items: few enough for a reader in Python.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from protocol.array_dialects import Dialect, WireArray, array_in, owned
from protocol.errors import CodecError, described

_BIG_ENDIAN = {size: struct.Struct(code) for size, code in ((1, ">b"), (2, ">h"), (4, ">i"), (8, ">q"))}
_FLOAT32 = struct.Struct(">f")
_FLOAT64 = struct.Struct(">d")


@dataclass(frozen=True)
class Limits:
    """What a frame may hold.

    max_array_bytes: data of one array. max_array_rank: its number of axes. max_depth: maps and lists inside each
    other. max_items: all values of the frame, map keys included. max_string_bytes: one text, map key, or binary value
    that is no array.
    """

    max_array_bytes: int = 64 * 2**20
    max_array_rank: int = 8
    max_depth: int = 16
    max_items: int = 10_000
    max_string_bytes: int = 64 * 2**10


class Reader:
    """One pass over one frame. `dialect` is that of the first array or scalar met, None before.

    `arrays` lists, for each array met, where in the frame its data starts and how it lies there.
    """

    def __init__(self, frame: bytes, limits: Limits) -> None:
        self.dialect: Dialect | None = None
        self.arrays: list[tuple[int, np.ndarray]] = []
        self._frame = frame
        self._view = memoryview(frame)
        self._limits = limits
        self._at = 0
        self._items_left = limits.max_items
        self._depth = 0

    def read_whole(self) -> object:
        """The frame's one value. Raises CodecError where it is invalid, over a limit, or not all of the frame."""
        if not self._frame:
            raise CodecError("the frame is empty, expected one msgpack value")
        value = self._owned(self._value())
        if self._at != len(self._frame):
            raise CodecError(f"{len(self._frame) - self._at} bytes follow the message's one msgpack value")
        return value

    def _value(self) -> object:
        """The next value. Binary ones are views of the frame: the container that gets one decides (see _owned)."""
        at = self._at
        if at >= len(self._frame):
            self._cut_short()
        code = self._frame[at]
        self._at = at + 1
        if code < 0x80:
            return code
        if code < 0x90:
            return self._map(code & 0x0F)
        if code < 0xA0:
            return self._list(code & 0x0F)
        if code < 0xC0:
            return self._text(code & 0x1F)
        if code >= 0xE0:
            return code - 0x100
        if code == 0xC0:
            return None
        if code in (0xC2, 0xC3):
            return code == 0xC3
        if 0xC4 <= code <= 0xC6:
            return self._take(self._unsigned(1 << (code - 0xC4)))
        if code == 0xCA:
            return _FLOAT32.unpack(self._take(4))[0]
        if code == 0xCB:
            return _FLOAT64.unpack(self._take(8))[0]
        if 0xCC <= code <= 0xCF:
            return self._unsigned(1 << (code - 0xCC))
        if 0xD0 <= code <= 0xD3:
            size = 1 << (code - 0xD0)
            return _BIG_ENDIAN[size].unpack(self._take(size))[0]
        if 0xD9 <= code <= 0xDB:
            return self._text(self._unsigned(1 << (code - 0xD9)))
        if 0xDC <= code <= 0xDD:
            return self._list(self._unsigned(2 << (code - 0xDC)))
        if 0xDE <= code <= 0xDF:
            return self._map(self._unsigned(2 << (code - 0xDE)))
        if code == 0xC1:
            raise CodecError("byte 0xc1, which msgpack does not use")
        raise CodecError("msgpack extension types and timestamps are not accepted")

    def _map(self, count: int) -> object:
        self._enter(count, 2 * count)
        fields: dict[str, object] = {}
        for _ in range(count):
            key = self._key()
            if key in fields:
                raise CodecError("this key occurs twice in its map").inside(key)
            try:
                fields[key] = self._value()
            except CodecError as error:
                raise error.inside(key) from None
            if key == "data":
                data_end = self._at
        self._depth -= 1
        array = array_in(fields, self._limits.max_array_bytes, self._limits.max_array_rank)
        if array is not None:
            self.dialect = self.dialect or array.dialect
            if not isinstance(array, WireArray):
                return array.value
            self.arrays.append((data_end - array.view.nbytes, array.view))
            return owned(array.view)
        for key, value in fields.items():
            if type(value) is memoryview:
                try:
                    fields[key] = self._owned(value)
                except CodecError as error:
                    raise error.inside(key) from None
        return fields

    def _list(self, count: int) -> list[object]:
        self._enter(count, count)
        items: list[object] = []
        for i in range(count):
            try:
                items.append(self._owned(self._value()))
            except CodecError as error:
                raise error.inside(i) from None
        self._depth -= 1
        return items

    def _enter(self, count: int, items: int) -> None:
        """One container deeper; refused before anything is built for it."""
        self._depth += 1
        self._items_left -= items
        if self._depth > self._limits.max_depth:
            raise CodecError(f"maps and lists nest deeper than the {self._limits.max_depth} levels allowed")
        if items > len(self._frame) - self._at:
            self._cut_short()
        if self._items_left < 0:
            raise CodecError(f"the message holds more than the {self._limits.max_items} values allowed")

    def _key(self) -> str:
        """A map key: nearly always a short text or binary value, which is read here without further ado."""
        frame, at = self._frame, self._at
        code = frame[at] if at < len(frame) else self._cut_short()
        if 0xA0 <= code < 0xC0:
            self._at = at + 1
            return self._text(code & 0x1F)
        if code in (0xC4, 0xD9) and at + 1 < len(frame):
            self._at = at + 2
            return self._text(frame[at + 1])
        key = self._value()
        if type(key) is memoryview:
            self._at -= key.nbytes
            return self._text(key.nbytes)
        if type(key) is str:
            return key
        raise CodecError(f"expected a text as map key, found {described(key)}")

    def _text(self, size: int) -> str:
        self._check_string_size(size)
        start = self._at
        end = self._at = start + size
        if end > len(self._frame):
            self._cut_short()
        try:
            return self._frame[start:end].decode()
        except UnicodeDecodeError:
            raise CodecError("text that is not valid UTF-8") from None

    def _owned(self, value: object) -> object:
        """The value itself, or a copy where it is a view of the frame."""
        if type(value) is not memoryview:
            return value
        self._check_string_size(value.nbytes)
        return bytes(value)

    def _check_string_size(self, size: int) -> None:
        if size > self._limits.max_string_bytes:
            raise CodecError(f"a text or binary value of {size} bytes, more than {self._limits.max_string_bytes}")

    def _unsigned(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def _take(self, size: int) -> memoryview:
        start = self._at
        end = start + size
        if end > len(self._frame):
            self._cut_short()
        self._at = end
        return self._view[start:end]

    def _cut_short(self) -> NoReturn:
        raise CodecError(f"the frame ends in the middle of a value, after {len(self._frame)} bytes")
