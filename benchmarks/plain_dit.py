"""Forwards of the DiT the straightforward way (model.md section 3), for `benchmarks.plain_rollout`.

The time embedding is computed for every token, the contexts and their K/V and the table of rotations in every forward,
and resident K/V is one tensor a layer, grown by `cat` and cut by slicing. The weights are the model's.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, relu, scaled_dot_product_attention, silu

from engine.model.config import DitConfig
from engine.model.weights import Model


@dataclass(frozen=True)
class Register:
    """The action register's inputs: noisy action (1, 24, 32), state (1, 1, 64), the action's timestep ()."""

    action: Tensor
    state: Tensor
    timestep: Tensor


class DenseKV:
    """One branch's resident K/V: for every layer K and V of (1, tokens, heads, head_dim)."""

    def __init__(self, layers: int, empty: Tensor, window_tokens: int) -> None:
        self._layers = [(empty, empty)] * layers
        self._window_tokens = window_tokens

    def join(self, layer: int, k: Tensor, v: Tensor, registers: int, commit: bool) -> tuple[Tensor, Tensor]:
        """Resident and current K and V; video tokens cut from the front to the window, kept where `commit`."""
        whole = tuple(
            torch.cat([old, new], dim=1)[:, -(self._window_tokens + registers) :]
            for old, new in zip(self._layers[layer], (k, v), strict=True)
        )
        if commit:
            self._layers[layer] = tuple(each[:, : each.shape[1] - registers] for each in whole)
        return whole


