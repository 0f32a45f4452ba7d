"""Reads one msgpack value out of a frame, without copying the binary data in it and within given limits.

The msgpack package copies each binary value out of the frame before an array can be made of it, and its limits count
neither depth nor the items of a whole message, so that a small frame can take hundreds of times its size in memory.
An observation is megabytes of image data in about a hundred items: few enough for a reader in Python.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import msgpack

from protocol.array_dialects import Dialect, WireArray, array_in, owned
from protocol.errors import PACK_AS_BIN, CodecError, compression, described

_BIG_ENDIAN = {size: struct.Struct(code) for size, code in ((1, ">b"), (2, ">h"), (4, ">i"), (8, ">q"))}
_FLOAT32 = struct.Struct(">f")
_FLOAT64 = struct.Struct(">d")
_BINARY_CODES = (b"\xc4", b"\xc5", b"\xc6")
_STRING_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_UNUSED_BYTE = "byte 0xc1, which msgpack does not use"

# How values that begin with a code from 0xc0 on go on: bytes of a length, further bytes of which the length says
# nothing, and how many values there are for each that the length counts (where it does not count bytes).
_PASSED_OVER = {0xC0: (0, 0, 0), 0xC2: (0, 0, 0), 0xC3: (0, 0, 0)}
_PASSED_OVER |= {code: (size, 0, 0) for code, size in _STRING_LENGTHS.items()}
_PASSED_OVER |= {0xC7: (1, 1, 0), 0xC8: (2, 1, 0), 0xC9: (4, 1, 0), 0xCA: (0, 4, 0), 0xCB: (0, 8, 0)}
_PASSED_OVER |= {first + power: (0, 1 << power, 0) for first in (0xCC, 0xD0) for power in range(4)}
_PASSED_OVER |= {0xD4 + power: (0, 1 + (1 << power), 0) for power in range(5)}
_PASSED_OVER |= {0xDC: (2, 0, 1), 0xDD: (4, 0, 1), 0xDE: (2, 0, 2), 0xDF: (4, 0, 2)}
_MOST_PASSED_OVER_HERE = 1000  # values; a message with more takes longer in Python than it is worth


@dataclass(frozen=True)
class Limits:
    """What a frame may hold.

    max_array_bytes: data of one array. max_array_rank: its number of axes. max_depth: maps and lists inside each
    other. max_items: all values of the frame that are looked at, map keys included. max_text_bytes: one of these that
    is a text.
    """

    max_array_bytes: int = 64 * 2**20
    max_array_rank: int = 8
    max_depth: int = 16
    max_items: int = 10_000
    max_text_bytes: int = 64 * 2**10


class Reader:
    """One pass over one frame. `dialect` is that of the first array or scalar met, None before."""

    def __init__(self, frame: bytes, limits: Limits) -> None:
        self.dialect: Dialect | None = None
        self._frame = frame
        self._view = memoryview(frame)
        self._limits = limits
        self._at = 0
        self._items_left = limits.max_items
        self._depth = 0
        self._passed_over = 0
        self._unpacker: msgpack.Unpacker | None = None
        self._unpacker_at = 0

    def read_whole(self, wanted: Mapping[bytes, str] | None = None) -> object:
        """The frame's one value. Raises CodecError where it is invalid, over a limit, or not all of the frame.

        wanted: of a map these keys alone, by their bytes, whatever else it holds.
        """
        if not self._frame:
            raise CodecError("the frame is empty, expected one msgpack value")
        code = self._frame[0]
        is_map = 0x80 <= code < 0x90 or code in (0xDE, 0xDF)
        if wanted is not None and is_map:
            self._at = 1
            value: object = self._message(code & 0x0F if code < 0x90 else self._unsigned(2 << (code - 0xDE)), wanted)
        else:
            value = self._value()
        if self._at != len(self._frame):
            raise CodecError(f"{len(self._frame) - self._at} bytes follow the message's one msgpack value")
        return bytes(value) if type(value) is memoryview else value

    def _value(self) -> object:
        """The next value. Binary ones are views of the frame: whoever gets one makes it bytes or an array."""
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
            raise CodecError(_UNUSED_BYTE)
        raise CodecError("msgpack extension types and timestamps are not accepted")

    def _message(self, count: int, wanted: Mapping[bytes, str]) -> dict[str, object]:
        """Of the message's own map the values that are wanted. What the others are is nobody's concern."""
        self._enter(2 * count)
        fields: dict[str, object] = {}
        for _ in range(count):
            key = wanted.get(self._binary_key())
            if key is None:
                self._pass_over()
            else:
                self._take_entry(key, fields)
        self._depth -= 1
        return self._ordinary(fields)

    def _map(self, count: int) -> object:
        self._enter(2 * count)
        keys = bytes if self._frame[self._at : self._at + 1] in _BINARY_CODES else str
        fields: dict[str, object] = {}
        for _ in range(count):
            self._take_entry(self._key(), fields)
        self._depth -= 1
        array = array_in(fields, keys, self._limits.max_array_bytes, self._limits.max_array_rank)
        if array is None:
            return self._ordinary(fields)
        self.dialect = self.dialect or array.dialect
        return owned(array.view) if isinstance(array, WireArray) else array.value

    def _take_entry(self, key: str, fields: dict[str, object]) -> None:
        if key in fields:
            raise CodecError("this key occurs twice in its map").inside(key)
        try:
            fields[key] = self._value()
        except CodecError as error:
            raise error.inside(key) from None

    def _ordinary(self, fields: dict[str, object]) -> dict[str, object]:
        """A map that stands for no array: its binary values are not views of the frame."""
        for key, value in fields.items():
            if type(value) is memoryview:
                fields[key] = bytes(value)
        return fields

    def _list(self, count: int) -> list[object]:
        self._enter(count)
        items: list[object] = []
        for i in range(count):
            try:
                item = self._value()
                items.append(bytes(item) if type(item) is memoryview else item)
            except CodecError as error:
                raise error.inside(i) from None
        self._depth -= 1
        return items

    def _enter(self, items: int) -> None:
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

    def _binary_key(self) -> bytes:
        """A key of the message as bytes; empty where it is neither text nor binary."""
        code = self._frame[self._at] if self._at < len(self._frame) else self._cut_short()
        if 0xA0 <= code < 0xC0:
            self._at += 1
            return bytes(self._take(code & 0x1F))
        if code in _STRING_LENGTHS:
            self._at += 1
            return bytes(self._take(self._unsigned(_STRING_LENGTHS[code])))
        self._pass_over()
        return b""

    def _pass_over(self) -> None:
        """Go behind the next value without looking at it any closer than to find its end."""
        frame, at, left = self._frame, self._at, 1
        while left:
            if self._passed_over == _MOST_PASSED_OVER_HERE:
                self._pass_over_quickly()
                return
            self._passed_over += 1
            left -= 1
            code = frame[at] if at < len(frame) else self._cut_short()
            at += 1
            if code < 0x80 or code >= 0xE0:
                continue
            if code < 0xA0:
                left += (code & 0x0F) * (2 if code < 0x90 else 1)
            elif code < 0xC0:
                at += code & 0x1F
            elif code == 0xC1:
                raise CodecError(_UNUSED_BYTE)
            else:
                length_bytes, fixed, items = _PASSED_OVER[code]
                length = int.from_bytes(frame[at : at + length_bytes], "big")
                at += length_bytes + fixed + (0 if items else length)
                left += items * length
        self._at = at
        if at > len(frame):
            self._cut_short()

    def _pass_over_quickly(self) -> None:
        """The same by msgpack's own unpacker, which needs a copy of what is left of the frame but no time."""
        if self._unpacker is None:
            self._unpacker = msgpack.Unpacker(raw=True, max_buffer_size=len(self._frame))
            self._unpacker.feed(self._view[self._at :])
        else:
            self._unpacker.read_bytes(self._at - self._unpacker_at)
        before = self._unpacker.tell()
        try:
            self._unpacker.skip()
        except msgpack.OutOfData:
            self._cut_short()
        except (ValueError, msgpack.UnpackException) as error:
            raise CodecError(f"a value that msgpack cannot read: {type(error).__name__}") from None
        self._unpacker_at = self._at = self._at + self._unpacker.tell() - before

    def _text(self, size: int) -> str:
        if size > self._limits.max_text_bytes:
            most = self._limits.max_text_bytes
            kind = compression(self._frame[self._at : self._at + 16])
            raise CodecError(f"a text of {size} bytes{kind}, more than the {most} allowed; {PACK_AS_BIN}")
        start = self._at
        end = self._at = start + size
        if end > len(self._frame):
            self._cut_short()
        try:
            return self._frame[start:end].decode()
        except UnicodeDecodeError:
            raise CodecError(f"text that is not valid UTF-8; {PACK_AS_BIN}") from None

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
