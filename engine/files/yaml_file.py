"""Reading YAML that may come from anywhere: whatever is wrong with it ends in one line, soon, and in little memory."""

from pathlib import Path

import yaml

from engine.files.regular_file import open_regular

_MOST_NODES = 100_000
"""Of one file, every alias counted as all that it stands for. A training config has about a thousand."""


class YamlError(ValueError):
    """A file that is no YAML, or YAML that nobody writes: one line that begins with the file."""


def load_yaml(path: Path) -> object:
    """What the file holds, as maps, lists, texts, numbers, dates and booleans.

    Raises FileNotFoundError, and YamlError also for a key that occurs twice in its map, a map or list that contains
    itself, aliases that multiply beyond measure, and text that no encoding has.
    """
    try:
        with open_regular(path) as file:
            loader = _Loader(file.read().decode())
        node = loader.get_single_node()
        if node is None:
            return None
        _size(node, {}, set())
        return loader.construct_document(node)
    except FileNotFoundError:
        raise
    except RecursionError as error:
        raise YamlError(f"{path}: cannot be read as YAML: maps and lists nest too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:  # a ValueError: bytes not in UTF-8
        raise YamlError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """As PyYAML does, which raises whatever it comes upon where a value is not what its tag says."""
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:
            problem = f"{node.value!r:.60} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def _size(node: yaml.Node, sizes: dict[yaml.Node, int], around: set[yaml.Node]) -> int:
    """Nodes that `node` stands for, itself included. sizes: of those counted before. around: those that it is part of.

    Raises yaml.YAMLError for what load_yaml refuses.
    """
    if node in sizes:
        return sizes[node]
    if node in around:
        raise _refusal(node, "it contains itself")
    around.add(node)
    size = 1
    for child in _children(node):
        size += _size(child, sizes, around)
        if size > _MOST_NODES:
            raise _refusal(child, f"more than {_MOST_NODES} values, aliases counted as what they stand for")
    around.remove(node)
    sizes[node] = size
    return size


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (name := (key.tag, key.value)) in seen:
                    raise _refusal(key, f"the key {key.value!r:.60} occurs twice in its map")
                seen.add(name)
        return [child for pair in node.value for child in pair]
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    try:
        node.value.encode()
    except UnicodeEncodeError:
        raise _refusal(node, f"{node.value!r:.60} is no text") from None
    return []


def _refusal(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
