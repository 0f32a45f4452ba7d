"""The complete model: transformer and encoders, built from a config, with weights from any source."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn
from transformers import CLIPVisionModel, UMT5EncoderModel

from engine.checkpoint_names import Entry, dit_entries, image_entries, text_entries, vae_entries
from engine.config import ModelConfig
from engine.dit import DiT
from engine.text import build_text_encoder
from engine.vae import build_vae
from engine.vision import build_image_encoder

Fetch = Callable[[str, tuple[int, ...]], Tensor]
"""A source of weights: checkpoint entry name and shape to a tensor of that shape."""


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

    def entry_names(self) -> set[str]:
        """Names of all checkpoint entries that the model uses."""
        return {entry.name for _, entries in self.components() for entry in entries.values()}


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


def load_model(config: ModelConfig, fetch: Fetch, device: torch.device, dtype: torch.dtype) -> Model:
    """Build the model and give every parameter its weights, one at a time, straight onto `device` in `dtype`."""
    model = build_model(config)
    for module, entries in model.components():
        for name, entry in entries.items():
            _set_parameter(module, name, fetch(entry.name, entry.shape), entry, device, dtype)
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
    # A copy where `to` makes none: the source may be a file that is mapped or an entry that others share.
    part = part.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
    setattr(owner, leaf, nn.Parameter(part, requires_grad=False))
