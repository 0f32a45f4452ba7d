"""What a model was trained on, as far as serving must know it: `experiment_cfg/conf.yaml` of a checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.error import CheckpointError
from engine.files.yaml_file import YamlError, load_yaml

CONF_FILE = Path("experiment_cfg") / "conf.yaml"


@dataclass(frozen=True)
class TrainingConfig:
    """Read from conf.yaml, where a key or the whole file may be missing.

    view_height, view_width: pixels of one camera view (`image_resolution_height`, `image_resolution_width`), of the
        DROID release where they are missing.
    relative_action: whether actions are relative to the observed state (`relative_action`), true where it is missing.
    relative_action_keys: which of them, by the names of the statistics (`relative_action_keys`); None where it is
        missing: the embodiment says.
    """

    view_height: int = 176
    view_width: int = 320
    relative_action: bool = True
    relative_action_keys: tuple[str, ...] | None = None

    @property
    def relative_keys(self) -> tuple[str, ...] | None:
        """The action keys that are relative to the state, () where `relative_action` is off, None: not said."""
        return self.relative_action_keys if self.relative_action else ()


def read_training(directory: Path) -> TrainingConfig:
    """The training config of a checkpoint's directory.

    The file is a Hydra config of many levels. A key counts at the top level; where it is not there, anywhere below, as
    long as all places agree. References to other keys (`${...}`) are not followed: the key they name stands elsewhere.
    Raises CheckpointError naming file, key and expectation.
    """
    path = directory / CONF_FILE
    try:
        conf = load_yaml(path)
    except FileNotFoundError:
        return TrainingConfig()
    except YamlError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(conf, dict):
        raise CheckpointError(f"{path} must hold a map, found {type(conf).__name__}")
    found: dict[str, Any] = {}
    for field, key, expected, fits in _KEYS:
        value = _find(conf, key, path)
        if value is None:
            continue
        if not fits(value):
            raise CheckpointError(f"{path}: {key} must be {expected}, found {value!r}")
        found[field] = tuple(value) if isinstance(value, list) else value
    return TrainingConfig(**found)


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


# Field, key in the file, what its value must be, in words and as a test.
_KEYS = (
    ("view_height", "image_resolution_height", "a number of pixels", _is_size),
    ("view_width", "image_resolution_width", "a number of pixels", _is_size),
    ("relative_action", "relative_action", "true or false", lambda value: isinstance(value, bool)),
    ("relative_action_keys", "relative_action_keys", "a list of names", _is_names),
)


def _find(conf: dict[Any, Any], key: str, path: Path) -> Any:
    """The value of `key`, None where there is none."""
    places = [("", conf[key])] if conf.get(key) is not None else list(_walk(conf, key, ""))
    values = [(where, value) for where, value in places if not (isinstance(value, str) and value.startswith("${"))]
    for where, value in values[1:]:
        if value != values[0][1]:
            first, second = (f"{place}{key} is {found!r}" for place, found in (values[0], (where, value)))
            raise CheckpointError(f"{path}: {first}, but {second}: expected one value of {key}")
    return values[0][1] if values else None


def _walk(node: Any, key: str, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key and value is not None:
                yield where, value
            else:
                yield from _walk(value, key, f"{where}{name}.")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _walk(value, key, f"{where}{index}.")
