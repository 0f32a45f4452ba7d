"""The entries of a checkpoint's directory: of one file, or of the shards that an index names."""

import json
import os
from pathlib import Path
from typing import Any

from engine.checkpoint.error import CheckpointError
from engine.checkpoint.safetensors_file import PICKLE_SUFFIXES, StoredTensor, read_header
from engine.files.regular_file import open_regular

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


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
