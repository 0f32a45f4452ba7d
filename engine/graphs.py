"""CUDA graphs: forwards are captured once over static inputs and replayed from then on."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from engine.execution import DirectExecution
from engine.model.dit import CrossContext, ForwardContext, TimeEmbedding
from kv_cache.paged_kv import KVGeometry

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ROUNDING = 1e-2


class Capture(Protocol):
    """Turns work on tensors that stay where they are into what does it again, on what they hold by then."""

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A repetition of `work`, which gives its result in the same tensor every time."""
        ...


class CaptureError(RuntimeError):
    """Work cannot be captured, or what was captured does not compute what it was captured from."""


class CudaCapture:
    """Captures work as CUDA graphs, which share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # one for all: cuBLAS keeps a workspace for each

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """As Capture. Raises CaptureError where a graph cannot hold the work, as when it waits for the device."""
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
            raise CaptureError(f"a forward cannot be captured: {str(error).splitlines()[0]}") from error

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class GraphExecution:
    """Forwards captured once for each number of tokens and replayed from then on.

    The captured work reads tensors that stay, into which each run copies its inputs. Rotation, blocks and lengths are
    such inputs too, so one capture serves every fill of the window and every session. All captures read the same
    copies of the cross-attention K/V, all branches' in one, which a phase fills at its start.
    """

    def __init__(self, direct: DirectExecution, capture: Capture) -> None:
        self._direct = direct
        self._capture = capture
        self._cross: CrossContext | None = None
        self._captured: dict[tuple[int, bool], _CapturedForward] = {}

    def prefill(self, tokens: Tensor, time: TimeEmbedding, context: ForwardContext) -> None:
        """As Execution."""
        self._forward_on_static_inputs(context, self._prefill, time_rows=1).run(tokens, time)

    def forward(self, context: ForwardContext) -> Callable[[Tensor, TimeEmbedding], Tensor]:
        """As Execution."""
        return self._forward_on_static_inputs(context, self._forward, time_rows=2).run

    def _prefill(self, tokens: Tensor, time: TimeEmbedding, context: ForwardContext) -> Tensor:
        """Prefill; returns K of the last layer, on which all its work shows."""
        self._direct.prefill(tokens, time, context)
        return self._direct.kv.layers[-1].k[context.plan.stored]

    def _forward(self, tokens: Tensor, time: TimeEmbedding, context: ForwardContext) -> Tensor:
        return self._direct.forward(context)(tokens, time)

    def _forward_on_static_inputs(self, context: ForwardContext, work: "_Work", time_rows: int) -> "_CapturedForward":
        if self._cross is None:
            self._cross = context.cross.joined()
        _copy_into(self._cross.apart(), context.cross)
        length = context.rotation.cos.shape[0]
        key = (length, time_rows == 1)
        if key not in self._captured:
            static = ForwardContext(_copy(context.rotation), _copy(context.plan), self._cross)
            dim, like = self._direct.dit.config.dim, self._direct.dit.patch_embedding.weight
            tokens = torch.randn(1, length, dim, device=like.device, dtype=like.dtype)
            time = TimeEmbedding(*(tokens.new_zeros(time_rows, *shape) for shape in ((dim,), (6, dim))))
            self._captured[key] = _CapturedForward(work, tokens, time, static, self._capture)
        self._captured[key].take(context)
        return self._captured[key]


_Work = Callable[[Tensor, TimeEmbedding, ForwardContext], Tensor]


def graph_copies_bytes(geometry: KVGeometry) -> int:
    """Of the cross-attention K/V that captures keep copies of: each branch's text and the image."""
    return geometry.branches * geometry.text_bytes + geometry.image_bytes


class _CapturedForward:
    """One forward, captured on tensors that stay. Raises CaptureError where a replay gives another result."""

    def __init__(
        self, work: _Work, tokens: Tensor, time: TimeEmbedding, context: ForwardContext, capture: Capture
    ) -> None:
        self._tokens = tokens
        self._time = time
        self._context = context
        self._replay = capture(lambda: work(tokens, time, context))
        tokens.normal_()  # not what it was captured with
        time.e0.normal_()
        _require_equal(self._replay, lambda: work(tokens, time, context))
        logger.info("captured a forward of %d tokens", tokens.shape[1])

    def take(self, context: ForwardContext) -> None:
        """Copy rotation and plan of a phase in."""
        _copy_into(self._context.rotation, context.rotation)
        _copy_into(self._context.plan, context.plan)

    def run(self, tokens: Tensor, time: TimeEmbedding) -> Tensor:
        """The result, which the next run overwrites."""
        _copy_into(self._tokens, tokens)
        _copy_into(self._time, time)
        return self._replay()


class CapturedFunction:
    """A function of one tensor, captured once for each shape that it meets. Raises CaptureError as captures do."""

    def __init__(self, function: Callable[[Tensor], Tensor], capture: Capture) -> None:
        self._function = function
        self._capture = capture
        self._captured: dict[torch.Size, tuple[Tensor, Callable[[], Tensor]]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """The function's result, as a tensor of its own."""
        if x.shape not in self._captured:
            static = x.clone()
            replay = self._capture(lambda: self._function(static))
            static.uniform_(-1, 1)  # not what it was captured with
            _require_equal(replay, lambda: self._function(static))
            self._captured[x.shape] = (static, replay)
        static, replay = self._captured[x.shape]
        static.copy_(x)
        return replay().clone()


def _require_equal(replay: Callable[[], Tensor], work: Callable[[], Tensor]) -> None:
    """Raises CaptureError where a replay's result is not the work's, but for how sums round in half precision."""
    replayed, expected = replay().float().clone(), work().float()
    error = float(torch.linalg.vector_norm(replayed - expected) / torch.linalg.vector_norm(expected))
    if not error <= _ROUNDING:
        raise CaptureError(f"a replay differs from what was captured by {error:.1e} of its size")


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
    for static, given in zip(_tensors(target), _tensors(source), strict=True):
        static.copy_(given)
