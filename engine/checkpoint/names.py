"""Where each parameter of each component stands in a checkpoint (model.md sections 2 and 8).

The library classes name their parameters in their own way. Rules below turn such a name, one after the other, into the
checkpoint's; the component's prefix goes in front.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

DIT, TEXT, IMAGE, VAE = (
    f"action_head.{part}." for part in ("model", "text_encoder", "image_encoder.model.visual", "vae.model")
)

# Entries of the release that no forward uses: the end of the image encoder, past the hidden state that is taken.
UNUSED = frozenset(
    {IMAGE + name for name in ("head", "post_norm.weight", "post_norm.bias")}
    | {"action_head.image_encoder.model.log_scale"}
)


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint entry and what it is to a parameter.

    shape: of the whole entry. chunk: which of `chunks` equal parts of the entry along dimension 0 the parameter takes.
    part: which of `parts` equal parts of the parameter along dimension 0 it is.
    """

    name: str
    shape: tuple[int, ...]
    chunk: int = 0
    chunks: int = 1
    part: int = 0
    parts: int = 1


Entries = list[tuple[str, CheckpointEntry]]
"""Parameters by name and the entries that they are made of; a parameter of several parts stands there several times."""


Rules = list[tuple[str, str | Callable[[re.Match[str]], str]]]

_TEXT_RULES: Rules = [
    (r"^shared\.", "token_embedding."),
    (r"^encoder\.final_layer_norm\.", "norm."),
    (r"^encoder\.block\.(\d+)\.", r"blocks.\1."),
    (r"layer\.0\.SelfAttention\.relative_attention_bias\.", "pos_embedding.embedding."),
    (r"layer\.0\.SelfAttention\.", "attn."),
    (r"layer\.0\.layer_norm\.", "norm1."),
    (r"layer\.1\.layer_norm\.", "norm2."),
    (r"layer\.1\.DenseReluDense\.wi_0\.", "ffn.gate.0."),
    (r"layer\.1\.DenseReluDense\.wi_1\.", "ffn.fc1."),
    (r"layer\.1\.DenseReluDense\.wo\.", "ffn.fc2."),
]

_IMAGE_RULES: Rules = [
    (r"^embeddings\.class_embedding$", "cls_embedding"),
    (r"^embeddings\.position_embedding\.weight$", "pos_embedding"),
    (r"^embeddings\.patch_embedding\.", "patch_embedding."),
    (r"^pre_layrnorm\.", "pre_norm."),
    (r"^encoder\.layers\.(\d+)\.", r"transformer.\1."),
    (r"self_attn\.[qkv]_proj\.", "attn.to_qkv."),
    (r"self_attn\.out_proj\.", "attn.proj."),
    (r"layer_norm([12])\.", r"norm\1."),
    (r"mlp\.fc1\.", "mlp.0."),
    (r"mlp\.fc2\.", "mlp.2."),
]

# A resnet's own names go first: later rules make other parameters `conv1` and `conv2`.
_VAE_RULES: Rules = [
    (r"\.norm1\.", ".residual.0."),
    (r"\.conv1\.", ".residual.2."),
    (r"\.norm2\.", ".residual.3."),
    (r"\.conv2\.", ".residual.6."),
    (r"\.conv_shortcut\.", ".shortcut."),
    (r"^quant_conv\.", "conv1."),
    (r"^post_quant_conv\.", "conv2."),
    (r"\.conv_in\.", ".conv1."),
    (r"\.norm_out\.", ".head.0."),
    (r"\.conv_out\.", ".head.2."),
    (r"mid_block\.resnets\.(\d)\.", lambda m: f"middle.{2 * int(m[1])}."),
    (r"mid_block\.attentions\.0\.", "middle.1."),
]

# The 16-channel VAE keeps one flat row of blocks, four to a level of the decoder ...
_VAE16_LEVELS: Rules = [
    (r"down_blocks\.(\d+)\.", r"downsamples.\1."),
    (r"up_blocks\.(\d+)\.resnets\.(\d)\.", lambda m: f"upsamples.{4 * int(m[1]) + int(m[2])}."),
    (r"up_blocks\.(\d+)\.upsamplers\.0\.", lambda m: f"upsamples.{4 * int(m[1]) + 3}."),
]

# ... the 48-channel one blocks in blocks, with the resampling one last.
_VAE48_LEVELS: Rules = [
    (r"down_blocks\.(\d+)\.resnets\.(\d)\.", r"downsamples.\1.downsamples.\2."),
    (r"down_blocks\.(\d+)\.downsampler\.", r"downsamples.\1.downsamples.2."),
    (r"up_blocks\.(\d+)\.resnets\.(\d)\.", r"upsamples.\1.upsamples.\2."),
    (r"up_blocks\.(\d+)\.upsampler\.", r"upsamples.\1.upsamples.3."),
]


def dit_entries(dit: nn.Module) -> Entries:
    """The DiT's parameters are named as in the checkpoint, but self-attention's q, k and v stand in one parameter."""
    entries = []
    for name, p in dit.named_parameters():
        parts = "qkv" if ".self_attn.qkv." in name else [""]
        shape = (p.shape[0] // len(parts), *p.shape[1:])
        for index, part in enumerate(parts):
            source = DIT + name.replace(".qkv.", f".{part}.")
            entries.append((name, CheckpointEntry(source, shape, part=index, parts=len(parts))))
    return entries


def text_entries(encoder: nn.Module) -> Entries:
    """Parameters of `transformers.UMT5EncoderModel`; its tied input embedding appears once."""
    return [
        (name, CheckpointEntry(TEXT + _rename(name, _TEXT_RULES), tuple(p.shape)))
        for name, p in encoder.named_parameters()
    ]


def image_entries(encoder: nn.Module) -> Entries:
    """Parameters of `transformers.CLIPVisionModel`; q, k and v stand in one entry."""
    entries = []
    for name, p in encoder.named_parameters():
        shape = tuple(p.shape)
        source = IMAGE + _rename(name, _IMAGE_RULES)
        if part := re.search(r"self_attn\.([qkv])_proj\.", name):
            entry = CheckpointEntry(source, (3 * shape[0], *shape[1:]), "qkv".index(part[1]), 3)
        elif "class_embedding" in name or "position_embedding" in name:
            entry = CheckpointEntry(source, (1, p.numel() // shape[-1], shape[-1]))
        else:
            entry = CheckpointEntry(source, shape)
        entries.append((name, entry))
    return entries


def vae_entries(vae: nn.Module, wan22: bool) -> Entries:
    """Parameters of `diffusers.AutoencoderKLWan`, of either size."""
    rules = _VAE_RULES + (_VAE48_LEVELS if wan22 else _VAE16_LEVELS)
    return [(name, CheckpointEntry(VAE + _rename(name, rules), tuple(p.shape))) for name, p in vae.named_parameters()]


def _rename(name: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
