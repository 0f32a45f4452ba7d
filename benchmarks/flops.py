"""Floating-point operations of the DiT's forwards, counted from the sizes (model.md section 7).

A multiplication with its addition counts as two. What is not a matrix product (norms, rotations, gates) is left out.
"""

from dataclasses import dataclass

from engine.model.config import ModelConfig

BRANCHES = 2


@dataclass(frozen=True)
class Flops:
    """Operations by what a device does them with.

    linear: of linear layers, which may be in float8; the head's, less than a thousandth, are counted with them.
    attention: of self- and cross-attention, which never are.
    """

    linear: float
    attention: float

    @property
    def total(self) -> float:
        return self.linear + self.attention

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.linear + other.linear, self.attention + other.attention)

    def __mul__(self, times: float) -> "Flops":
        return Flops(times * self.linear, times * self.attention)

    def seconds(self, linear_rate: float, attention_rate: float) -> float:
        """Least time at these rates, in operations a second."""
        return self.linear / linear_rate + self.attention / attention_rate


def call_flops(config: ModelConfig, start_frame: int, steps_run: float) -> Flops:
    """Of one call that denoises the frames from `start_frame` on, with `steps_run` computed steps, both branches."""
    dit = config.dit
    prefilled = min(start_frame, dit.num_frame_per_block)
    resident = min(start_frame, dit.window_frames - dit.num_frame_per_block)
    frames = dit.num_frame_per_block
    denoise = forward_flops(
        config,
        tokens=frames * dit.frame_seqlen + dit.register_tokens,
        visible=(resident + frames) * dit.frame_seqlen + dit.register_tokens,
    )
    return (prefill_flops(config, prefilled, resident) + denoise * steps_run) * BRANCHES


def forward_flops(config: ModelConfig, tokens: int, visible: int) -> Flops:
    """Of one forward of `tokens` tokens that see `visible` keys, in one branch."""
    dit = config.dit
    return _block_flops(config, tokens, visible) * dit.num_layers + Flops(2 * tokens * dit.dim * 4 * dit.out_dim, 0)


def prefill_flops(config: ModelConfig, frames: int, visible_frames: int) -> Flops:
    """Of making the K/V of `frames` frames resident in one branch; the last layer computes q, K and V alone."""
    dit = config.dit
    tokens, visible = frames * dit.frame_seqlen, visible_frames * dit.frame_seqlen
    return _block_flops(config, tokens, visible) * (dit.num_layers - 1) + Flops(2 * tokens * 3 * dit.dim**2, 0)


def _block_flops(config: ModelConfig, tokens: int, visible: int) -> Flops:
    dit = config.dit
    linear = 6 * dit.dim**2 + 2 * dit.dim * dit.ffn_dim  # self-attention q, k, v, o; cross-attention q, o; feed-forward
    attended = visible + dit.text_len + config.image.tokens
    return Flops(2 * tokens * linear, 4 * tokens * attended * dit.dim)
