"""What can be wrong with a frame, said so that a client's author can act on it, and short whatever the client sent."""

from __future__ import annotations

import numpy as np

_LONGEST_QUOTE = 40

PACK_AS_BIN = "binary data is packed as bin (in Python: use_bin_type=True)"
"""For whoever sent bytes as text, as msgpack did before it told the two apart."""

_COMPRESSED = {
    b"\xff\xd8\xff": "JPEG",
    b"\x00\x00\x00\x0cjP": "JPEG 2000",
    b"/9j/": "JPEG in base64",
    b"iVBORw0": "PNG in base64",
    b"data:image": "a data URL",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"RIFF": "WebP",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\x00": "TIFF",
    b"MM\x00*": "TIFF",
}
_FIELDS_OF_ARRAYS = {"data", "dtype", "type", "shape"}


class CodecError(ValueError):
    """A frame that cannot be decoded, or a value that cannot be encoded.

    str() names the place ("observation/joint_position.shape[1]: ...") and what was expected there.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = ""

    def inside(self, place: str | int) -> CodecError:
        """Put the map key or list index that holds the faulty value in front of the path; returns self."""
        step = f"[{place}]" if isinstance(place, int) else shortened(place)
        joint = "." if self.path and not self.path.startswith("[") else ""
        self.path = f"{step}{joint}{self.path}"
        return self

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


class RequestError(ValueError):
    """A message that decodes but is not a valid request.

    key: the message's key at fault. expected: what belongs there. found: what came, cut short.
    """

    def __init__(self, key: str, expected: str, found: str) -> None:
        super().__init__(f"{key}: expected {expected}, found {found}")
        self.key = key
        self.expected = expected
        self.found = found


def shortened(text: str, longest: int = _LONGEST_QUOTE) -> str:
    """Text on one line: control characters escaped, the tail cut."""
    cut = text if len(text) <= longest else text[: longest - 3] + "..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


def compression(start: bytes) -> str:
    """What to say of a compressed image, by its first bytes; nothing where they begin none that is known."""
    known = (name for beginning, name in _COMPRESSED.items() if start.startswith(beginning))
    name = next(known, "AVIF or HEIC" if start[4:8] == b"ftyp" else None)
    return f" of a compressed image ({name}): decode it before sending" if name else ""


def described(value: object) -> str:
    """A value's kind, and the value itself where that is short: "float32 array of shape (3,)", "text 'abc'"."""
    if isinstance(value, np.ndarray):
        is_row = value.dtype == np.uint8 and 0 < value.size == max(value.shape, default=0)
        kind = compression(value.reshape(-1)[:16].tobytes()) if is_row else ""
        return f"{value.dtype} array of shape {value.shape}{kind}"
    if isinstance(value, np.generic):
        return f"{value.dtype} scalar {value}"
    if isinstance(value, str):
        return f"text {shortened(value)!r}{compression(value[:16].encode())}"
    if isinstance(value, (bytes, memoryview)):
        return f"{len(value)} raw bytes{compression(bytes(value[:16]))}"
    if isinstance(value, dict):
        if len(of_arrays := _FIELDS_OF_ARRAYS & value.keys()) > 1:
            return f"a plain map with {', '.join(sorted(of_arrays))} (an array's map has '__ndarray__' or 'nd' in it)"
        return f"a map of {len(value)} entries"
    if isinstance(value, list):
        return f"a list of {len(value)} entries" + (f", the first {described(value[0])}" if value else "")
    if value is None:
        return "nil"
    if isinstance(value, (bool, int, float)):
        return f"{type(value).__name__} {value}"
    return type(value).__name__
