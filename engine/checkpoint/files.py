"""The files of a checkpoint: entries of one safetensors file or of the shards that an index names, and reading them.

The `safetensors` library maps a file, and then every page that was touched counts as the process's memory until the
file is closed. Here a buffer as large as the largest tensor is all the memory that reading takes, and what is wrong
with a file is known, and said, from its header alone.
"""

import json
import math
import os
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from tqdm import tqdm

from engine.checkpoint.error import CheckpointError
from engine.files.regular_file import open_regular

CONFIG_FILE = "config.json"
STATISTICS_FILE = Path("experiment_cfg") / "metadata.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The types that weights come in, by their names in a file. Entries of others are listed, but not read."""

PICKLE_SUFFIXES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_LARGEST_HEADER = 100 * 2**20  # the format's own bound


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `size` bytes from byte `start` of `file`, under `name` there."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def __str__(self) -> str:
        return f"{self.file}: entry {self.name!r}"


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All entries of a file, by name. Raises CheckpointError where it is no whole safetensors file."""
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{path} is a pickle, which may run code and is never read: safetensors expected")
    try:
        with open_regular(path) as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
            text = file.read(length) if length is not None and length <= _LARGEST_HEADER else b""
        file_size = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if start.startswith(_PICKLE_STARTS):
        raise CheckpointError(f"{path} holds a pickle, which may run code and is never read: safetensors expected")
    if length is None or len(text) < length:
        raise CheckpointError(
            f"{path} is no whole safetensors file: its {file_size:,} bytes end before its header does"
        )
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {name: _stored(path, name, entry, 8 + len(text)) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is no safetensors file: its header cannot be read") from None
    end = max((entry.start + entry.size for entry in entries.values()), default=8 + len(text))
    if file_size < end:
        last = max(entries.values(), key=lambda entry: entry.start + entry.size)
        raise CheckpointError(
            f"{path} is cut off: {file_size:,} bytes of the {end:,} that its header lists, so that entry "
            f"{last.name!r} is not whole"
        )
    return entries


def make_buffer(tensors: Iterable[StoredTensor]) -> Tensor:
    """Memory for any one of the tensors. Reading into it again is faster than into new memory."""
    return torch.empty(max((stored.size for stored in tensors), default=0), dtype=torch.uint8)


class TensorFiles:
    """Reads tensors out of their files, each file opened once. To be used in a `with`; a terminal sees its progress."""

    def __init__(self, total_bytes: int) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, BufferedReader] = {}
        self._progress = tqdm(total=total_bytes, desc="weights", unit="B", unit_scale=True, disable=None)

    def __enter__(self) -> Self:
        self._stack.enter_context(self._progress)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def tensor(self, stored: StoredTensor, buffer: Tensor) -> Tensor:
        """A tensor of one of DTYPES, on the CPU, as a view of `buffer`, which it is read into.

        Raises CheckpointError where the file does not give it.
        """
        target = buffer[: stored.size]
        try:
            if stored.file not in self._open:
                self._open[stored.file] = self._stack.enter_context(open_regular(stored.file))
            file = self._open[stored.file]
            file.seek(stored.start)
            got = file.readinto(target.numpy().data)
        except OSError as error:
            raise CheckpointError(f"{stored} cannot be read: {error}") from error
        if got != stored.size:
            raise CheckpointError(f"{stored} cannot be read: {got} bytes came, expected {stored.size}")
        self._progress.update(got)
        return target.view(DTYPES[stored.dtype]).view(stored.shape)


def _stored(path: Path, name: str, entry: dict[str, Any], data_start: int) -> StoredTensor:
    """An entry as the header lists it; raises ValueError, KeyError or TypeError where it makes no sense."""
    start, end = entry["data_offsets"]
    stored = StoredTensor(
        file=path,
        name=name,
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        start=data_start + start,
        size=end - start,
    )
    numbers = (*stored.shape, start, stored.size)
    if not isinstance(stored.dtype, str) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(name)
    if stored.dtype in DTYPES and stored.size != math.prod(stored.shape) * DTYPES[stored.dtype].itemsize:
        raise ValueError(name)
    return stored


def read_entries(directory: Path) -> dict[str, StoredTensor]:
    """All entries by name, from the headers of the files alone.

    Raises CheckpointError naming the file, and the entry, that is missing or broken.
    """
    index = directory / INDEX_FILE
    if not index.exists():
        single = directory / SINGLE_FILE
        pickles = sorted(path.name for path in directory.glob("*") if path.suffix in PICKLE_SUFFIXES)
        if not single.exists() and pickles:
            raise CheckpointError(
                f"{directory} has its weights in pickles ({pickles[0]}), which may run code and are never read: "
                f"{SINGLE_FILE} or {INDEX_FILE} expected"
            )
        return read_header(single)
    weight_map = read_json(index, "an object 'weight_map' from entry names to files").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} must hold an object 'weight_map' from entry names to files")
    headers: dict[str, dict[str, StoredTensor]] = {}
    for entry, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name or not file:
            raise CheckpointError(f"{index}: entry {entry!r} must name a file beside the index, found {file!r}")
        if file not in headers:
            if not os.path.exists(directory / file):
                raise CheckpointError(f"{index} names the file {file} for entry {entry!r}, but it is missing")
            headers[file] = read_header(directory / file)
        if entry not in headers[file]:
            raise CheckpointError(f"{directory / file} has no entry {entry!r}, which {INDEX_FILE} expects there")
    return {entry: headers[file][entry] for entry, file in weight_map.items()}


def read_json(path: Path, holds: str) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError that says what the file must hold where it is missing or no such thing."""
    try:
        with open_regular(path) as file:
            content = json.loads(file.read().decode())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; it must hold {holds}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object: {holds}")
    return content
