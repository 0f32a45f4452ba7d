"""Reading a YAML file that a person wrote: every complaint names the file, the entry and what was expected there."""

from collections.abc import Callable
from pathlib import Path

from engine.files.yaml_file import YamlError, load_yaml


class Entry:
    """A value of a YAML file that knows where it stands.

    failure: the exception raised for whatever is wrong, made from one line of text.
    """

    def __init__(self, value: object, file: str, place: str, failure: Callable[[str], Exception]) -> None:
        self.value = value
        self.file = file
        self._place = place
        self._failure = failure

    def error(self, expected: str) -> Exception:
        """The exception to raise where something else was expected here."""
        where = f"{self.file}: {self._place}" if self._place else self.file
        found = "nothing" if self.value is None else f"{type(self.value).__name__} {self.value!s:.60}"
        return self._failure(f"{where}: expected {expected}, found {' '.join(found.split())}")

    def fields(self, required: set[str], optional: set[str]) -> dict[str, "Entry"]:
        """The entries of a map with these keys and no others."""
        entries = self._children({} if self.value is None and not required else self.value)
        if wrong := sorted(set(entries) - required - optional):
            raise entries[wrong[0]].error(f"no such entry (there are {', '.join(sorted(required | optional))})")
        for key in sorted(required - set(entries)):
            raise self._child(key, None).error("an entry")
        return entries

    def named(self) -> dict[str, "Entry"]:
        """The entries of a map whose keys are names, at least one."""
        if not self.value:
            raise self.error("a map with at least one entry")
        return self._children(self.value)

    def items(self) -> list["Entry"]:
        """The entries of a list, at least one."""
        if not isinstance(self.value, list) or not self.value:
            raise self.error("a list with at least one entry")
        return [
            Entry(item, self.file, f"{self._place}[{index}]", self._failure) for index, item in enumerate(self.value)
        ]

    def text(self) -> str:
        """A text that is not empty."""
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.error("text")
        return self.value

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.error("true or false")
        return self.value

    def whole(self, least: int) -> int:
        """A whole number of at least `least`."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < least:
            raise self.error(f"a whole number of at least {least}")
        return self.value

    def share(self) -> float:
        """A number above 0 and up to 1."""
        if not isinstance(self.value, int | float) or isinstance(self.value, bool) or not 0 < self.value <= 1:
            raise self.error("a number above 0 and up to 1")
        return float(self.value)

    def _children(self, value: object) -> dict[str, "Entry"]:
        if not isinstance(value, dict):
            raise self.error("a map")
        for key in value:
            if not isinstance(key, str):
                raise self._child(str(key), key).error("a text as key")
        return {key: self._child(key, item) for key, item in value.items()}

    def _child(self, key: str, value: object) -> "Entry":
        return Entry(value, self.file, f"{self._place}.{key}".lstrip("."), self._failure)


def read_yaml(path: Path, failure: Callable[[str], Exception]) -> Entry:
    """The whole file. Raises what `failure` makes where it cannot be read as YAML."""
    try:
        value = load_yaml(path)
    except (OSError, YamlError) as error:
        raise failure(str(error)) from error
    return Entry(value, str(path), "", failure)
