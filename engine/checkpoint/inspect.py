"""What `python -m engine.checkpoint` tells of a checkpoint: `inspect` what its headers say and what serving it needs,
`verify` whether it is complete, readable and finite, all of it.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.checkpoint.error import CheckpointError
from engine.checkpoint.files import DTYPES, StoredTensor, TensorFiles, make_buffer
from engine.checkpoint.footprint import CUDA_BYTES, GIB, Footprint, footprint
from engine.checkpoint.names import DIT, TEXT, UNUSED
from engine.checkpoint.open import CheckpointFiles
from engine.model.weights import build_model, is_finite

CARDS_GIB = (24, 48, 80, 141)
_COMPONENTS = (
    ("DiT", DIT),
    ("text encoder", TEXT),
    ("image encoder", "action_head.image_encoder."),
    ("VAE", "action_head.vae."),
)
_NAMES_SHOWN = 8


def summarize(name: str, files: CheckpointFiles, cards_gib: Sequence[float]) -> Iterator[str]:
    """The lines. cards_gib: memory of GPUs to say the number of sessions for."""
    weights, dit = files.weights, files.config.dit
    shards = {stored.file for stored in weights.entries.values()}
    wanted = build_model(files.config).entry_shapes()
    yield f"checkpoint     {name}: {len(weights.entries)} entries in {_count(len(shards), 'file')}"
    yield (
        f"backbone       {dit.model_type}: width {dit.dim}, {dit.num_heads} heads, {dit.num_layers} layers, "
        f"{dit.frame_seqlen} tokens a latent frame, window of {dit.window_frames} frames"
    )
    yield f"camera view    {files.config.view_height}x{files.config.view_width}"
    yield f"LoRA           {_lora(files)}"
    yield f"embodiments    {', '.join(sorted(files.statistics)) or 'none: no statistics'}"
    relative = files.training.relative_keys
    yield f"relative       {'as the embodiment says' if relative is None else ', '.join(relative) or 'no action'}"
    yield ""
    yield f"{'component':14} {'parameters':>12} {'size':>11}  dtype"
    for component, prefix in _COMPONENTS:
        yield _component(component, [s for entry, s in weights.entries.items() if entry.startswith(prefix)])
    yield ""
    unknown = sorted(weights.entries.keys() - wanted.keys() - UNUSED)
    problems = weights.problems(wanted)
    yield f"not used       {len(weights.entries.keys() & UNUSED)} entries, as in the release"
    yield f"unknown        {_listed(unknown)}"
    yield f"problems       {_listed(problems, '; ')}"
    yield ""
    yield "GPU memory of serving in bfloat16"
    yield from _memory(footprint(files.config), cards_gib)
    yield "with --fp8"
    yield from _memory(footprint(files.config, fp8=True), cards_gib)
    yield "with --fp8 --text-encoder-device cpu"
    yield from _memory(footprint(files.config, fp8=True, text_encoder_on_host=True), cards_gib)


def _lora(files: CheckpointFiles) -> str:
    if not files.weights.adapters:
        return "no"
    rank, alpha = files.config.lora_rank, files.config.lora_alpha
    return f"{len(files.weights.adapters)} adapters of rank {rank}, alpha {alpha:g}, merged when loaded"


def _component(name: str, entries: list[StoredTensor]) -> str:
    parameters = sum(math.prod(stored.shape) for stored in entries)
    dtypes = Counter(stored.dtype for stored in entries)
    listed = ", ".join(dtype for dtype, _ in dtypes.most_common()) or "-"
    return f"{name:14} {_billions(parameters):>12} {_gib(sum(stored.size for stored in entries)):>11}  {listed}"


def _memory(need: Footprint, cards_gib: Sequence[float]) -> Iterator[str]:
    yield f"  weights          {_gib(need.weights):>11}   (and {_gib(need.host_weights)} in the host's memory)"
    yield f"  steady features  {_gib(need.steady):>11}   (of grey frames, which the VAE need not encode again)"
    yield f"  while encoding   {_gib(need.activations):>11}"
    yield f"  CUDA graphs      {_gib(need.graphs):>11}   (none with --execution eager)"
    yield f"  CUDA             {_gib(CUDA_BYTES):>11}   (allowance)"
    yield f"  first session    {_gib(need.session):>11}"
    for card in cards_gib:
        yield f"  card of {card:g} GiB".ljust(20) + _fits(need, int(card * GIB))


def _fits(need: Footprint, card_bytes: int) -> str:
    if sessions := need.sessions(card_bytes):
        return f"fits, {_count(sessions, 'session')} at once"
    if sessions := replace(need, graphs=0).sessions(card_bytes):
        return f"fits with --execution eager, {_count(sessions, 'session')} at once"
    return f"too small: needs {_gib(need.needed)}"


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 100 * 2**20 else f"{size / 2**20:.2f} MiB"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _listed(lines: Sequence[str], separator: str = ", ") -> str:
    if not lines:
        return "none"
    more = f"{separator}and {len(lines) - _NAMES_SHOWN} more" if len(lines) > _NAMES_SHOWN else ""
    return f"{len(lines)}: {separator.join(lines[:_NAMES_SHOWN])}{more}"


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
