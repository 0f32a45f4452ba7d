"""Video to latents, piece by piece: a first frame, then four at a time (model.md sections 4.4, 4.5 and 8).

Computes what diffusers' encoder of the Wan VAE computes, over the same modules, with less work: convolutions pad in
space themselves, a first frame takes one tap of three in time, norms and activations work in place. And what grey
frames give is not computed for every image: see `VideoEncoder.encode_still`.
"""

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanCausalConv3d,
    WanEncoder3d,
    WanResample,
    WanResidualBlock,
    WanResidualDownBlock,
    WanRMS_norm,
    patchify,
)
from torch import Tensor, nn

from engine.execution import compile_variants
from engine.model.vae import convolve

_PIECE = 4
"""Frames of every piece but the first, which give one latent frame."""

_Seen = dict[nn.Module, Tensor]
"""The last frames that each convolution in time saw of the pieces before: (1, C, 2, h, w), or 1 where it strides."""

_Step = Callable[..., Tensor]
"""From a module, a piece's features and what the module's convolutions saw to the features behind it."""


class VideoEncoder:
    """The encoder of a VAE, whose weights stay where they are.

    Where asked to, it runs compiled, which is fewer passes over memory. Compiled is module by module, at the first run:
    where a walk begins and ends changes from piece to piece, and not what a module does. Not on a CPU in float32, whose
    convolutions (see `convolve`) no compiler follows.
    """

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self._vae = vae
        first, *others = vae.encoder.down_blocks
        self._stages: list[tuple[nn.Module, ...]] = [(vae.encoder.conv_in, first), *((each,) for each in others)]
        self._steady_from = list(_steady_from(self._stages))
        self._steady: dict[torch.Size, dict[int, Tensor]] = {}

    def encode(self, video: Tensor, compiled: bool = False) -> Tensor:
        """Latents (1, z, F, H, W), the distribution's mode, of video (1, 3, 1 + 4 (F - 1), h, w) in [-1, 1]."""
        walk = self._walk(compiled)
        pieces = self._patches(video).split([1] + [_PIECE] * (video.shape[2] // _PIECE), dim=2)
        return self._latents([walk.end(walk.down(piece, 0, len(self._stages))) for piece in pieces])

    def encode_still(self, image: Tensor, grey_frames: int, compiled: bool = False) -> Tensor:
        """What `encode` gives, to the bit, for an image (1, 3, 1, h, w) and grey frames, a multiple of four, after it.

        A stage looks only so far back in time. From some piece on the first stages see nothing but grey and give the
        same for every image: that is computed at the first call for each size and kept from then on.
        """
        steady = self._steady.setdefault(image.shape[3:], {})
        grey = self._patches(image.new_zeros(1, 3, _PIECE, *image.shape[3:]))
        walk = self._walk(compiled)
        encoded = []
        for index in range(1 + grey_frames // _PIECE):
            x, done = grey if index else self._patches(image), 0
            blind = sum(first <= index for first in self._steady_from)  # stages that see nothing but grey
            if known := [stages for stages in steady if stages <= blind]:
                done = max(known)
                x = steady[done]
            x = walk.down(x, done, blind)
            if blind > done:
                steady[blind] = x
            encoded.append(walk.end(walk.down(x, blind, len(self._stages))))
        return self._latents(encoded)

    def _walk(self, compiled: bool) -> "_Walk":
        return _Walk(self._vae.encoder, self._stages, *(self._compiled if compiled else (_down, _end)))

    @cached_property
    def _compiled(self) -> tuple[_Step, _Step]:
        return compile_variants(_down), compile_variants(_end)

    def _patches(self, video: Tensor) -> Tensor:
        size: int | None = self._vae.config.patch_size
        return video if size is None else patchify(video, size)

    def _latents(self, pieces: list[Tensor]) -> Tensor:
        return _convolution(self._vae.quant_conv, torch.cat(pieces, dim=2)).chunk(2, dim=1)[0]


class _Walk:
    """The way of one video's pieces, which it remembers."""

    def __init__(self, encoder: WanEncoder3d, stages: list[tuple[nn.Module, ...]], down: _Step, end: _Step) -> None:
        self._encoder = encoder
        self._stages = stages
        self._down = down
        self._end = end
        self._seen: dict[nn.Module, _Seen] = {}

    def down(self, x: Tensor, begin: int, end: int) -> Tensor:
        """A piece through the stages from `begin` on, up to `end`."""
        for stage in self._stages[begin:end]:
            for module in stage:
                x = self._down(module, x, self._seen.setdefault(module, {}))
        return x

    def end(self, x: Tensor) -> Tensor:
        """Moments (1, 2 z, 1, H, W) of a piece's deepest features."""
        return self._end(self._encoder, x, self._seen.setdefault(self._encoder, {}))


def _steady_from(stages: list[tuple[nn.Module, ...]]) -> Iterator[int]:
    """For each stage, the first piece in which it sees nothing of a video's first frame, through all stages before."""
    frame, per_piece = 1, _PIECE  # the first frame that does not see it, counted at the stage's own rate
    for stage in stages:
        for module in (part for each in stage for part in each.modules()):
            if isinstance(module, WanCausalConv3d) and module.kernel_size[0] == 3:
                if module.stride[0] == 2:  # frame h of the result is made of 2h - 2, 2h - 1 and 2h
                    frame, per_piece = (frame + 1) // 2 + 1, per_piece // 2
                else:
                    frame += 2
        yield (frame + per_piece - 2) // per_piece + 1  # piece i begins with frame per_piece * (i - 1) + 1


def _down(module: nn.Module, x: Tensor, seen: _Seen) -> Tensor:
    """A piece's features (1, C, T, h, w) one step deeper."""
    match module:
        case WanCausalConv3d():
            return _causal(module, x, seen)
        case WanResidualBlock():
            return _residual(module, x, seen)
        case WanResample():
            return _downsample(module, x, seen)
        case WanResidualDownBlock():
            shortcut = module.avg_shortcut(x)
            for resnet in module.resnets:
                x = _residual(resnet, x, seen)
            if module.downsampler is not None:
                x = _downsample(module.downsampler, x, seen)
            return x + shortcut
    raise TypeError(f"no part of a Wan encoder: {type(module).__name__}")


def _end(encoder: WanEncoder3d, x: Tensor, seen: _Seen) -> Tensor:
    """From the deepest features to the moments: the middle block and the last convolution."""
    first, *others = encoder.mid_block.resnets
    x = _residual(first, x, seen)
    for attention, resnet in zip(encoder.mid_block.attentions, others, strict=True):
        x = _residual(resnet, attention(x), seen)
    return _causal(encoder.conv_out, _norm_silu(encoder.norm_out, x), seen)


def _residual(block: WanResidualBlock, x: Tensor, seen: _Seen) -> Tensor:
    shortcut = x if isinstance(block.conv_shortcut, nn.Identity) else _convolution(block.conv_shortcut, x)
    x = _causal(block.conv1, _norm_silu(block.norm1, x), seen)
    x = _causal(block.conv2, _norm_silu(block.norm2, x), seen)
    return x.add_(shortcut)


def _downsample(block: WanResample, x: Tensor, seen: _Seen) -> Tensor:
    x = block.resample(x[0].transpose(0, 1)).transpose(0, 1)[None]  # its images are our frames
    if block.mode == "downsample2d":
        return x
    last = seen.get(block.time_conv)
    seen[block.time_conv] = x[:, :, -1:].clone()
    return x if last is None else _convolution(block.time_conv, torch.cat([last, x], dim=2))


def _norm_silu(norm: WanRMS_norm, x: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32).clamp_min_(1e-12)
    normal = torch.div(x, size).mul_(norm.gamma.float() * norm.scale).to(x.dtype)  # in float32, as `size` is
    return F.silu(normal, inplace=True)


def _causal(conv: WanCausalConv3d, x: Tensor, seen: _Seen) -> Tensor:
    """A convolution that looks two frames back: into the piece before, or at nothing before the first frame."""
    if conv in seen:
        x = torch.cat([seen[conv], x], dim=2)
        seen[conv] = x[:, :, -2:].clone()
        return _convolution(conv, x)
    seen[conv] = F.pad(x, (0, 0, 0, 0, 1, 0))
    return _convolution(conv, x, conv.weight[:, :, -1:])


def _convolution(conv: WanCausalConv3d, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """One that pads in space alone; with another weight where given."""
    left, _, top, *_ = conv._padding
    return convolve(x, conv.weight if weight is None else weight, conv.bias, conv.stride, (0, top, left))
