"""YAML that nobody writes by hand, or only by mistake: one line each, in bounded time."""

from pathlib import Path

import pytest

from engine.files.yaml_file import YamlError, load_yaml

LETTERS = "abcdefghi"


def multiplied(first: str, line: str) -> str:
    """Nine lines, each of which names the one before nine times."""
    aliases = [",".join([f"*{letter}"] * 9) for letter in LETTERS]
    pairs = zip(LETTERS[1:], aliases, strict=False)
    return first + "".join(line.format(name=name, aliases=names) for name, names in pairs)


REFUSED = {
    "a list in itself": ("a: &a [*a]", "it contains itself"),
    "a map in itself": ("&a {x: *a}", "it contains itself"),
    "a map in itself two levels down": ("a: &a {b: [*a]}", "it contains itself"),
    "a map merged into itself": ("&a\n<<: *a\nb: 1", "it contains itself"),
    "aliases that multiply": (
        multiplied("a: &a [x,x,x,x,x,x,x,x,x]\n", "{name}: &{name} [{aliases}]\n"),
        "more than 100000 values, aliases counted",
    ),
    "merges that multiply": (
        multiplied("a: &a {k: 1}\n", "{name}: &{name}\n  <<: [{aliases}]\n"),
        "more than 100000 values, aliases counted",
    ),
    "a key twice": ("a: 1\nb: 2\na: 3", "the key 'a' occurs twice in its map"),
    "a key twice further down": ("a: [{b: 1, b: 1}]", "the key 'b' occurs twice in its map"),
    "no boolean": ("a: !!bool x", "'x' is no bool"),
    "no time": ("a: !!timestamp x", "'x' is no timestamp"),
    "no number": ("a: !!int ''", "'' is no int"),
    "no float": ("a: !!float ''", "'' is no float"),
    "no date": ("a: 2026-13-45", "'2026-13-45' is no timestamp"),
    "a number too long": ("a: " + "9" * 5000, "is no int"),
    "no text": ('a: "\\udcff"', "is no text"),
    "no bytes of text": (b"a: \xff", "can't decode byte 0xff"),
    "too deep": ("[" * 5000, "maps and lists nest too deeply"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_it_is_refused_in_one_line_that_names_the_file(tmp_path: Path, text: str | bytes, message: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(YamlError) as raised:
        load_yaml(file)
    assert str(raised.value).startswith(f"{file}: cannot be read as YAML: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_aliases_and_merges_of_ordinary_size_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("base: &base {a: 1, b: [x]}\nfirst: *base\nsecond: {<<: *base, a: 2}")
    base = {"a": 1, "b": ["x"]}
    assert load_yaml(file) == {"base": base, "first": base, "second": {"a": 2, "b": ["x"]}}


def test_an_empty_file_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").touch()
    assert load_yaml(tmp_path / "x.yaml") is None
