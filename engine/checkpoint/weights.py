"""The weights of a checkpoint on disk, streamed in the order they lie in, adapters merged on the way."""

import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from engine.checkpoint.error import CheckpointError
from engine.checkpoint.files import DTYPES, StoredTensor, TensorFiles, make_buffer
from engine.checkpoint.lora import Adapter, check_adapter, merge

Shapes = Mapping[str, tuple[int, ...]]


class StoredWeights:
    """Entries by the names that a plain checkpoint has.

    directory: for messages. entries: plain weights. adapters: LoRA, by the weight each belongs to. lora_rank,
    lora_alpha: of all adapters; needed where there are any.
    """

    def __init__(
        self,
        directory: Path,
        entries: Mapping[str, StoredTensor],
        adapters: Mapping[str, Adapter],
        lora_rank: int = 0,
        lora_alpha: float = 0.0,
    ) -> None:
        self._directory = directory
        self.entries = entries
        self.adapters = adapters
        self._rank = lora_rank
        self._alpha = lora_alpha

    def where(self, name: str) -> str:
        """File and entry of a weight, for a message."""
        return str(self.entries[name])

    def problems(self, shapes: Shapes) -> list[str]:
        """What keeps weights of these names and shapes from being read, as far as the headers tell, a line each."""
        return [problem for name, shape in shapes.items() if (problem := self._problem(name, shape))] + [
            f"{adapter.a} adapts {target!r}, which the model does not have"
            for target, adapter in self.adapters.items()
            if target not in shapes
        ]

    def read(self, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        """Each weight in its shape, on the CPU, in the file's dtype (float32 where an adapter was merged).

        Each is overwritten some time after the next is asked for, since one is read ahead. Raises CheckpointError,
        before the first weight where a header tells.
        """
        if problems := self.problems(shapes):
            more = f" (and {len(problems) - 1} more such entries)" if problems[1:] else ""
            raise CheckpointError(problems[0] + more)
        order = sorted(shapes, key=lambda name: (self.entries[name].file, self.entries[name].start))
        halves = [half for adapter in self.adapters.values() for half in (adapter.a, adapter.b)]
        stored = [self.entries[name] for name in order] + halves
        buffers = itertools.cycle([make_buffer(stored), make_buffer(stored)])
        with TensorFiles(sum(each.size for each in stored)) as files, ThreadPoolExecutor(1) as reader:
            reads = (reader.submit(self._weight, name, files, next(buffers)) for name in order)
            for name, weight in zip(order, _one_ahead(reads), strict=True):
                yield name, weight.reshape(shapes[name])

    def _weight(self, name: str, files: TensorFiles, buffer: Tensor) -> Tensor:
        adapter = self.adapters.get(name)
        if adapter is None:
            return files.tensor(self.entries[name], buffer)
        a, b = (files.tensor(half, buffer).clone() for half in (adapter.a, adapter.b))
        return merge(files.tensor(self.entries[name], buffer), a, b, self._alpha / self._rank)

    def _problem(self, name: str, shape: tuple[int, ...]) -> str | None:
        stored = self.entries.get(name)
        if stored is None:
            if adapter := self.adapters.get(name):
                return f"{adapter.a} adapts {name!r}, but there is no such weight: --base-checkpoint must name its base"
            return f"{self._directory} has no entry {name!r}, expected with shape {list(shape)}"
        # Norm scales of a VAE may differ in trailing dimensions of one (model.md section 8).
        if _without_ones(stored.shape) != _without_ones(shape):
            return f"{stored} has shape {list(stored.shape)}, expected {list(shape)}"
        if stored.dtype not in DTYPES:
            return f"{stored} has dtype {stored.dtype}, expected one of {', '.join(DTYPES)}"
        if adapter := self.adapters.get(name):
            try:
                check_adapter(name, stored.shape, adapter, self._rank)
            except CheckpointError as error:
                return str(error)
        return None


def _one_ahead(futures: Iterator[Future[Tensor]]) -> Iterator[Tensor]:
    """The results, one by one; while one is used, the next future is under way."""
    for future, _ in itertools.pairwise(itertools.chain(futures, [None])):
        if future is not None:
            yield future.result()


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]
