"""What serving a checkpoint needs of a GPU's memory, found without one."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.graphs import graph_copies_bytes
from engine.model.config import ModelConfig
from engine.model.weights import Model, build_model, weight_bytes
from engine.settings import EngineSettings
from engine.startup import kv_geometry
from kv_cache.paged_kv import KVGeometry
from kv_cache.sizing import NotEnoughMemory, one_session_bytes, plan_budget
from kv_cache.window import WindowPolicy


class LiveBytes(TorchDispatchMode):
    """Counts the bytes that operations allocate while it is entered, for as long as each is referred to.

    peak: the most so far; may be set to 0 to begin anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[int, int] = {}

    @property
    def now(self) -> int:
        """Bytes alive."""
        return sum(self._sizes.values())

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note what it made; a view of what it was given is not made."""
        result = function(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._sizes and storage._cdata not in given:
                    self._sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._sizes.pop, storage._cdata)
        self.peak = max(self.peak, self.now)
        return result


GIB = 2**30
CUDA_BYTES = GIB
"""An allowance for what CUDA and its libraries take for themselves: context, kernels, workspaces."""

_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Footprint:
    """Bytes of serving in bfloat16, the forwards captured as CUDA graphs.

    weights: on the GPU. host_weights: in the host's memory, the text encoder or its embedding table. steady: features
    of grey frames that the video encoder keeps. activations: the most that a call takes for a while (the video
    encoder's). graphs: what captures keep for themselves, copies of
    one session's cross-attention K/V and memory for the activations once more, which nothing else may use. session:
    K/V of one robot's full window, with what all share.
    """

    weights: int
    host_weights: int
    steady: int
    activations: int
    graphs: int
    session: int
    geometry: KVGeometry
    window: WindowPolicy

    @property
    def needed(self) -> int:
        """The smallest card's bytes at which the default share of free memory holds one session."""
        return self._fixed + int(self.session / EngineSettings().kv_fraction)

    def sessions(self, card_bytes: int) -> int:
        """How many sessions hold their full windows at once on a GPU of that memory, with default settings."""
        free = max(0, card_bytes - self._fixed)
        try:
            return plan_budget(self.geometry, self.window, int(EngineSettings().kv_fraction * free)).sessions
        except NotEnoughMemory:
            return 0

    @property
    def _fixed(self) -> int:
        return self.weights + self.steady + self.activations + self.graphs + CUDA_BYTES


def footprint(config: ModelConfig, fp8: bool = False, text_encoder_on_host: bool = False) -> Footprint:
    """The footprint of a checkpoint of these sizes. Takes a second or two, and no memory to speak of."""
    model = build_model(config)
    weights = weight_bytes(config, _DTYPE, fp8, text_encoder_on_host)
    geometry, window = kv_geometry(config, _DTYPE), WindowPolicy(config.dit.window_frames)
    steady, activations = _encoding_bytes(model)
    return Footprint(
        weights=weights.device,
        host_weights=weights.host,
        steady=steady,
        activations=activations,
        graphs=graph_copies_bytes(geometry) + activations,
        session=one_session_bytes(geometry, window),
        geometry=geometry,
        window=window,
    )


def _encoding_bytes(model: Model) -> tuple[int, int]:
    """Bytes kept from the first encoding of a restart's video on, and the most alive at once while it goes on.

    By the real operations, on shapes alone.
    """
    config = model.config
    model.vae.bfloat16()
    image = torch.empty(1, 3, 1, config.video_height, config.video_width, dtype=_DTYPE, device="meta")
    with torch.inference_mode(), LiveBytes() as live:
        model.video_encoder.encode_still(image, config.num_frames - 1)
    return live.now, live.peak  # the peak comes before anything is kept
