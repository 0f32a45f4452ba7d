"""What serving a checkpoint needs of a GPU's memory, found without one."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.config import ModelConfig
from engine.loading import kv_geometry
from engine.model import Model, build_model, weight_bytes
from engine.settings import EngineSettings
from engine.vae import encode_video
from kv_cache.paged_kv import KVGeometry
from kv_cache.sizing import NotEnoughMemory, one_session_bytes, plan_budget
from kv_cache.window import WindowPolicy

GIB = 2**30
CUDA_BYTES = GIB
"""An allowance for what CUDA and its libraries take for themselves: context, kernels, workspaces."""

_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Footprint:
    """Bytes of serving in bfloat16.

    weights: on the GPU. host_weights: in the host's memory, the text encoder or its embedding table. activations: the
    most that a call takes for a while (the video encoder's). session: K/V of one robot's full window, with what all
    share.
    """

    weights: int
    host_weights: int
    activations: int
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
        return self.weights + self.activations + CUDA_BYTES


def footprint(config: ModelConfig, fp8: bool = False, text_encoder_on_host: bool = False) -> Footprint:
    """The footprint of a checkpoint of these sizes. Takes a second or two, and no memory to speak of."""
    model = build_model(config)
    weights = weight_bytes(config, _DTYPE, fp8, text_encoder_on_host)
    geometry, window = kv_geometry(config, _DTYPE), WindowPolicy(config.dit.window_frames)
    return Footprint(
        weights=weights.device,
        host_weights=weights.host,
        activations=_encoding_bytes(model),
        session=one_session_bytes(geometry, window),
        geometry=geometry,
        window=window,
    )


def _encoding_bytes(model: Model) -> int:
    """Most bytes alive at once while a restart's video is encoded: the real operations, on shapes alone."""
    config = model.config
    shape = (1, 3, config.num_frames, config.video_height, config.video_width)
    with torch.inference_mode(), _LiveBytes() as live:
        encode_video(model.vae, torch.empty(shape, device="meta"))
    return live.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the memory of the tensors that operations return, for as long as each is referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._sizes:
                    # The parameters on `meta` are float32, so what they give is; serving computes in bfloat16.
                    self._sizes[storage._cdata] = storage.nbytes() * _DTYPE.itemsize // leaf.itemsize
                    weakref.finalize(storage, self._sizes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result
