"""The causal video-and-action diffusion transformer, inference only (model.md section 3).

Module names are the checkpoint's, but for self-attention's q, k and v, which are one layer here. The order below is a
forward's: embed the tokens, embed the time, run the blocks, read video and action off the last hidden state. A forward
takes one or more guidance branches: they share tokens, time, rotation and image, and go through the linear layers as
one batch (B below).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, relu, scaled_dot_product_attention, silu

from engine.model.config import DitConfig, ImageConfig
from engine.model.rope import Rotation, rotate
from kv_cache.attention import AttentionPlan
from kv_cache.cross_kv import LayerKV
from kv_cache.paged_kv import PagedKV, PagedLayer


@dataclass(frozen=True)
class TimeEmbedding:
    """e (n, D) and its projection e0 (n, 6, D); row 0 is the video tokens' time, row 1 the action register's."""

    e: Tensor
    e0: Tensor


@dataclass(frozen=True)
class Register:
    """The action register's inputs: noisy action (1, 24, 32), its embedded time (D,), normalised state (1, 1, 64)."""

    action: Tensor
    time: Tensor
    state: Tensor


@dataclass(frozen=True)
class CrossContext:
    """Cross-attention K/V, per layer: the text K/V of B branches, and the image K/V that they share.

    texts: each of one branch, (1, tokens, heads, head_dim), or of several in a row; together of all, in their order.
    """

    texts: tuple[LayerKV, ...]
    image: LayerKV

    def joined(self) -> "CrossContext":
        """A copy whose text K/V are one, so that they are attended at once."""
        text = tuple(
            (torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts]))
            for parts in zip(*self.texts, strict=True)
        )
        return CrossContext((text,), tuple((k.clone(), v.clone()) for k, v in self.image))

    def apart(self) -> "CrossContext":
        """The same tensors with text K/V for each branch."""
        texts = (
            tuple((k[row : row + 1], v[row : row + 1]) for k, v in text)
            for text in self.texts
            for row in range(len(text[0][0]))
        )
        return CrossContext(tuple(texts), self.image)


@dataclass(frozen=True)
class ForwardContext:
    """What stays the same over the forwards of a phase, for B guidance branches.

    rotation: of the tokens. plan: what each branch sees and where its K/V go. cross: its cross-attention K/V.
    """

    rotation: Rotation
    plan: AttentionPlan
    cross: CrossContext

    @property
    def branches(self) -> int:
        """B; not the number of text K/V, of which one may be several branches'."""
        return len(self.plan.table)

    def layer(self, index: int, kv: PagedKV) -> "LayerContext":
        """What one layer takes of it, and of the pool."""
        texts = tuple(text[index] for text in self.cross.texts)
        return LayerContext(self.rotation, self.plan, kv.layers[index], texts, self.cross.image[index])

    def split(self) -> "tuple[ForwardContext, ...]":
        """A context for each branch alone."""
        return tuple(
            ForwardContext(self.rotation, plan, CrossContext((text,), self.cross.image))
            for plan, text in zip(self.plan.split(), self.cross.apart().texts, strict=True)
        )


@dataclass(frozen=True)
class LayerContext:
    """One layer's share of a ForwardContext: its pool, and K and V of the branches' texts and of the image."""

    rotation: Rotation
    plan: AttentionPlan
    kv: PagedLayer
    texts: tuple[tuple[Tensor, Tensor], ...]
    image: tuple[Tensor, Tensor]


class CategoryLinear(nn.Module):
    """x W + b with weights per category; the checkpoints have one category."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(1, inputs, outputs))
        self.b = nn.Parameter(torch.empty(1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return x @ self.W[0] + self.b[0]


class CategoryMLP(nn.Module):
    """The state encoder and the action decoder: layer2(relu(layer1(x)))."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(inputs, hidden)
        self.layer2 = CategoryLinear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return self.layer2(relu(self.layer1(x)))


