"""Video to latents and back (model.md sections 4.4, 4.5 and 8)."""

from collections.abc import Iterator
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify
from torch import Tensor, nn

from engine.model.config import VaeConfig

# Latent statistics of the 48-channel VAE (model.md section 8); diffusers' defaults are those of the 16-channel one.
_WAN22_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
_WAN22_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip

_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def build_vae(config: VaeConfig) -> AutoencoderKLWan:
    """A Wan VAE of the given sizes, weights not set."""
    if not config.wan22:
        return AutoencoderKLWan(base_dim=config.dim, z_dim=config.z_dim)
    return AutoencoderKLWan(
        is_residual=True,
        base_dim=config.dim,
        decoder_base_dim=config.dec_dim,
        z_dim=config.z_dim,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
        latents_mean=_WAN22_MEAN,
        latents_std=_WAN22_STD,
    )


def prepare_convolutions(vae: AutoencoderKLWan, channels_last: bool) -> None:
    """Have 3-D convolutions computed by `convolve`, and with channels innermost.

    channels_last: the layout that convolutions work in on a CPU and on a GPU alike; without it they reorder what they
    get, and their result again.
    """
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=layout)
            module._conv_forward = partial(_convolution, module, layout)  # type: ignore[method-assign]


def _convolution(
    module: nn.Conv3d, layout: torch.memory_format, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    return convolve(
        x.contiguous(memory_format=layout), weight, bias, module.stride, cast(tuple[int, ...], module.padding)
    )


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    """A 3-D convolution; on a CPU in float32 with oneDNN.

    For small inputs torch chooses a way of its own there, which takes five to eight times as long and, with large
    buffers made anew each time, lets the process's memory grow.
    """
    if _HAS_ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32:
        return torch.mkldnn_convolution(x, weight, bias, padding, stride, (1, 1, 1), 1)
    return F.conv3d(x, weight, bias, stride, padding)


def normalize_latents(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Latents (1, z, F, H, W) as the transformer has them."""
    mean, std = _statistics(vae, latents)
    return (latents - mean) / std


@torch.inference_mode()
def decode_video(vae: AutoencoderKLWan, latents: Tensor) -> Iterator[Tensor]:
    """Video in [-1, 1] of normalised latents (1, z, F, H, W), a latent frame at a time: (1, 3, 1, h, w), then of four.

    Nothing is computed before a piece is asked for, and the VAE may do other work between two pieces.
    """
    latents = latents.to(vae.dtype)
    mean, std = _statistics(vae, latents)
    hidden = vae.post_quant_conv(latents * std + mean)
    # As `vae.decode` does it, but with what the convolutions have seen kept here and not in the VAE.
    seen: list[Tensor | str | None] = [None] * sum(isinstance(each, WanCausalConv3d) for each in vae.decoder.modules())
    for index, frame in enumerate(hidden.split(1, dim=2)):
        piece = vae.decoder(frame, feat_cache=seen, feat_idx=[0], first_chunk=index == 0)
        if vae.config.patch_size is not None:
            piece = unpatchify(piece, vae.config.patch_size)
        yield piece.clamp(-1, 1)


def _statistics(vae: AutoencoderKLWan, like: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = (
        torch.tensor(values, dtype=like.dtype, device=like.device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std
