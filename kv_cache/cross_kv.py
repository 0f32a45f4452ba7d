"""Cross-attention K/V: the text K/V by prompt, shared and counted; the image K/V by session (model.md section 3.7)."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

LayerKV = tuple[tuple[Tensor, Tensor], ...]
"""Per layer K and V, each (1, tokens, heads, head_dim)."""


def layer_kv_bytes(kv: LayerKV) -> int:
    """Bytes that the tensors of `kv` hold."""
    return sum(t.nbytes for pair in kv for t in pair)


@dataclass
class _Entry:
    kv: LayerKV
    users: int


class TextKV:
    """Text K/V by prompt tokens. One copy however many sessions use a prompt; it leaves with its last user."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}

    def __contains__(self, tokens: bytes) -> bool:
        return tokens in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes held by all entries."""
        # A copy first: a report is made while the engine's thread adds and drops prompts.
        return sum(layer_kv_bytes(entry.kv) for entry in list(self._entries.values()))

    def acquire(self, tokens: bytes, compute: Callable[[], LayerKV]) -> LayerKV:
        """The text K/V of a prompt for one more user; `compute` runs where no other user has it.

        All or nothing: where `compute` raises, there is no entry and no user.
        """
        entry = self._entries.get(tokens)
        if entry is None:
            entry = _Entry(compute(), 0)
            self._entries[tokens] = entry
        entry.users += 1
        return entry.kv

    def release(self, tokens: bytes) -> None:
        """One user less. Raises KeyError where the prompt has none."""
        entry = self._entries[tokens]
        entry.users -= 1
        if entry.users == 0:
            del self._entries[tokens]