class ActionEncoder(nn.Module):
    """Noisy actions and their diffusion time to tokens."""

    def __init__(self, action_dim: int, dim: int) -> None:
        super().__init__()
        self.W1 = CategoryLinear(action_dim, dim)
        self.W2 = CategoryLinear(2 * dim, dim)
        self.W3 = CategoryLinear(dim, dim)

    def forward(self, action: Tensor, time: Tensor) -> Tensor:
        """Action (1, 24, action_dim) at the embedded time (D,) to (1, 24, D)."""
        a = self.W1(action)
        return self.W3(silu(self.W2(torch.cat([a, time.expand_as(a)], dim=-1))))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32, cast, then weighted."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype out as in."""
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class SelfAttention(nn.Module):
    """Attention of the current tokens over the resident window and themselves."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        dim = config.dim
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm_q, self.norm_k = (RMSNorm(dim, config.eps) for _ in range(2))
        self.heads = config.num_heads

    def forward(self, x: Tensor, layer: LayerContext) -> Tensor:
        """x (B, L, D) to (B, L, D); where the plan says so, the K/V are written into its blocks."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = self._rotated(self.norm_q(q), layer)
        k, v = self._rotated(self.norm_k(k), layer), self._heads(v)
        return self.o(layer.kv.attend(q, k, v, layer.plan).flatten(-2))

    def store(self, x: Tensor, layer: LayerContext) -> None:
        """Write the K/V of x (B, L, D) into the plan's blocks, and no more."""
        _, k, v = self.qkv(x).chunk(3, dim=-1)
        layer.kv.store(self._rotated(self.norm_k(k), layer), self._heads(v), layer.plan)

    def _rotated(self, x: Tensor, layer: LayerContext) -> Tensor:
        return rotate(self._heads(x), layer.rotation)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))


class CrossAttention(nn.Module):
    """Attention over the prompt and, apart from it, over the image; the two results are added."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        dim = config.dim
        self.q, self.k, self.v, self.o, self.k_img, self.v_img = (nn.Linear(dim, dim) for _ in range(6))
        self.norm_q, self.norm_k, self.norm_k_img = (RMSNorm(dim, config.eps) for _ in range(3))
        self.heads = config.num_heads

    def text_kv(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """K and V (1, 512, heads, head_dim) of the text context (1, 512, D)."""
        return self._heads(self.norm_k(self.k(text))), self._heads(self.v(text))

    def image_kv(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """K and V (1, 257, heads, head_dim) of the image context (1, 257, D)."""
        return self._heads(self.norm_k_img(self.k_img(image))), self._heads(self.v_img(image))

    def forward(self, x: Tensor, layer: LayerContext) -> Tensor:
        """x (B, L, D) to (B, L, D)."""
        q = self._heads(self.norm_q(self.q(x)))
        branches = q.split([len(k) for k, _ in layer.texts])
        text = as_batch([_attend(part, *kv) for part, kv in zip(branches, layer.texts, strict=True)])
        image = _attend(q.flatten(0, 1)[None], *layer.image)  # of all branches, which see the same one
        return self.o(text + image.view_as(text))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))


class Block(nn.Module):
    """Self-attention, cross-attention, feed-forward, with shifts, scales and gates from the time."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(1, 6, config.dim))
        self.self_attn = SelfAttention(config)
        self.cross_attn = CrossAttention(config)
        self.norm3 = nn.LayerNorm(config.dim, config.eps)
        self.ffn = nn.Sequential(
            nn.Linear(config.dim, config.ffn_dim), nn.GELU("tanh"), nn.Linear(config.ffn_dim, config.dim)
        )
        self.eps = config.eps

    def forward(self, x: Tensor, e0: Tensor, layer: LayerContext, video_tokens: int) -> Tensor:
        """x (B, L, D) to (B, L, D); e0 as in TimeEmbedding."""
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.modulation + e0).unbind(1)
        y = _shift_scale(_norm(x, self.eps), shift1, scale1, video_tokens)
        x = _add_gated(x, self.self_attn(y, layer), gate1, video_tokens)
        x = x + self.cross_attn(self.norm3(x), layer)
        y = _shift_scale(_norm(x, self.eps), shift2, scale2, video_tokens)
        return _add_gated(x, self.ffn(y), gate2, video_tokens)

    def store(self, x: Tensor, e0: Tensor, layer: LayerContext) -> None:
        """Write the self-attention K/V of x (B, L, D), video tokens alone, into the plan's blocks, and no more."""
        shift, scale = (self.modulation + e0)[:, :2].unbind(1)
        self.self_attn.store(_shift_scale(_norm(x, self.eps), shift, scale, x.shape[1]), layer)


