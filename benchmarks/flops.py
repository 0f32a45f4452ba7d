"""Floating-point operations of the DiT's forwards, counted from the sizes (spec section 7).

A multiplication with its addition counts as two. What is not a matrix product (norms, rotations, gates) is left out.
"""

from engine.config import ModelConfig

BRANCHES = 2


def call_flops(config: ModelConfig, start_frame: int, steps_run: int) -> float:
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
    return BRANCHES * (prefill_flops(config, prefilled, resident) + steps_run * denoise)


def forward_flops(config: ModelConfig, tokens: int, visible: int) -> float:
    """Of one forward of `tokens` tokens that see `visible` keys, in one branch."""
    dit = config.dit
    return dit.num_layers * _block_flops(config, tokens, visible) + 2 * tokens * dit.dim * 4 * dit.out_dim


def prefill_flops(config: ModelConfig, frames: int, visible_frames: int) -> float:
    """Of making the K/V of `frames` frames resident in one branch; the last layer computes K and V alone."""
    dit = config.dit
    tokens, visible = frames * dit.frame_seqlen, visible_frames * dit.frame_seqlen
    return (dit.num_layers - 1) * _block_flops(config, tokens, visible) + 2 * tokens * 2 * dit.dim**2


def _block_flops(config: ModelConfig, tokens: int, visible: int) -> float:
    dit = config.dit
    linear = 6 * dit.dim**2 + 2 * dit.dim * dit.ffn_dim  # self-attention q, k, v, o; cross-attention q, o; feed-forward
    attended = visible + dit.text_len + config.image.tokens
    return 2 * tokens * linear + 4 * tokens * attended * dit.dim
