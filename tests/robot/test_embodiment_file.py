"""Embodiment files: what the built-in one says, and every way in which a file can be wrong."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.robot.embodiment import ActionVector, Cell, EmbodimentError
from engine.robot.embodiment_file import BUILT_IN, read_embodiment
from engine.settings import EngineSettings
from engine.startup import PolicyLoadError, load_policy
from protocol.robot import StateVector, View

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS.parent / "examples" / "two_camera_arm.yaml"


def test_droid_is_a_file_like_any_other() -> None:
    assert list(BUILT_IN) == ["oxe_droid"]
    droid = read_embodiment("oxe_droid")
    assert droid == read_embodiment(str(BUILT_IN["oxe_droid"]))
    assert droid.name == "oxe_droid"
    assert [(view.name, view.required, view.one_of) for view in droid.views] == [
        ("wrist", True, None),
        ("exterior_left", False, "exterior camera"),
        ("exterior_right", False, "exterior camera"),
    ]
    assert droid.layout[0] == (Cell(view="wrist", width=2),)
    assert (droid.grid, droid.crop, droid.action_size) == ((2, 2), 0.95, 8)
    assert droid.action == (
        ActionVector(name="joint_position", size=7, relative_to="joint_position"),
        ActionVector(name="gripper_position", size=1),
    )
    assert droid.own_handshake == {}


def test_what_a_file_leaves_out_has_a_default(tmp_path: Path) -> None:
    content = small()
    content["views"] = {"front": None}
    del content["crop"], content["default_prompt"]
    read = read_embodiment(str(written(tmp_path, content)))
    assert read.views == (View(name="front", keys=("observation/front",)),)
    assert read.state == (StateVector(name="joints", size=2, key="observation/joints", meaning="numbers"),)
    assert read.crop == 0.95
    assert read.prompt_text(" ") == "Do perform the default behavior."
    assert read.own_handshake == {}


def test_a_file_is_read_as_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    content = small() | {"default_prompt": "Greife die Tüte."}
    file = tmp_path / "robot.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    assert read_embodiment(str(file)).default_prompt == "Greife die Tüte."
    program = f"from engine.robot.embodiment_file import read_embodiment; read_embodiment({str(file)!r})"
    strictly = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    done = subprocess.run([sys.executable, *strictly, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_template_is_taken_as_it_is_but_for_the_prompt(tmp_path: Path) -> None:
    content = small() | {"template": "{p} {q} {p.real} 100%"}
    assert read_embodiment(str(written(tmp_path, content))).prompt_text(" GO ") == "go {q} {p.real} 100%"


def test_the_documentation_shows_the_example_as_it_is() -> None:
    example = EXAMPLE.read_text().partition("docs/embodiments.md\n")[2]
    assert f"```yaml\n{example}```" in (DOCS / "embodiments.md").read_text()


def small() -> dict[str, Any]:
    """A valid file with one camera and one joint pair."""
    return {
        "name": "small",
        "views": {"front": {"keys": ["a", "b"]}},
        "layout": [["front"]],
        "crop": 1,
        "template": "Do {p}",
        "default_prompt": "Wait.",
        "state": {"joints": {"size": 2}},
        "action": {"joints": {"size": 2, "relative_to": "joints"}},
    }


def written(directory: Path, content: object) -> Path:
    file = directory / "robot.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


TWO_VIEWS = {"front": {"keys": ["a", "b"]}, "hand": {"keys": ["b", "c"], "required": False}}

BAD: dict[str, tuple[dict[Any, Any], str]] = {
    "no name": ({"name": ...}, "name: expected an entry, found nothing"),
    "a key that is a number": ({5: 1}, "5: expected a text as key"),
    "a picture too small": ({"handshake": {"image_resolution": [4, 4]}}, "image_resolution[0]: expected 8 or more"),
    "a blank name": ({"name": " "}, "name: expected text, found blank text"),
    "a state of no robot": ({"state": {"joints": {"size": 10**30}}}, "state.joints.size: expected at most 10000"),
    "a map for a row": ({"layout": [{"view": "front"}]}, "layout[0]: expected a list, found dict"),
    "a cell of nothing": ({"layout": [[None]]}, "layout[0][0]: expected a view's name or a map, found nothing"),
    "a yes for a number": ({"crop": True}, "crop: expected a number, found bool True"),
    "a number as name": ({"name": 7}, "name: expected text, found int 7"),
    "an unknown entry": ({"colour": "red"}, "colour: expected one of action, crop, default_prompt"),
    "no views": ({"views": {}}, "views: expected 1 or more entries, found dict {}"),
    "views as a list": ({"views": ["front"]}, "views: expected a map, found list ['front']"),
    "a view by number": ({"views": {1: None}}, "views.1: expected a text as key, found int 1"),
    "an unknown view entry": (
        {"views": {"front": {"key": "a"}}},
        "views.front.key: expected one of keys, one_of",
    ),
    "a key that is no text": ({"views": {"front": {"keys": [3]}}}, "views.front.keys[0]: expected text, found int 3"),
    "no keys": ({"views": {"front": {"keys": []}}}, "views.front.keys: expected 1 or more entries, found list []"),
    "required in words": ({"views": {"front": {"required": "very"}}}, "views.front.required: expected true or false"),
    "needed and one of several": (
        {"views": {"front": {"required": True, "one_of": "camera"}}},
        "views.front.required: expected false, or no 'one_of'",
    ),
    "no view needed": ({"views": {"front": {"required": False}}}, "views: expected at least one view that is required"),
    "uneven keys": (
        {"views": {"front": {"keys": ["a", "b"]}, "hand": {"keys": ["c", "d", "e"]}}},
        "views: expected equally many keys",
    ),
    "a key for two views": (
        {"views": {"front": {"keys": ["a", "b"]}, "hand": {"keys": ["c", "b"]}}, "layout": [["front", "hand"]]},
        "'b' would mean two things",
    ),
    "a key of the protocol": ({"views": {"front": {"keys": ["prompt"]}}}, "'prompt' would mean two things"),
    "a camera that is a state": ({"state": {"joints": {"size": 2, "key": "a"}}}, "'a' would mean two things"),
    "no layout": ({"layout": []}, "layout: expected 1 or more entries, found list []"),
    "an unknown cell": ({"layout": [["back"]]}, "layout[0][0]: expected one of the views front, found str back"),
    "a cell without view": ({"layout": [[{"width": 2}]]}, "layout[0][0].view: expected an entry"),
    "no width": ({"layout": [[{"view": "front", "width": 0}]]}, "layout[0][0].width: expected 1 or more, found int 0"),
    "uneven rows": (
        {"views": TWO_VIEWS, "layout": [["front"], [{"view": "hand", "width": 2}]]},
        "layout[1]: expected a row 1 views wide, as the first is",
    ),
    "a ragged row": (
        {"views": TWO_VIEWS, "layout": [["front", {"view": "hand", "height": 2}]]},
        "layout[0]: expected views of one height in a row",
    ),
    "a view twice": ({"layout": [["front"], ["front"]]}, "layout: expected the view 'front' once"),
    "a view nowhere": ({"views": TWO_VIEWS}, "layout: expected the view 'hand' once"),
    "crop of nothing": ({"crop": 0}, "crop: expected 0.01 or more, found int 0"),
    "crop of more": ({"crop": 1.5}, "crop: expected at most 1, found float 1.5"),
    "crop not a number": ({"crop": float("nan")}, "crop: expected at most 1, found float nan"),
    "no place for the prompt": ({"template": "Move."}, "template: expected a text with {p} where the prompt goes"),
    "state without size": ({"state": {"joints": {}}}, "state.joints.size: expected an entry, found nothing"),
    "state of half a number": ({"state": {"joints": {"size": 1.5}}}, "state.joints.size: expected a whole number"),
    "state as text": ({"state": "joints"}, "state: expected a map, found str joints"),
    "no action": ({"action": None}, "action: expected a map, found nothing"),
    "relative to nothing": (
        {"action": {"joints": {"size": 2, "relative_to": "hand"}}},
        "action.joints.relative_to: expected a state vector of size 2 (joints), found str hand",
    ),
    "relative to another size": (
        {"action": {"joints": {"size": 3, "relative_to": "joints"}}},
        "action.joints.relative_to: expected a state vector of size 3 (there is none)",
    ),
    "a seventh handshake key": (
        {"handshake": {"model": "x"}},
        "handshake.model: expected one of image_resol",
    ),
    "one side": (
        {"handshake": {"image_resolution": [180]}},
        "handshake.image_resolution: expected height and width",
    ),
    "cameras below zero": (
        {"handshake": {"n_external_cameras": -1}},
        "handshake.n_external_cameras: expected 0 or more",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_one_line_with_file_entry_and_expectation(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    read_embodiment(str(written(tmp_path, small())))
    content = {key: value for key, value in (small() | changes).items() if value is not ...}
    file = written(tmp_path, content)
    with pytest.raises(EmbodimentError) as raised:
        read_embodiment(str(file))
    assert str(raised.value).startswith(f"{file}: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("views: [a", "cannot be read as YAML"),
        ("a: !!python/object/apply:os.getcwd []", "cannot be read as YAML"),
        ("\x00", "cannot be read as YAML"),
        ("[" * 5000, "cannot be read as YAML: maps and lists nest too deeply"),
        ("name: 2026-13-45", "cannot be read as YAML"),
        ("name: one\nname: two", "cannot be read as YAML: the key 'name' occurs twice"),
        ('"a\\nb": 1', "a\\nb: expected one of action"),
        ("- a\n- b", "expected a map, found list ['a', 'b']"),
        ("", "expected a map, found nothing"),
    ],
)
def test_a_file_that_is_no_map_is_said_to_be_none(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "robot.yaml").write_text(text)
    with pytest.raises(EmbodimentError) as raised:
        read_embodiment(str(tmp_path / "robot.yaml"))
    assert str(raised.value).startswith(f"{tmp_path / 'robot.yaml'}: {message}")
    assert "\n" not in str(raised.value)


def test_a_name_that_is_neither_built_in_nor_a_file_is_refused_before_the_checkpoint_is_read() -> None:
    settings = EngineSettings(checkpoint="no/such/place", embodiment="octopus")
    with pytest.raises(PolicyLoadError, match=r"'octopus' is neither built in \(oxe_droid\) nor a YAML file"):
        load_policy(settings, lambda _: None)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["joint_position", "gripper_position"], ["joint_position", "gripper_position"]),
        (["gripper_position"], [None, "gripper_position"]),
        ([], [None, None]),
    ],
)
def test_the_checkpoint_s_relative_actions_replace_the_embodiment_s(names: list[str], expected: list[str]) -> None:
    droid = read_embodiment("oxe_droid").with_relative_actions(names)
    assert [vector.relative_to for vector in droid.action] == expected


def test_relative_actions_that_the_embodiment_cannot_have_are_named(tmp_path: Path) -> None:
    droid = read_embodiment("oxe_droid")
    with pytest.raises(EmbodimentError, match=r"the actions base, head relative; embodiment oxe_droid has joint_pos"):
        droid.with_relative_actions(["head", "joint_position", "base"])
    content = small() | {"action": {"wheels": {"size": 2}}}
    robot = read_embodiment(str(written(tmp_path, content)))
    with pytest.raises(EmbodimentError, match="needs a state vector wheels of size 2"):
        robot.with_relative_actions(["wheels"])
