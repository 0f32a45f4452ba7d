"""The part of a message that stays the same from one observation of a robot to the next: all but the array data."""

from __future__ import annotations

import numpy as np

from protocol.array_dialects import Dialect, owned

_LONGEST_LITERAL = 64 * 2**10  # what a connection may make the server remember
_IMMUTABLE = (str, bytes, int, float, bool, type(None), np.generic)


class Layout:
    """A flat map's bytes with holes where its arrays' data lies.

    A frame of the same length and with the same bytes around the holes is the same message with other data: what was
    checked in the first frame holds for it too.
    """

    def __init__(self, frame: bytes, value: dict[str, object], holes: list[tuple[int, np.ndarray]], dialect: Dialect):
        self.dialect = dialect
        self._size = len(frame)
        keys = [key for key, item in value.items() if isinstance(item, np.ndarray)]
        self._template = value | dict.fromkeys(keys)
        starts = [0] + [start + view.nbytes for start, view in holes]
        ends = [start for start, _ in holes] + [len(frame)]
        self._literals = [(start, frame[start:end]) for start, end in zip(starts, ends)]
        # One copy of the frame, shared by its uint8 arrays, is quicker than one for each; wider types need alignment.
        images = [view.dtype == np.uint8 for _, view in holes]
        image_bytes = sum(view.nbytes for (_, view), is_image in zip(holes, images) if is_image)
        self._shares = 2 * image_bytes > len(frame)
        self._holes = [
            (key, start, view.dtype, view.shape, self._shares and is_image)
            for key, (start, view), is_image in zip(keys, holes, images)
        ]

    @classmethod
    def of(cls, frame: bytes, value: object, holes: list[tuple[int, np.ndarray]], dialect: Dialect) -> Layout | None:
        """The layout of a frame that was just read; None where its value is not a flat map or has little array data.

        holes: of each array in the frame, in order: where its data starts, and a view of it there.
        """
        literal = len(frame) - sum(view.nbytes for _, view in holes)
        if not isinstance(value, dict) or literal > _LONGEST_LITERAL:
            return None
        if not all(isinstance(item, (*_IMMUTABLE, np.ndarray)) for item in value.values()):
            return None
        return cls(frame, value, holes, dialect)

    def decode(self, frame: bytes) -> dict[str, object] | None:
        """The value in a frame of this layout, as reading the frame would give it; None where the layout is another."""
        if len(frame) != self._size:
            return None
        for start, literal in self._literals:
            if not frame.startswith(literal, start):
                return None
        value: dict[str, object] = self._template.copy()
        copy = bytearray(frame) if self._shares else frame
        for key, start, dtype, shape, shares in self._holes:
            array: np.ndarray = np.ndarray(shape, dtype, copy, start)
            value[key] = array if shares else owned(array)
        return value