class PlainDiT:
    """Forwards of the DiT, as model.md section 3 says them."""

    def __init__(self, model: Model) -> None:
        self.weights = model.dit
        self.config = model.config.dit

    def empty_kv(self) -> DenseKV:
        """Nothing resident."""
        c = self.config
        empty = self.weights.patch_embedding.weight.new_empty(1, 0, c.num_heads, c.head_dim)
        return DenseKV(c.num_layers, empty, c.window_frames * c.frame_seqlen)

    def forward(
        self, latents: Tensor, y: Tensor, timestep: Tensor, start_frame: int, text: Tensor, features: Tensor,
        kv: DenseKV, register: Register | None = None, commit: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Velocities of video latents (1, C, F, H, W) and of the register's action (1, 24, 32).

        y: conditioning (1, 4 + C, F, H, W). timestep: () of the video. text: (1, 512, text_dim). features: CLIP's,
        (1, 257, vision_dim).
        """
        w, c = self.weights, self.config
        x = torch.cat([latents, y], dim=1) if c.in_dim != latents.shape[1] else latents
        x = w.patch_embedding(x)
        frames, rows, columns = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        video_tokens = x.shape[1]
        times = timestep.expand(video_tokens)
        if register:
            action_times = register.timestep.expand(c.num_action_per_block)
            state_times = action_times[:: c.num_action_per_block // c.num_state_per_block]
            times = torch.cat([times, action_times, state_times])
            x = torch.cat(
                [x, self._embed_action(register.action, action_times), _mlp(w.state_encoder, register.state)], 1
            )
        registers = x.shape[1] - video_tokens
        e = w.time_embedding(_sinusoid(times, c.freq_dim).to(x.dtype))[None]  # (1, L, D)
        e0 = w.time_projection(e).unflatten(-1, (6, -1))  # (1, L, 6, D)
        context, image = w.text_embedding(text), w.img_emb.proj(features)
        turns = _turns(start_frame, frames, rows, columns, registers > 0, c, x.device)
        for layer, block in enumerate(w.blocks):
            shift1, scale1, gate1, shift2, scale2, gate2 = (block.modulation[:, None] + e0).unbind(2)
            attended = self._self_attention(
                block.self_attn, self._norm(x) * (1 + scale1) + shift1, turns, kv, layer, registers, commit
            )
            x = x + gate1 * attended
            x = x + self._cross_attention(block.cross_attn, block.norm3(x), context, image)
            x = x + gate2 * block.ffn(self._norm(x) * (1 + scale2) + shift2)
        shift, scale = (w.head.modulation[:, None] + e[:, :video_tokens, None]).unbind(2)
        patches = w.head.head(self._norm(x[:, :video_tokens]) * (1 + scale) + shift)
        patches = patches.reshape(1, frames, rows, columns, 2, 2, c.out_dim)
        video = patches.permute(0, 6, 1, 2, 4, 3, 5).reshape(1, c.out_dim, frames, 2 * rows, 2 * columns)
        actions = x[:, video_tokens : video_tokens + c.num_action_per_block]
        return video, _mlp(w.action_decoder, actions) if register else None

    def _embed_action(self, action: Tensor, times: Tensor) -> Tensor:
        encoder = self.weights.action_encoder
        a = _category(encoder.W1, action)
        half = a.shape[-1] // 2
        angles = times[:, None] * torch.exp(-torch.arange(half, device=times.device) * (np.log(10000.0) / half))
        tau = torch.cat([angles.sin(), angles.cos()], dim=-1).to(a.dtype)[None]
        return _category(encoder.W3, silu(_category(encoder.W2, torch.cat([a, tau], dim=-1))))

    def _self_attention(
        self, attn: nn.Module, x: Tensor, turns: Tensor, kv: DenseKV, layer: int, registers: int, commit: bool
    ) -> Tensor:
        weights, biases = attn.qkv.weight.chunk(3), attn.qkv.bias.chunk(3)
        q, k, v = (linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        q = _turn(self._heads(self._rms(q, attn.norm_q)), turns)
        k = _turn(self._heads(self._rms(k, attn.norm_k)), turns)
        k, v = kv.join(layer, k, self._heads(v), registers, commit)
        return attn.o(_attend(q, k, v))

    def _cross_attention(self, attn: nn.Module, x: Tensor, text: Tensor, image: Tensor) -> Tensor:
        q = self._heads(self._rms(attn.q(x), attn.norm_q))
        k, v = self._heads(self._rms(attn.k(text), attn.norm_k)), self._heads(attn.v(text))
        k_img, v_img = self._heads(self._rms(attn.k_img(image), attn.norm_k_img)), self._heads(attn.v_img(image))
        return attn.o(_attend(q, k, v) + _attend(q, k_img, v_img))

    def _norm(self, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], eps=self.config.eps)

    def _rms(self, x: Tensor, norm: nn.Module) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.config.eps)).to(x.dtype) * norm.weight

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.num_heads, -1))


def _sinusoid(times: Tensor, width: int) -> Tensor:
    """Timesteps (L,) to (L, width) float64: cosines, then sines."""
    half = width // 2
    angles = times.double()[:, None] * 10000 ** (-torch.arange(half, device=times.device).double() / half)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _turns(
    start: int, frames: int, rows: int, columns: int, register: bool, config: DitConfig, device: torch.device
) -> Tensor:
    """Unit complex numbers (L, 1, head_dim / 2) that rotate every token of a forward."""
    d = config.head_dim
    space = 2 * (d // 6)

    def angles(first: int, count: int, width: int) -> Tensor:
        frequencies = 10000 ** (-torch.arange(0, width, 2, device=device).double() / width)
        return torch.arange(first, first + count, device=device)[:, None] * frequencies

    axes = (
        angles(start, frames, d - 2 * space)[:, None, None],
        angles(0, rows, space)[None, :, None],
        angles(0, columns, space)[None, None],
    )
    parts = [torch.cat([axis.expand(frames, rows, columns, -1) for axis in axes], dim=-1).flatten(0, 2)]
    if register:
        index = (start - 1) // config.num_frame_per_block
        parts += [angles(index * n, n, d) for n in (config.num_action_per_block, config.num_state_per_block)]
    whole = torch.cat(parts)[:, None]
    return torch.polar(torch.ones_like(whole), whole)


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of every head of x (1, L, heads, head_dim)."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(1, L, heads, head_dim) each; returns (1, L, D)."""
    out = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2).flatten(-2)


def _category(linear: nn.Module, x: Tensor) -> Tensor:
    return x @ linear.W[0] + linear.b[0]


def _mlp(mlp: nn.Module, x: Tensor) -> Tensor:
    return _category(mlp.layer2, relu(_category(mlp.layer1, x)))
