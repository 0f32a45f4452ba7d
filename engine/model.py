"""The complete model: transformer and encoders, built from a config, with weights from any source."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn
from transformers import CLIPVisionModel, UMT5EncoderModel

from engine.checkpoint.error import CheckpointError
from engine.checkpoint_names import Entry, dit_entries, image_entries, text_entries, vae_entries
from engine.config import ModelConfig
from engine.dit import DiT
from engine.text import build_text_encoder
from engine.vae import build_vae, use_onednn
from engine.vision import build_image_encoder


class Weights(Protocol):
    """A source of weights: a checkpoint on disk, or synthetic ones."""

    def read(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint entries of these names and shapes, each once, in any order, on the CPU, in any floating dtype.

        Each may be overwritten once the next is asked for. Raises CheckpointError.
        """
        ...

    def where(self, name: str) -> str:
        """Where an entry stands, for a message."""
        ...


@dataclass(frozen=True)
class Model:
    """The four components on one device, in evaluation mode, without gradients."""

    config: ModelConfig
    dit: DiT
    text_encoder: UMT5EncoderModel
    image_encoder: CLIPVisionModel
    vae: AutoencoderKLWan

    def components(self) -> Iterator[tuple[nn.Module, dict[str, Entry]]]:
        """Each component with its parameters' names and where they stand in a checkpoint."""
        yield self.dit, dit_entries(self.dit)
        yield self.text_encoder, text_entries(self.text_encoder)
        yield self.image_encoder, image_entries(self.image_encoder)
        yield self.vae, vae_entries(self.vae, self.config.vae.wan22)

    def entry_shapes(self) -> dict[str, tuple[int, ...]]:
        """All checkpoint entries that the model uses."""
        return {entry.name: entry.shape for _, entries in self.components() for entry in entries.values()}


def build_model(config: ModelConfig) -> Model:
    """The model on the `meta` device: shapes without memory."""
    with torch.device("meta"):
        return Model(
            config=config,
            dit=DiT(config.dit, config.image, config.max_action_dim, config.max_state_dim).eval(),
            text_encoder=build_text_encoder(config.text).eval(),
            image_encoder=build_image_encoder(config.image).eval(),
            vae=build_vae(config.vae).eval(),
        )


def device_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of weights on the device: all but the text encoder's embedding table, see `load_model`."""
    model = build_model(config)
    parameters = sum(p.numel() for module, _ in model.components() for p in module.parameters())
    return (parameters - model.text_encoder.shared.weight.numel()) * dtype.itemsize


def load_model(config: ModelConfig, weights: Weights, device: torch.device, dtype: torch.dtype) -> Model:
    """Build the model and give every parameter its weights, entry by entry, onto `device` in `dtype`.

    The text encoder's embedding table stays on the CPU: of a checkpoint's largest entry a prompt needs a few rows.
    Raises CheckpointError; before anything is put on the device where the files' headers tell.
    """
    model = build_model(config)
    places = defaultdict(list)
    for module, entries in model.components():
        for name, entry in entries.items():
            places[entry.name].append((module, name, entry))
    for entry_name, tensor in weights.read(model.entry_shapes()):
        for module, name, entry in places[entry_name]:
            on_host = module is model.text_encoder and name == "shared.weight"
            _set_parameter(module, name, tensor, entry, torch.device("cpu") if on_host else device, dtype)
            if not is_finite(module.get_parameter(name)):
                raise CheckpointError(f"{weights.where(entry_name)} holds NaN or infinite values")
    use_onednn(model.vae)
    # What `meta` left without content: a tied parameter and a table of positions.
    model.text_encoder.encoder.embed_tokens = model.text_encoder.shared
    embeddings = model.image_encoder.embeddings
    embeddings.position_ids = torch.arange(config.image.tokens, device=device)[None]
    return model


def _set_parameter(
    module: nn.Module, name: str, weights: Tensor, entry: Entry, device: torch.device, dtype: torch.dtype
) -> None:
    owner = module.get_submodule(name.rpartition(".")[0])
    leaf = name.rpartition(".")[2]
    part = weights.chunk(entry.chunks)[entry.chunk].reshape(getattr(owner, leaf).shape)
    part = part.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
    setattr(owner, leaf, nn.Parameter(part, requires_grad=False))


def is_finite(values: Tensor) -> bool:
    """Whether floating-point values hold neither NaN nor infinities."""
    # One NaN or infinity makes the sum no number; a sum that is none for another reason is looked at closely.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
