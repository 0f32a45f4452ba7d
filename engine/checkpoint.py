"""Checkpoints in the release's layout (spec section 2), and the built-in synthetic ones."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, ByT5Tokenizer

from engine.builtin import BUILTIN_CONFIGS, BUILTIN_STATISTICS
from engine.config import ConfigError, ModelConfig, parse_config
from engine.model import Fetch
from engine.synthetic import synthetic_tensor
from engine.text import Tokenizer

RELEASE_TOKENIZER = "google/umt5-xxl"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: one line that names the file, the entry and what was expected."""


@dataclass(frozen=True)
class Checkpoint:
    """All that is read before the weights.

    fetch: the weights, entry by entry; raises CheckpointError. statistics: `experiment_cfg/metadata.json`.
    entries: names of the weights there are; none are listed for synthetic ones, which are made when asked for.
    trained: False for synthetic weights.
    """

    name: str
    config: ModelConfig
    statistics: Mapping[str, Any]
    tokenizer: Tokenizer
    fetch: Fetch
    entries: frozenset[str]
    trained: bool


def open_checkpoint(name: str) -> Checkpoint:
    """A built-in checkpoint by its name, or a directory in the release's layout.

    A config with `"tokenizer": "byt5"` uses a byte tokenizer, which needs no file; others use the release's.
    Raises CheckpointError.
    """
    if name in BUILTIN_CONFIGS:
        return synthetic_checkpoint(name, BUILTIN_CONFIGS[name], BUILTIN_STATISTICS)
    directory = Path(name)
    if not directory.is_dir():
        known = ", ".join(sorted(BUILTIN_CONFIGS))
        raise CheckpointError(f"checkpoint {name!r} is neither built in ({known}) nor a directory")
    raw = _read_json(directory / "config.json")
    try:
        config = parse_config(raw)
    except ConfigError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from error
    reader = _SafetensorsReader(directory)
    return Checkpoint(
        name=name,
        config=config,
        statistics=_read_json(directory / "experiment_cfg" / "metadata.json"),
        tokenizer=_tokenizer(raw),
        fetch=reader.fetch,
        entries=reader.entries,
        trained=not raw.get("synthetic_weights", False),
    )


def synthetic_checkpoint(name: str, raw: Mapping[str, Any], statistics: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint with synthetic weights made in memory, of the sizes in `raw` (a `config.json`, parsed)."""
    return Checkpoint(
        name=name,
        config=parse_config(raw),
        statistics=statistics,
        tokenizer=_tokenizer(raw),
        fetch=synthetic_tensor,
        entries=frozenset(),
        trained=False,
    )


def _tokenizer(raw: Mapping[str, Any]) -> Tokenizer:
    if raw.get("tokenizer") == "byt5":
        return ByT5Tokenizer()
    try:
        return AutoTokenizer.from_pretrained(RELEASE_TOKENIZER)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"the tokenizer {RELEASE_TOKENIZER} is neither cached nor to be fetched: {reason}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return content


class _SafetensorsReader:
    """Entries of one file, or of the shards that an index names. Files are mapped, not read as a whole."""

    def __init__(self, directory: Path) -> None:
        index = directory / INDEX_FILE
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index} must hold an object 'weight_map'")
            self._files: dict[str, Path] = {entry: directory / file for entry, file in weight_map.items()}
            self._open: dict[Path, Any] = {path: _open_file(path) for path in sorted(set(self._files.values()))}
        else:
            path = directory / SINGLE_FILE
            self._open = {path: _open_file(path)}
            self._files = dict.fromkeys(self._open[path].keys(), path)
        self._directory = directory

    @property
    def entries(self) -> frozenset[str]:
        """Names of all entries."""
        return frozenset(self._files)

    def fetch(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Entry `name` in `shape`. Raises CheckpointError where it is missing or has another shape."""
        if name not in self._files:
            raise CheckpointError(f"{self._directory} has no entry {name!r}")
        path = self._files[name]
        try:
            tensor: Tensor = self._open[path].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: entry {name!r} cannot be read: {error}") from error
        # Norm scales of a VAE may differ in trailing dimensions of one (spec section 8).
        if _without_ones(tensor.shape) != _without_ones(shape):
            raise CheckpointError(f"{path}: entry {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor.reshape(shape)


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def _without_ones(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size != 1]
