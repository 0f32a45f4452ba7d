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
from engine.checkpoint.names import CheckpointEntry, Entries, dit_entries, image_entries, text_entries, vae_entries
from engine.model.config import ModelConfig
from engine.model.dit import DiT
from engine.model.fp8 import FP8, Fp8Linear, use_fp8
from engine.model.text import build_text_encoder
from engine.model.vae import build_vae, prepare_convolutions
from engine.model.video_encoder import VideoEncoder
from engine.model.vision import build_image_encoder


class Weights(Protocol):
    """A source of weights: a checkpoint on disk, or synthetic ones."""

    def read(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint entries of these names and shapes, each once, in any order, anywhere, in any floating dtype.

        Each may be overwritten once the next is asked for. Raises CheckpointError.
        """
        ...

    def where(self, name: str) -> str:
        """Where an entry stands, for a message."""
        ...


@dataclass(frozen=True)
class Model:
    """The four components on one device, the text encoder perhaps on the CPU; in evaluation mode, without gradients.

    video_encoder: encodes with the VAE's weights. What it keeps belongs to the model, so that all who run it share it.
    """

    config: ModelConfig
    dit: DiT
    text_encoder: UMT5EncoderModel
    image_encoder: CLIPVisionModel
    vae: AutoencoderKLWan
    video_encoder: VideoEncoder

    def components(self) -> Iterator[tuple[nn.Module, Entries]]:
        """Each component with its parameters' names and where they stand in a checkpoint."""
        yield self.dit, dit_entries(self.dit)
        yield self.text_encoder, text_entries(self.text_encoder)
        yield self.image_encoder, image_entries(self.image_encoder)
        yield self.vae, vae_entries(self.vae, self.config.vae.wan22)

    def entry_shapes(self) -> dict[str, tuple[int, ...]]:
        """All checkpoint entries that the model uses."""
        return {entry.name: entry.shape for _, entries in self.components() for _, entry in entries}


def build_model(config: ModelConfig, fp8: bool = False) -> Model:
    """The model on the `meta` device: shapes without memory. fp8: for the linear layers of the DiT's blocks."""
    with torch.device("meta"):
        dit = DiT(config.dit, config.image, config.max_action_dim, config.max_state_dim)
        if fp8:
            use_fp8(dit.blocks)
        vae = build_vae(config.vae).eval()
        return Model(
            config=config,
            dit=dit.eval(),
            text_encoder=build_text_encoder(config.text).eval(),
            image_encoder=build_image_encoder(config.image).eval(),
            vae=vae,
            video_encoder=VideoEncoder(vae),
        )


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of weights: on the device, and in the host's memory."""

    device: int
    host: int


def weight_bytes(
    config: ModelConfig, dtype: torch.dtype, fp8: bool = False, text_encoder_on_host: bool = False
) -> WeightBytes:
    """What `load_model` puts where."""
    model = build_model(config, fp8)
    everything = sum(_weight_bytes(module, dtype) for module, _ in model.components())
    host = _weight_bytes(model.text_encoder if text_encoder_on_host else model.text_encoder.shared, dtype)
    return WeightBytes(everything - host, host)


def _weight_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    scales = sum(part.scale.nbytes for part in module.modules() if isinstance(part, Fp8Linear))
    return scales + sum(p.nbytes if p.dtype == FP8 else p.numel() * dtype.itemsize for p in module.parameters())


def load_model(
    config: ModelConfig,
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype,
    fp8: bool = False,
    text_encoder_device: torch.device | None = None,
    vae_channels_last: bool = True,
) -> Model:
    """Build the model and give every parameter its weights, entry by entry, onto `device` in `dtype`.

    fp8: hold the weights of the DiT's blocks in float8, each quantised as it comes: never two of them at once are there
    in another dtype. text_encoder_device: where the text encoder goes instead. Its embedding table stays on the CPU in
    any case: of a checkpoint's largest entry a prompt needs a few rows. vae_channels_last: see `prepare_convolutions`.
    Raises CheckpointError; before anything is put on the device where the files' headers tell.
    """
    model = build_model(config, fp8)
    places = defaultdict(list)
    for module, entries in model.components():
        for name, entry in entries:
            places[entry.name].append((module, name, entry))
    for entry_name, tensor in weights.read(model.entry_shapes()):
        for module, name, entry in places[entry_name]:
            place = device
            if module is model.text_encoder:
                place = torch.device("cpu") if name == "shared.weight" else text_encoder_device or device
            if not _set_parameter(module, name, tensor, entry, place, dtype):
                raise CheckpointError(f"{weights.where(entry_name)} holds NaN or infinite values")
    prepare_convolutions(model.vae, vae_channels_last)
    if device.type == "cuda" and dtype == torch.float32:
        torch.backends.cudnn.allow_tf32 = False  # its default for convolutions is a tenth of float32's digits
    # What `meta` left without content: a tied parameter and a table of positions.
    model.text_encoder.encoder.embed_tokens = model.text_encoder.shared
    embeddings = model.image_encoder.embeddings
    embeddings.position_ids = torch.arange(config.image.tokens, device=device)[None]
    return model


def _set_parameter(
    module: nn.Module, name: str, weights: Tensor, entry: CheckpointEntry, device: torch.device, dtype: torch.dtype
) -> bool:
    """Give a parameter, or its part, the entry's weights, on `device` in `dtype`. Returns whether they are finite."""
    owner = module.get_submodule(name.rpartition(".")[0])
    leaf = name.rpartition(".")[2]
    parameter: Tensor = getattr(owner, leaf)
    rows_shape = parameter.chunk(entry.parts)[entry.part].shape
    weights = weights.chunk(entry.chunks)[entry.chunk].reshape(rows_shape)
    if isinstance(owner, Fp8Linear) and leaf == "weight":
        # What becomes float8 is rounded once, from the dtype that it comes in.
        weights = weights.to(device, copy=True, memory_format=torch.contiguous_format)
        finite = is_finite(weights)
        if finite:
            owner.set_weight(weights, entry.part, entry.parts)
        return finite
    if parameter.is_meta:
        parameter = nn.Parameter(torch.empty(parameter.shape, device=device, dtype=dtype), requires_grad=False)
        setattr(owner, leaf, parameter)
    rows = parameter.data.chunk(entry.parts)[entry.part]
    rows.copy_(weights)
    return is_finite(rows)


def is_finite(values: Tensor) -> bool:
    """Whether floating-point values hold neither NaN nor infinities."""
    # One NaN or infinity makes the sum no number; a sum that is none for another reason is looked at closely.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