def run_block(block: Block, x: Tensor, e0: Tensor, layer: LayerContext, video_tokens: int) -> Tensor:
    """The block's forward, as a function of the block: compiled, it is so for all blocks at once."""
    hidden: Tensor = block(x, e0, layer, video_tokens)
    return hidden


RunBlock = Callable[[Block, Tensor, Tensor, LayerContext, int], Tensor]


class Head(nn.Module):
    """From the last hidden state of the video tokens to the values of their patches."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.head = nn.Linear(config.dim, 4 * config.out_dim)
        self.modulation = nn.Parameter(torch.empty(1, 2, config.dim))
        self.eps = config.eps

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        """x (B, L, D) and the video tokens' e (1, D) to (B, L, 4 * out_dim)."""
        shift, scale = (self.modulation + e[:, None]).unbind(1)
        return self.head(_norm(x, self.eps) * (1 + scale) + shift)


class ImageEmbedding(nn.Module):
    """CLIP features to the image context."""

    def __init__(self, vision_dim: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.LayerNorm(vision_dim), nn.Linear(vision_dim, vision_dim), nn.GELU(), nn.Linear(vision_dim, dim),
            nn.LayerNorm(dim),
        )  # fmt: skip

    def forward(self, features: Tensor) -> Tensor:
        """(1, 257, vision_dim) to (1, 257, D)."""
        return self.proj(features)


