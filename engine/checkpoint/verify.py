"""Whether a checkpoint is complete, readable and finite, all of it."""

from collections.abc import Iterator

from engine.checkpoint.error import CheckpointError
from engine.checkpoint.opening import CheckpointFiles
from engine.checkpoint.safetensors_file import DTYPES, TensorFiles, make_buffer
from engine.model.weights import build_model, is_finite


def find_problems(files: CheckpointFiles) -> Iterator[str]:
    """A line for each thing wrong with the weights: an entry missing, of a wrong shape, unreadable, not finite.

    Entries that the model does not use are read too, adapters apart from what they adapt.
    """
    weights = files.weights
    yield from weights.problems(build_model(files.config).entry_shapes())
    halves = [half for adapter in weights.adapters.values() for half in (adapter.a, adapter.b)]
    readable = [stored for stored in (*weights.entries.values(), *halves) if stored.dtype in DTYPES]
    buffer = make_buffer(readable)
    with TensorFiles(sum(stored.size for stored in readable)) as reader:
        for stored in sorted(readable, key=lambda stored: (stored.file, stored.start)):
            try:
                if not is_finite(reader.tensor(stored, buffer)):
                    yield f"{stored} holds NaN or infinite values, expected finite ones"
            except CheckpointError as error:
                yield str(error)
