"""The pages that the code is explained by are true to it: modules, names, citations, links."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("policy_server", "protocol", "engine", "kv_cache", "clients")
PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))


def test_the_architecture_names_every_module_and_no_other() -> None:
    page = (ROOT / "docs/architecture.md").read_text().partition("## The road")[0]
    room, named = "", set()
    for line in page.splitlines():
        if heading := re.match(r"\| `(\w+)/` \|", line):
            room = heading[1]
        elif line.startswith("| `"):
            named |= {f"{room}/{name}" for name in re.findall(r"`([\w/]+\.py)`", line.split("|")[1])}
    there = {str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert named == {path for path in there if not path.endswith(("__init__.py", "__main__.py"))}


def test_every_name_on_the_road_exists() -> None:
    page = (ROOT / "docs/architecture.md").read_text().partition("## The road")[2]
    names = re.findall(r"`((?:" + "|".join(ROOMS) + r")(?:\.\w+)+)`", page)
    assert len(names) > 20
    for name in names:
        parts = name.split(".")
        depth = next(
            n for n, part in enumerate(parts[1:], 1) if (ROOT / "/".join(parts[: n + 1])).with_suffix(".py").is_file()
        )
        found = importlib.import_module(".".join(parts[: depth + 1]))
        for part in parts[depth + 1 :]:
            found = getattr(found, part)


def test_every_citation_of_the_model_s_page_is_a_section_of_it() -> None:
    sections = set(re.findall(r"^#+ ([\d.]+?)\.? ", (ROOT / "docs/model.md").read_text(), re.MULTILINE))
    cited = set()
    for room in (*ROOMS, "benchmarks"):
        for path in (ROOT / room).rglob("*.py"):
            text = " ".join(path.read_text().split())
            assert not re.search(r"\bspec (section|\d)", text), path
            for sentence in re.findall(r"model\.md sections? ((?:[\d.]+\d|\d)(?:(?:, | and )(?:[\d.]+\d|\d))*)", text):
                cited |= set(re.findall(r"[\d.]*\d", sentence))
    assert len(cited) > 10
    assert cited <= sections


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_flags_in_the_pages_are_flags() -> None:
    known = set(re.findall(r"--[a-z][a-z0-9-]*", _help("policy_server")))
    page = (ROOT / "docs/wire.md").read_text() + (ROOT / "docs/lab.md").read_text()
    for flag in re.findall(r"`(--[a-z][a-z0-9-]*)", page):
        assert flag in known, flag


def _help(module: str) -> str:
    import sys

    return subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True).stdout
