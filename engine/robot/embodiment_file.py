"""Embodiments as YAML files, the project's own ones included; what a file may say is in docs/embodiments.md."""

import os
from collections import Counter
from pathlib import Path

from engine.files.yaml_entry import Entry, read_yaml
from engine.robot.embodiment import ActionVector, Cell, Embodiment, EmbodimentError
from protocol.robot import REQUEST_KEYS, StateVector, View

BUILT_IN = {path.stem: path for path in sorted((Path(__file__).parent / "embodiments").glob("*.yaml"))}
"""Embodiments that come with the project: name to file."""

_DEFAULT_CROP = 0.95
_DEFAULT_PROMPT = "Perform the default behavior."
_HANDSHAKE = {"image_resolution", "needs_wrist_camera", "n_external_cameras"}


def read_embodiment(name: str) -> Embodiment:
    """A built-in embodiment by its name, or the one that a YAML file describes.

    Raises EmbodimentError, one line that names the file, the entry and what was expected there.
    """
    path = BUILT_IN.get(name, Path(name))
    if not os.path.isfile(path):
        raise EmbodimentError(f"embodiment {name!r} is neither built in ({', '.join(BUILT_IN)}) nor a YAML file")
    whole = read_yaml(path, EmbodimentError)
    entries = whole.fields(
        {"name", "views", "layout", "template", "state", "action"}, {"crop", "default_prompt", "handshake"}
    )
    views = tuple(_view(name, entry) for name, entry in entries["views"].named().items())
    state = tuple(_state(name, entry) for name, entry in entries["state"].named().items())
    _check_views(entries["views"], views)
    _check_keys(whole, views, state)
    return Embodiment(
        name=entries["name"].text(),
        views=views,
        layout=_layout(entries["layout"], views),
        crop=entries["crop"].share() if "crop" in entries else _DEFAULT_CROP,
        template=_template(entries["template"]),
        default_prompt=entries["default_prompt"].text() if "default_prompt" in entries else _DEFAULT_PROMPT,
        state=state,
        action=tuple(_action(name, entry, state) for name, entry in entries["action"].named().items()),
        own_handshake=_handshake(entries["handshake"]) if "handshake" in entries else {},
    )


def _view(name: str, entry: Entry) -> View:
    given = entry.fields(set(), {"keys", "required", "one_of"})
    keys = tuple(key.text() for key in given["keys"].items()) if "keys" in given else (f"observation/{name}",)
    one_of = given["one_of"].text() if "one_of" in given else None
    required = given["required"].flag() if "required" in given else one_of is None
    if required and one_of is not None:
        raise given["required"].error("false, or no 'one_of': a view that is always needed is not one of several")
    return View(name=name, keys=keys, required=required, one_of=one_of)


def _state(name: str, entry: Entry) -> StateVector:
    given = entry.fields({"size"}, {"key", "meaning"})
    size = given["size"].whole(least=1)
    return StateVector(
        name=name,
        size=size,
        key=given["key"].text() if "key" in given else f"observation/{name}",
        meaning=given["meaning"].text() if "meaning" in given else "number" + "s" * (size > 1),
    )


def _action(name: str, entry: Entry, state: tuple[StateVector, ...]) -> ActionVector:
    given = entry.fields({"size"}, {"relative_to"})
    size = given["size"].whole(least=1)
    if "relative_to" not in given:
        return ActionVector(name=name, size=size)
    reference = given["relative_to"].text()
    fitting = [vector.name for vector in state if vector.size == size]
    if reference not in fitting:
        raise given["relative_to"].error(f"a state vector of size {size} ({', '.join(fitting) or 'there is none'})")
    return ActionVector(name=name, size=size, relative_to=reference)


def _layout(entry: Entry, views: tuple[View, ...]) -> tuple[tuple[Cell, ...], ...]:
    names = {view.name for view in views}
    rows = [(row, tuple(_cell(cell, names) for cell in row.items())) for row in entry.items()]
    width = sum(cell.width for cell in rows[0][1])
    for row, cells in rows:
        if len({cell.height for cell in cells}) > 1:
            raise row.error("views of one height in a row")
        if sum(cell.width for cell in cells) != width:
            raise row.error(f"a row {width} views wide, as the first is")
    counts = Counter(cell.view for _, cells in rows for cell in cells)
    for name in sorted(names):
        if counts[name] != 1:
            raise entry.error(f"the view {name!r} once")
    return tuple(cells for _, cells in rows)


def _cell(entry: Entry, names: set[str]) -> Cell:
    given = entry.fields({"view"}, {"width", "height"}) if isinstance(entry.value, dict) else {"view": entry}
    if given["view"].text() not in names:
        raise given["view"].error(f"one of the views {', '.join(sorted(names))}")
    width, height = (given[side].whole(least=1) if side in given else 1 for side in ("width", "height"))
    return Cell(view=given["view"].text(), width=width, height=height)


def _template(entry: Entry) -> str:
    if "{p}" not in entry.text():
        raise entry.error("a text with {p} where the prompt goes")
    return entry.text()


def _handshake(entry: Entry) -> dict[str, object]:
    given = entry.fields(set(), _HANDSHAKE)
    values: dict[str, object] = {}
    if "image_resolution" in given:
        sides = [side.whole(least=1) for side in given["image_resolution"].items()]
        if len(sides) != 2:
            raise given["image_resolution"].error("height and width")
        values["image_resolution"] = sides
    if "needs_wrist_camera" in given:
        values["needs_wrist_camera"] = given["needs_wrist_camera"].flag()
    if "n_external_cameras" in given:
        values["n_external_cameras"] = given["n_external_cameras"].whole(least=0)
    return values


def _check_views(entry: Entry, views: tuple[View, ...]) -> None:
    if not any(view.required or view.one_of for view in views):
        raise entry.error("at least one view that is required or one_of several")
    if len({len(view.keys) for view in views if len(view.keys) > 1}) > 1:
        raise entry.error("equally many keys for all views with several, since the i-th of each belong together")


def _check_keys(whole: Entry, views: tuple[View, ...], state: tuple[StateVector, ...]) -> None:
    """Each key of a request means one thing in one naming of the cameras."""
    namings = max(len(view.keys) for view in views)
    for naming in range(namings):
        keys = [view.keys[naming if len(view.keys) > 1 else 0] for view in views] + [vector.key for vector in state]
        for key, count in Counter(keys).items():
            if count > 1 or key in REQUEST_KEYS:
                raise EmbodimentError(f"{whole.file}: the request's key {key!r} would mean two things; expected one")
