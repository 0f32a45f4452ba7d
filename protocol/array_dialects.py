"""The three ways in which clients put NumPy arrays and scalars into msgpack maps, each with keys as bin or as str.

Only booleans, integers, floats and single texts pass, by a table of their names: no client text ever reaches np.dtype,
and nothing is ever unpickled.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from protocol.errors import PACK_AS_BIN, CodecError, described


class Dialect(enum.Enum):
    """Whose msgpack maps stand for arrays, and the type of the maps' keys.

    JavaScript's libraries write keys as str and cannot read any others.
    """

    OPENPI = ("openpi", bytes)  # openpi_client.msgpack_numpy
    OPENPI_TEXT_KEYS = ("openpi", str)
    MSGPACK_NUMPY = ("msgpack-numpy", bytes)  # the PyPI package of that name
    MSGPACK_NUMPY_TEXT_KEYS = ("msgpack-numpy", str)
    NATIVE = ("native", str)  # vLLM-Omni
    NATIVE_BINARY_KEYS = ("native", bytes)

    @property
    def keys(self) -> type[bytes] | type[str]:
        """Type of the keys of maps that stand for arrays."""
        return self.value[1]


_CODES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
_DTYPES = {order + code: np.dtype(order + code) for order in ("", "|", "=", "<", ">") for code in _CODES}
_EXPECTED_DTYPE = "a boolean, integer or float dtype such as '|u1' or '<f4'"
_MOST_TEXTS = 10_000  # each takes fifty bytes and more, however short it is
_TEXT_DTYPE = re.compile(r"([<>=|]?)([US])([0-9]{1,7})")


class WireArray(NamedTuple):
    """An array where it lies in a frame: a read-only view of it, in the byte order that was sent."""

    view: np.ndarray
    dialect: Dialect


class WireScalar(NamedTuple):
    """A NumPy scalar that came in a frame; texts as they are, a list of them where there were several or none."""

    value: np.generic | str | list[str]
    dialect: Dialect


def array_in(
    fields: Mapping[str, object], keys: type[bytes] | type[str], max_bytes: int, max_rank: int
) -> WireArray | WireScalar | None:
    """What a decoded map stands for; None where it is an ordinary map.

    fields: keys as str, binary values as memoryviews of the frame. keys: type that the keys had there.
    Raises CodecError where the map claims to be an array or a scalar and is not a valid one.
    """
    if "__ndarray__" in fields or "__npgeneric__" in fields:
        dialect = Dialect(("openpi", keys))
        if (text := _texts(fields, "dtype", max_rank)) is not None:
            return WireScalar(text, dialect)
        if "__ndarray__" in fields:
            return WireArray(_array(fields, "dtype", max_bytes, max_rank), dialect)
        return WireScalar(_openpi_scalar(fields), dialect)
    if "nd" in fields:
        kind = _text(fields, "kind") if "kind" in fields else ""
        dialect = Dialect(("native" if kind else "msgpack-numpy", keys))
        if (text := _texts(fields, "type", max_rank)) is not None:
            return WireScalar(text, dialect)
        dtype = _dtype(fields, "type")
        if kind and kind != dtype.kind:
            raise CodecError(f"expected {dtype.kind!r} as dtype {dtype.str!r} says, found {kind!r}").inside("kind")
        if fields["nd"] is True:
            return WireArray(_array(fields, "type", max_bytes, max_rank), dialect)
        if fields["nd"] is False:
            return WireScalar(_raw_scalar(fields, dtype), dialect)
        raise CodecError(f"expected true or false, found {described(fields['nd'])}").inside("nd")
    return None


def owned(view: np.ndarray) -> np.ndarray:
    """A writable C-contiguous copy in native byte order, with memory of its own."""
    if view.dtype.kind == "b":
        return np.asarray(view.view(np.uint8) != 0)  # any non-zero byte is true; NumPy itself counts on 0 and 1
    return view.copy() if view.dtype.isnative else view.astype(view.dtype.newbyteorder("="))


def array_fields(array: np.ndarray, dialect: Dialect) -> dict[bytes | str, object]:
    """The map that stands for an array; its data is a view where the array is C-contiguous. Raises CodecError."""
    _check_encodable(array.dtype)
    data = (array if array.flags.c_contiguous else array.copy(order="C")).data
    family, keys = dialect.value
    return _with_keys(keys, _ARRAY_FIELDS[family](array.dtype, list(array.shape), data))


def scalar_fields(scalar: np.generic, dialect: Dialect) -> dict[bytes | str, object]:
    """The map that stands for a NumPy scalar. Raises CodecError."""
    _check_encodable(scalar.dtype)
    family, keys = dialect.value
    return _with_keys(keys, _SCALAR_FIELDS[family](scalar))


_ARRAY_FIELDS: dict[str, Callable[[np.dtype, list[int], memoryview], dict[str, object]]] = {
    "openpi": lambda dtype, shape, data: {"__ndarray__": True, "data": data, "dtype": dtype.str, "shape": shape},
    "msgpack-numpy": lambda dtype, shape, data: {
        "nd": True,
        "type": dtype.str,
        "kind": b"",
        "shape": shape,
        "data": data,
    },
    "native": lambda dtype, shape, data: {
        "nd": True,
        "type": dtype.str,
        "kind": dtype.kind,
        "shape": shape,
        "data": data,
    },
}

_SCALAR_FIELDS: dict[str, Callable[[np.generic], dict[str, object]]] = {
    "openpi": lambda scalar: {"__npgeneric__": True, "data": scalar.item(), "dtype": scalar.dtype.str},
    "msgpack-numpy": lambda scalar: {"nd": False, "type": scalar.dtype.str, "data": scalar.tobytes()},
    "native": lambda scalar: {
        "nd": False,
        "type": scalar.dtype.str,
        "kind": scalar.dtype.kind,
        "data": scalar.tobytes(),
    },
}


def _with_keys(keys: type[bytes] | type[str], fields: dict[str, object]) -> dict[bytes | str, object]:
    return {key.encode() if keys is bytes else key: value for key, value in fields.items()}


def _check_encodable(dtype: np.dtype) -> None:
    if dtype.str not in _DTYPES:
        raise CodecError(f"dtype {dtype} cannot be sent: only booleans, integers and floats up to 64 bits can")


def _array(fields: Mapping[str, object], dtype_key: str, max_bytes: int, max_rank: int) -> np.ndarray:
    dtype = _dtype(fields, dtype_key)
    data = _data(fields)
    if data.nbytes > max_bytes:
        raise CodecError(f"array of {data.nbytes} bytes, more than the {max_bytes} allowed").inside("data")
    shape = _shape(fields, max_rank)
    expected = math.prod(shape) * dtype.itemsize
    if expected != data.nbytes:
        raise CodecError(f"shape {shape} of {dtype.str!r} needs {expected} bytes, found {data.nbytes}").inside("data")
    if expected == 0 and math.prod(size or 1 for size in shape) > max_bytes:
        raise CodecError(f"shape {shape} is too large").inside("shape")  # NumPy refuses such empty arrays as well
    return np.ndarray(shape, dtype, data)


def _raw_scalar(fields: Mapping[str, object], dtype: np.dtype) -> np.generic:
    data = _data(fields)
    if data.nbytes != dtype.itemsize:
        raise CodecError(f"expected {dtype.itemsize} bytes for a {dtype.str!r}, found {data.nbytes}").inside("data")
    return dtype.type(owned(np.ndarray((), dtype, data)).item())


def _openpi_scalar(fields: Mapping[str, object]) -> np.generic:
    dtype = _dtype(fields, "dtype")
    value = _field(fields, "data")
    if dtype.kind == "b" and isinstance(value, bool):
        return np.bool_(value)
    if dtype.kind in "iu" and type(value) is int and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        return dtype.type(value)
    if dtype.kind == "f" and isinstance(value, (int, float)) and not isinstance(value, bool):
        with np.errstate(over="ignore"):  # a value beyond float16 or float32 becomes infinity, as in a cast
            return dtype.type(np.float64(value))
    raise CodecError(f"expected a value of dtype {dtype.str!r}, found {described(value)}").inside("data")


def _texts(fields: Mapping[str, object], dtype_key: str, max_rank: int) -> str | list[str] | None:
    """The text, or the list of texts, in a scalar or an array of text dtype; None where the dtype is another.

    np.str_ itself is a str to msgpack; this is what np.array("...") becomes.
    """
    value = fields.get(dtype_key)
    match = _TEXT_DTYPE.fullmatch(_text(fields, dtype_key)) if isinstance(value, (str, memoryview)) else None
    if match is None:
        return None
    if "__npgeneric__" in fields and isinstance(text := fields.get("data"), str):
        return text
    shape, data = _shape(fields, max_rank) if "shape" in fields else (), _data(fields)
    order, kind, length = match.groups()
    size = int(length) * (4 if kind == "U" else 1)
    count = math.prod(shape)
    if count > _MOST_TEXTS:
        raise CodecError(f"an array of {count} texts, more than the {_MOST_TEXTS} allowed").inside("shape")
    if data.nbytes != size * count or not size:
        expected = f"shape {shape} of {match[0]!r} needs {size * count} bytes"
        raise CodecError(f"{expected}, found {data.nbytes}").inside("data")
    encoding = "utf-8" if kind == "S" else "utf-32-be" if order == ">" else "utf-32-le"
    try:
        texts = [bytes(data[at * size : (at + 1) * size]).decode(encoding).rstrip("\0") for at in range(count)]
    except UnicodeDecodeError:
        raise CodecError(f"text that is not valid {encoding}").inside("data") from None
    return texts[0] if count == 1 else texts


def _field(fields: Mapping[str, object], key: str) -> object:
    try:
        return fields[key]
    except KeyError:
        raise CodecError(f"this array has no {key!r}") from None


def _data(fields: Mapping[str, object]) -> memoryview:
    data = _field(fields, "data")
    if isinstance(data, str):
        raise CodecError(f"expected raw bytes (bin), found text: {PACK_AS_BIN}").inside("data")
    if not isinstance(data, memoryview):
        raise CodecError(f"expected raw bytes, found {described(data)}").inside("data")
    return data


def _text(fields: Mapping[str, object], key: str) -> str:
    """A short text, which clients send as str or as bin."""
    value = _field(fields, key)
    if isinstance(value, memoryview):
        return bytes(value[:64]).decode("ascii", "replace")
    if isinstance(value, str):
        return value
    raise CodecError(f"expected text, found {described(value)}").inside(key)


def _dtype(fields: Mapping[str, object], key: str) -> np.dtype:
    value = _field(fields, key)
    name = _text(fields, key) if isinstance(value, (str, memoryview)) else None
    if name is None or name not in _DTYPES:
        found = described(value if name is None else name)
        raise CodecError(f"expected {_EXPECTED_DTYPE}, found {found}").inside(key)
    return _DTYPES[name]


def _shape(fields: Mapping[str, object], max_rank: int) -> tuple[int, ...]:
    shape = _field(fields, "shape")
    if not isinstance(shape, list):
        raise CodecError(f"expected a list of sizes, found {described(shape)}").inside("shape")
    if len(shape) > max_rank:
        raise CodecError(f"array of rank {len(shape)}, more than the {max_rank} allowed").inside("shape")
    for i, size in enumerate(shape):
        if type(size) is not int or size < 0:
            raise CodecError(f"expected a size, found {described(size)}").inside(i).inside("shape")
    return tuple(shape)
