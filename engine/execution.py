"""How the DiT's forwards are run: as they stand, compiled, or recorded as CUDA graphs.

Every way takes the same inputs and gives the same numbers; what differs is who launches the kernels, and when.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from engine.model.dit import CrossContext, DiT, ForwardContext, TimeEmbedding, as_batch, run_block
from kv_cache.paged_kv import KVGeometry, PagedKV

logger = logging.getLogger(__name__)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

EXECUTIONS = ("eager", "compile", "graph")

_MOST_VARIANTS = 64
_ROUNDING = 1e-2


def compile_variants(function: F) -> F:
    """A function that is compiled when it is run, once for each variant of what it is given: shapes, modules."""
    # The default of 8 variants is for mistakes.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
    # Tokens are no multiple of 8, and to pad them for the products costs more than the products gain.
    return cast(F, torch.compile(function, fullgraph=True, dynamic=False, options={"shape_padding": False}))


class Execution(Protocol):
    """Runs forwards of one model over one pool."""

    def prefill(self, tokens: Tensor, time: TimeEmbedding, context: ForwardContext) -> None:
        """Write the K/V of video tokens (1, L, D) of every branch."""
        ...

    def forward(self, context: ForwardContext) -> Callable[[Tensor, TimeEmbedding], Tensor]:
        """The forward of a phase: tokens (1, L, D) and their time to the last hidden state (B, L, D).

        The next run may overwrite what the last one returned. The phase lasts until another one is asked for.
        """
        ...


class DirectExecution:
    """Forwards launched kernel by kernel.

    batched: whether the guidance branches go through the DiT as one batch, or one after the other. compiled: whether
    blocks are compiled at their first run, once for each number of tokens, for all blocks together.
    """

    def __init__(self, dit: DiT, kv: PagedKV, batched: bool, compiled: bool) -> None:
        self.dit = dit
        self.kv = kv
        self._batched = batched
        self._run = run_block
        if compiled:
            self._run = compile_variants(run_block)

    def prefill(self, tokens: Tensor, time: TimeEmbedding, context: ForwardContext) -> None:
        """As Execution."""
        for part in self._parts(context):
            self.dit.prefill(tokens, time, part, self.kv, self._run)

    def forward(self, context: ForwardContext) -> Callable[[Tensor, TimeEmbedding], Tensor]:
        """As Execution."""
        parts = self._parts(context)

        def run(tokens: Tensor, time: TimeEmbedding) -> Tensor:
            return as_batch([self.dit(tokens, time, part, self.kv, self._run) for part in parts])

        return run

    def _parts(self, context: ForwardContext) -> tuple[ForwardContext, ...]:
        return (context,) if self._batched else context.split()


class Recorder(Protocol):
    """Turns work on tensors that stay where they are into what does it again, on what they hold by then."""

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A repetition of `work`, which gives its result in the same tensor every time."""
        ...


class RecordingError(RuntimeError):
    """Work cannot be recorded, or what was recorded does not compute what it was recorded from."""


class CudaRecorder:
    """Records work as CUDA graphs, which share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # one for all: cuBLAS keeps a workspace for each

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """As Recorder. Raises RecordingError where a graph cannot hold the work, as when it waits for the device."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work()  # compiles, tunes, and makes what libraries keep for themselves
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory, stream=stream):
                result = work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RecordingError(f"a forward cannot be recorded: {str(error).splitlines()[0]}") from error

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class RecordedExecution:
    """Forwards recorded once for each number of tokens and replayed from then on.

    The recorded work reads tensors that stay, into which each run copies its inputs. Rotation, blocks and lengths are
    such inputs too, so one recording serves every fill of the window and every session. All recordings read the same
    copies of the cross-attention K/V, all branches' in one, which a phase fills at its start.
    """

    def __init__(self, direct: DirectExecution, recorder: Recorder) -> None:
        self._direct = direct
        self._recorder = recorder
        self._cross: CrossContext | None = None
        self._recordings: dict[tuple[int, bool], _Recording] = {}

    def prefill(self, tokens: Tensor, time: TimeEmbedding, context: ForwardContext) -> None:
        """As Execution."""
        self._recording(context, self._prefill, time_rows=1).run(tokens, time)

    def forward(self, context: ForwardContext) -> Callable[[Tensor, TimeEmbedding], Tensor]:
        """As Execution."""
        return self._recording(context, self._forward, time_rows=2).run

    def _prefill(self, tokens: Tensor, time: TimeEmbedding, context: ForwardContext) -> Tensor:
        """Prefill; returns K of the last layer, on which all its work shows."""
        self._direct.prefill(tokens, time, context)
        return self._direct.kv.layers[-1].k[context.plan.stored]

    def _forward(self, tokens: Tensor, time: TimeEmbedding, context: ForwardContext) -> Tensor:
        return self._direct.forward(context)(tokens, time)

    def _recording(self, context: ForwardContext, work: "_Work", time_rows: int) -> "_Recording":
        if self._cross is None:
            self._cross = context.cross.joined()
        _copy_into(self._cross.apart(), context.cross)
        length = context.rotation.cos.shape[0]
        key = (length, time_rows == 1)
        if key not in self._recordings:
            staying = ForwardContext(_copy(context.rotation), _copy(context.plan), self._cross)
            dim, like = self._direct.dit.config.dim, self._direct.dit.patch_embedding.weight
            tokens = torch.randn(1, length, dim, device=like.device, dtype=like.dtype)
            time = TimeEmbedding(*(tokens.new_zeros(time_rows, *shape) for shape in ((dim,), (6, dim))))
            self._recordings[key] = _Recording(work, tokens, time, staying, self._recorder)
        self._recordings[key].take(context)
        return self._recordings[key]