class DiT(nn.Module):
    """The whole transformer. action_dim and state_dim are the padded widths of the action and state inputs."""

    def __init__(self, config: DitConfig, image: ImageConfig, action_dim: int, state_dim: int) -> None:
        super().__init__()
        dim = config.dim
        self.config = config
        self.patch_embedding = nn.Conv3d(config.in_dim, dim, (1, 2, 2), (1, 2, 2))
        self.text_embedding = nn.Sequential(nn.Linear(config.text_dim, dim), nn.GELU("tanh"), nn.Linear(dim, dim))
        self.time_embedding = nn.Sequential(nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.img_emb = ImageEmbedding(image.vision_dim, dim)
        self.action_encoder = ActionEncoder(action_dim, dim)
        self.state_encoder = CategoryMLP(state_dim, config.hidden_size, dim)
        self.action_decoder = CategoryMLP(dim, config.hidden_size, action_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)

    def text_kv(self, text: Tensor) -> LayerKV:
        """Cross-attention K/V of every layer for encoded text (1, 512, text_dim)."""
        context = self.text_embedding(text)
        return tuple(cross_attn.text_kv(context) for cross_attn in self._cross_attentions())

    def image_kv(self, features: Tensor) -> LayerKV:
        """Cross-attention K/V of every layer for CLIP features (1, 257, vision_dim)."""
        context = self.img_emb(features)
        return tuple(cross_attn.image_kv(context) for cross_attn in self._cross_attentions())

    def embed_time(self, timesteps: Tensor) -> TimeEmbedding:
        """Embed distinct timesteps (n,): the video's, then the action register's where there is one."""
        angles = timesteps.double()[:, None] * _frequencies(self.config.freq_dim // 2, torch.float64, timesteps.device)
        sinusoid = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.patch_embedding.weight.dtype)
        e = self.time_embedding(sinusoid)
        return TimeEmbedding(e, self.time_projection(e).unflatten(-1, (6, -1)))

    def embed_action_time(self, timesteps: Tensor) -> Tensor:
        """What the action encoder is told of timesteps (n,): (n, D)."""
        width = self.config.dim // 2
        angles = timesteps.float()[:, None] * _frequencies(width, torch.float32, timesteps.device)
        return torch.cat([angles.sin(), angles.cos()], dim=-1).to(self.patch_embedding.weight.dtype)

    def embed_tokens(self, latents: Tensor, y: Tensor, register: Register | None = None) -> Tensor:
        """Tokens (1, L, D) of latents (1, 16, F, H, W), frame-major, then those of the action register.

        y: conditioning (1, 20, F, H, W), joined to the latents on channels where the model takes it.
        """
        if self.config.in_dim != latents.shape[1]:
            latents = torch.cat([latents, y], dim=1)
        video = self.patch_embedding(latents).flatten(2).transpose(1, 2)
        if register is None:
            return video
        action = self.action_encoder(register.action, register.time)
        return torch.cat([video, action, self.state_encoder(register.state)], dim=1)

    def forward(
        self, tokens: Tensor, time: TimeEmbedding, context: ForwardContext, kv: PagedKV, run: RunBlock = run_block
    ) -> Tensor:
        """The last hidden state (B, L, D) of tokens (1, L, D) in the context's B branches; `run` runs each block."""
        has_register = time.e.shape[0] == 2
        video_tokens = tokens.shape[1] - (self.config.register_tokens if has_register else 0)
        x = tokens.repeat(context.branches, 1, 1)
        for index, block in enumerate(self.blocks):
            x = run(cast(Block, block), x, time.e0, context.layer(index, kv), video_tokens)
        return x

    def prefill(
        self, tokens: Tensor, time: TimeEmbedding, context: ForwardContext, kv: PagedKV, run: RunBlock = run_block
    ) -> None:
        """Write the K/V of video tokens (1, L, D) of every layer; the last layer computes nothing else."""
        x = tokens.repeat(context.branches, 1, 1)
        *blocks, last = self.blocks
        for index, block in enumerate(blocks):
            x = run(cast(Block, block), x, time.e0, context.layer(index, kv), tokens.shape[1])
        cast(Block, last).store(x, time.e0, context.layer(len(blocks), kv))

    def video_velocity(self, hidden: Tensor, time: TimeEmbedding, latents: Tensor) -> Tensor:
        """Predicted velocities (B, C, F, H, W) of `latents` (1, C, F, H, W), from the last hidden state (B, L, D)."""
        frames, rows, columns = latents.shape[2], latents.shape[3] // 2, latents.shape[4] // 2
        patches = self.head(hidden[:, : frames * rows * columns], time.e[:1])
        patches = patches.reshape(-1, frames, rows, columns, 2, 2, self.config.out_dim)
        return patches.permute(0, 6, 1, 2, 4, 3, 5).reshape(len(hidden), -1, frames, 2 * rows, 2 * columns)

    def action_velocity(self, hidden: Tensor) -> Tensor:
        """Predicted velocities (B, 24, 32) of the actions, from the last hidden state of a forward with a register."""
        actions, states = self.config.num_action_per_block, self.config.num_state_per_block
        return self.action_decoder(hidden[:, -actions - states : hidden.shape[1] - states])

    def _cross_attentions(self) -> Iterator[CrossAttention]:
        return (cast(Block, block).cross_attn for block in self.blocks)


def _frequencies(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return 10000.0 ** (-torch.arange(count, dtype=dtype, device=device) / count)


def _norm(x: Tensor, eps: float) -> Tensor:
    return layer_norm(x, x.shape[-1:], eps=eps)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2).flatten(-2)


def as_batch(branches: list[Tensor]) -> Tensor:
    """One batch of its parts, each (b, ...); the part itself where there is one."""
    return branches[0] if len(branches) == 1 else torch.cat(branches)


def _rows_of_tokens(rows: Tensor, tokens: int, video_tokens: int) -> Tensor:
    """Row 0 of rows (n, D) for the video tokens, row 1 for the register's: (tokens, D), or (1, D) where n is 1.

    Chosen token by token and not by cutting x in two, so that a compiler fuses the choice into what uses it.
    """
    if rows.shape[0] == 1:
        return rows
    is_video = torch.arange(tokens, device=rows.device)[:, None] < video_tokens
    return torch.where(is_video, rows[0], rows[1])


def _shift_scale(x: Tensor, shift: Tensor, scale: Tensor, video_tokens: int) -> Tensor:
    """x (B, L, D) scaled and shifted, by rows as in `_rows_of_tokens`."""
    shift, scale = (_rows_of_tokens(rows, x.shape[1], video_tokens) for rows in (shift, 1 + scale))
    return torch.addcmul(shift, x, scale)


def _add_gated(x: Tensor, y: Tensor, gate: Tensor, video_tokens: int) -> Tensor:
    """x + gate * y, both (B, L, D), gated by rows as in `_rows_of_tokens`."""
    return torch.addcmul(x, y, _rows_of_tokens(gate, x.shape[1], video_tokens))
