"""The house's rules: imports go one way, files are read in one sitting, and rooms are not crowded."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"protocol", "clients", "policy_server", "engine", "kv_cache"}
MAY_IMPORT = {
    "protocol": set(),
    "clients": {"protocol"},
    "policy_server": {"protocol", "engine"},
    "engine": {"kv_cache", "protocol"},
    "kv_cache": set(),
}
NO_MODEL = {"torch", "transformers", "diffusers", "safetensors", "flash_attn", "flash_attn_interface"}
MUST_NOT_IMPORT = {
    "protocol": NO_MODEL | {"websockets", "socket", "asyncio", "http", "ssl"},
    "clients": NO_MODEL,
    "policy_server": set(),
    "engine": {"websockets", "msgpack", "http", "prometheus_client"},
    "kv_cache": {"websockets", "msgpack", "http", "transformers", "diffusers"},
}


def imports(source: str) -> set[str]:
    """Top-level packages that a module imports anywhere in it, in functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "packages are imported by their folder names"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_what_lies_to_its_right(room: str) -> None:
    modules = sorted((ROOT / room).rglob("*.py"))
    assert len(modules) > 1
    for module in modules:
        found = imports(module.read_text())
        wrong = (found & ROOMS) - MAY_IMPORT[room] - {room} | (found & MUST_NOT_IMPORT[room])
        assert not wrong, f"{module.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"
        assert "tests" not in found
        assert "benchmarks" not in found


def test_the_walk_sees_every_kind_of_import() -> None:
    source = "import a.b\nfrom c.d import e\ndef f():\n    import g\n    if True:\n        from h import i\n"
    assert imports(source) == {"a", "c", "g", "h"}


def test_of_the_protocol_the_engine_knows_what_a_robot_is_alone() -> None:
    """Not how a request is written: another wire would leave the engine as it is."""
    for module in (ROOT / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "protocol":
                assert node.module == "protocol.robot", f"{module.relative_to(ROOT)} imports {node.module}"


MOST_LINES, MOST_FILES = 350, 14
EVERYWHERE = (*sorted(ROOMS), "benchmarks", "tests", "examples")


def test_no_file_is_longer_than_one_sitting_but_for_the_transformer() -> None:
    long = {
        str(path.relative_to(ROOT))
        for room in EVERYWHERE
        for path in (ROOT / room).rglob("*.py")
        if len(path.read_text().splitlines()) > MOST_LINES
    }
    assert long <= {"engine/model/dit.py"}


def test_no_folder_is_crowded() -> None:
    for room in EVERYWHERE:
        for folder in (ROOT / room, *(path for path in (ROOT / room).rglob("*") if path.is_dir())):
            files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
            assert len(files) <= MOST_FILES, f"{folder.relative_to(ROOT)} has {len(files)} files side by side"
