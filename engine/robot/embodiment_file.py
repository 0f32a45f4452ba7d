"""Embodiments as YAML files, the project's own ones included; what a file may say is in docs/embodiments.md."""

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from engine.files.expectation import expectation
from engine.files.yaml_file import YamlError, load_yaml
from engine.robot.embodiment import ActionVector, Cell, Embodiment, EmbodimentError
from protocol.robot import REQUEST_KEYS, StateVector, View

BUILT_IN = {path.stem: path for path in sorted((Path(__file__).parent / "embodiments").glob("*.yaml"))}
"""Embodiments that come with the project: name to file."""

Text = Annotated[str, StringConstraints(pattern=r"\S")]
Size = Annotated[int, Field(ge=1, le=10_000)]
Side = Annotated[int, Field(ge=8, le=4096)]


class _Entries(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _View(_Entries):
    keys: list[Text] | None = Field(default=None, min_length=1)
    required: bool | None = None
    one_of: Text | None = None


class _Cell(_Entries):
    view: Text
    width: Size = 1
    height: Size = 1


class _State(_Entries):
    size: Size
    key: Text | None = None
    meaning: Text | None = None


class _Action(_Entries):
    size: Size
    relative_to: Text | None = None


class _Handshake(_Entries):
    image_resolution: list[Side] | None = Field(default=None, min_length=2, max_length=2)
    needs_wrist_camera: bool | None = None
    n_external_cameras: int | None = Field(default=None, ge=0, le=100)


def _or_empty(value: object) -> object:
    return {} if value is None else value


def _view_alone(value: object) -> object:
    return {"view": value} if isinstance(value, str) else value


_Row = Annotated[list[Annotated[_Cell, BeforeValidator(_view_alone)]], Field(min_length=1)]


class _File(_Entries):
    name: Text
    views: dict[Text, Annotated[_View, BeforeValidator(_or_empty)]] = Field(min_length=1)
    layout: list[Annotated[list[Annotated[_Cell, BeforeValidator(_view_alone)]], Field(min_length=1)]] = Field(
        min_length=1
    )
    crop: float = Field(default=0.95, ge=0.01, le=1)
    template: Text
    default_prompt: Text = "Perform the default behavior."
    state: dict[Text, _State] = Field(min_length=1)
    action: dict[Text, _Action] = Field(min_length=1)
    handshake: Annotated[_Handshake, BeforeValidator(_or_empty)] = _Handshake()


_MAPS: dict[str, type[_Entries]] = {
    "views": _View, "layout": _Cell, "state": _State, "action": _Action, "handshake": _Handshake,
}  # fmt: skip
Refuse = Callable[[str, str, object], NoReturn]


def read_embodiment(name: str) -> Embodiment:
    """A built-in embodiment by its name, or the one that a YAML file describes.

    Raises EmbodimentError, one line that names the file, the entry and what was expected there.
    """
    path = BUILT_IN.get(name, Path(name))
    if not os.path.isfile(path):
        raise EmbodimentError(f"embodiment {name!r} is neither built in ({', '.join(BUILT_IN)}) nor a YAML file")
    refuse = partial(_refuse, path)
    try:
        content = load_yaml(path)
        file = _File.model_validate(content)
    except (OSError, YamlError) as error:
        raise EmbodimentError(str(error)) from error
    except ValidationError as error:
        _explain(error, refuse)
    views = tuple(_view(name, view, refuse) for name, view in file.views.items())
    state = tuple(
        StateVector(
            name=name,
            size=vector.size,
            key=vector.key or f"observation/{name}",
            meaning=vector.meaning or "number" + "s" * (vector.size > 1),
        )
        for name, vector in file.state.items()
    )
    for name, action in file.action.items():
        fitting = [vector.name for vector in state if vector.size == action.size]
        if action.relative_to is not None and action.relative_to not in fitting:
            expected = f"a state vector of size {action.size} ({', '.join(fitting) or 'there is none'})"
            refuse(f"action.{name}.relative_to", expected, action.relative_to)
    if "{p}" not in file.template:
        refuse("template", "a text with {p} where the prompt goes", file.template)
    _check_views(views, file, refuse)
    _check_layout(file, refuse)
    _check_keys(path, views, state)
    return Embodiment(
        name=file.name,
        views=views,
        layout=tuple(tuple(Cell(**cell.model_dump()) for cell in row) for row in file.layout),
        crop=file.crop,
        template=file.template,
        default_prompt=file.default_prompt,
        state=state,
        action=tuple(ActionVector(name=name, **action.model_dump()) for name, action in file.action.items()),
        own_handshake=file.handshake.model_dump(exclude_none=True),
    )


def _refuse(path: Path, place: str, expected: str, value: object) -> NoReturn:
    found = "nothing" if value is None else f"{type(value).__name__} {value!s:.60}"
    if isinstance(value, str) and not value.strip():
        found = "blank text"
    where = f"{path}: {place}" if place else str(path)
    raise EmbodimentError(f"{where}: expected {expected}, found {' '.join(found.split())}")


def _explain(error: ValidationError, refuse: Refuse) -> NoReturn:
    """Refuse the first thing that is wrong with the entries of a file."""
    errors = error.errors()
    # An entry that nobody knows may well be what is missing under another name.
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    steps = list(first["loc"])
    is_key = steps[-1:] == ["[key]"] or first["type"] == "invalid_key"
    if steps[-1:] == ["[key]"]:
        steps.pop()
    place = "".join(f"[{step}]" if isinstance(step, int) and not is_key else f".{step}" for step in steps)
    expected, value = expectation(first), None if first["type"] == "missing" else first["input"]
    if is_key:
        expected = "a text as key"
    elif first["type"] == "extra_forbidden":
        known = _MAPS[str(steps[0])] if len(steps) > 1 else _File
        expected = f"one of {', '.join(sorted(known.model_fields))} as entry"
    elif steps[-1:] == ["image_resolution"] and "too_" in first["type"]:
        expected = "height and width"
    elif steps[:1] == ["layout"] and len(steps) == 3:
        expected = "a view's name or a map"
    refuse(place.removeprefix("."), expected, value)


def _view(name: str, view: _View, refuse: Refuse) -> View:
    required = view.one_of is None if view.required is None else view.required
    if required and view.one_of is not None:
        expected = "false, or no 'one_of': a view that is always needed is not one of several"
        refuse(f"views.{name}.required", expected, view.required)
    keys = tuple(view.keys or [f"observation/{name}"])
    return View(name=name, keys=keys, required=required, one_of=view.one_of)


def _check_views(views: tuple[View, ...], file: _File, refuse: Refuse) -> None:
    if not any(view.required or view.one_of for view in views):
        refuse("views", "at least one view that is required or one_of several", _plain(file.views))
    if len({len(view.keys) for view in views if len(view.keys) > 1}) > 1:
        expected = "equally many keys for all views with several, since the i-th of each belong together"
        refuse("views", expected, _plain(file.views))


def _check_layout(file: _File, refuse: Refuse) -> None:
    width = sum(cell.width for cell in file.layout[0])
    for index, row in enumerate(file.layout):
        cells = [cell.model_dump() for cell in row]
        for column, cell in enumerate(row):
            if cell.view not in file.views:
                refuse(f"layout[{index}][{column}]", f"one of the views {', '.join(sorted(file.views))}", cell.view)
        if len({cell.height for cell in row}) > 1:
            refuse(f"layout[{index}]", "views of one height in a row", cells)
        if sum(cell.width for cell in row) != width:
            refuse(f"layout[{index}]", f"a row {width} views wide, as the first is", cells)
    counts = Counter(cell.view for row in file.layout for cell in row)
    for name in sorted(file.views):
        if counts[name] != 1:
            refuse("layout", f"the view {name!r} once", dict(counts))


def _check_keys(path: Path, views: tuple[View, ...], state: tuple[StateVector, ...]) -> None:
    """Each key of a request means one thing in one naming of the cameras."""
    namings = max(len(view.keys) for view in views)
    for naming in range(namings):
        keys = [view.keys[naming if len(view.keys) > 1 else 0] for view in views] + [vector.key for vector in state]
        for key, count in Counter(keys).items():
            if count > 1 or key in REQUEST_KEYS:
                raise EmbodimentError(f"{path}: the request's key {key!r} would mean two things; expected one")


def _plain(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: entry.model_dump(exclude_none=True) for name, entry in entries.items()}
