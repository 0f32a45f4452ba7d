"""How the DiT's forwards are run: as they stand, compiled, or captured as CUDA graphs (see `engine.graphs`).

Every way takes the same inputs and gives the same numbers; what differs is who launches the kernels, and when.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from engine.model.dit import DiT, ForwardContext, TimeEmbedding, as_batch, run_block
from kv_cache.paged_kv import PagedKV

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

EXECUTIONS = ("eager", "compile", "graph")

_MOST_VARIANTS = 64


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

    guidance: "batched" where both branches go through the DiT at once, else "separate". compiled: whether
    blocks are compiled at their first run, once for each number of tokens, for all blocks together.
    """

    def __init__(self, dit: DiT, kv: PagedKV, guidance: str, compiled: bool) -> None:
        self.dit = dit
        self.kv = kv
        self._guidance = guidance
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
        return (context,) if self._guidance == "batched" else context.split()