_Work = Callable[[Tensor, TimeEmbedding, ForwardContext], Tensor]


def graph_copies_bytes(geometry: KVGeometry) -> int:
    """Of the cross-attention K/V that recordings keep copies of: each branch's text and the image."""
    return geometry.branches * geometry.text_bytes + geometry.image_bytes


class _Recording:
    """One forward, recorded on tensors that stay. Raises RecordingError where a replay gives another result."""

    def __init__(
        self, work: _Work, tokens: Tensor, time: TimeEmbedding, context: ForwardContext, recorder: Recorder
    ) -> None:
        self._tokens = tokens
        self._time = time
        self._context = context
        self._replay = recorder(lambda: work(tokens, time, context))
        tokens.normal_()  # not what it was recorded with
        time.e0.normal_()
        _require_equal(self._replay, lambda: work(tokens, time, context))
        logger.info("recorded a forward of %d tokens", tokens.shape[1])

    def take(self, context: ForwardContext) -> None:
        """Copy rotation and plan of a phase in."""
        _copy_into(self._context.rotation, context.rotation)
        _copy_into(self._context.plan, context.plan)

    def run(self, tokens: Tensor, time: TimeEmbedding) -> Tensor:
        """The result, which the next run overwrites."""
        _copy_into(self._tokens, tokens)
        _copy_into(self._time, time)
        return self._replay()


class RecordedFunction:
    """A function of one tensor, recorded once for each shape that it meets. Raises RecordingError as recordings do."""

    def __init__(self, function: Callable[[Tensor], Tensor], recorder: Recorder) -> None:
        self._function = function
        self._recorder = recorder
        self._recordings: dict[torch.Size, tuple[Tensor, Callable[[], Tensor]]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """The function's result, as a tensor of its own."""
        if x.shape not in self._recordings:
            staying = x.clone()
            replay = self._recorder(lambda: self._function(staying))
            staying.uniform_(-1, 1)  # not what it was recorded with
            _require_equal(replay, lambda: self._function(staying))
            self._recordings[x.shape] = (staying, replay)
        staying, replay = self._recordings[x.shape]
        staying.copy_(x)
        return replay().clone()


def _require_equal(replay: Callable[[], Tensor], work: Callable[[], Tensor]) -> None:
    """Raises RecordingError where a replay's result is not the work's, but for how sums round in half precision."""
    replayed, expected = replay().float().clone(), work().float()
    error = float(torch.linalg.vector_norm(replayed - expected) / torch.linalg.vector_norm(expected))
    if not error <= _ROUNDING:
        raise RecordingError(f"a recorded run differs from the one it records by {error:.1e} of its size")


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a tensor, a tuple or a dataclass, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        parts = [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else value
        for part in parts:
            yield from _tensors(part)


def _copy(value: T) -> T:
    """The same structure with tensors of its own."""
    if isinstance(value, Tensor):
        return cast(T, value.clone())
    if isinstance(value, tuple):
        return cast(T, tuple(map(_copy, value)))
    return cast(
        T, replace(cast(Any, value), **{f.name: _copy(getattr(value, f.name)) for f in fields(cast(Any, value))})
    )


def _copy_into(target: T, source: T) -> None:
    for staying, given in zip(_tensors(target), _tensors(source), strict=True):
        staying.copy_(given)
