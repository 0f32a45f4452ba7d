"""From a prompt to the text encoder's output: cleaning, tokens, UMT5 (model.md section 5)."""

import html
from typing import Protocol

import ftfy
import torch
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

from engine.model.config import TextConfig

NEGATIVE_PROMPT = (
    "Vibrant colors, overexposed, static, blurry details, text, subtitles, style, artwork, painting, image, still, "
    "grayscale, dull, worst quality, low quality, JPEG artifacts, ugly, mutilated, extra fingers, bad hands, bad face, "
    "deformed, disfigured, mutated limbs, fused fingers, stagnant image, cluttered background, three legs, many people "
    "in the background, walking backwards."
)

LONGEST_PROMPT = 4096
"""Characters; eight for each token that the model reads, which no language needs. Cleaning takes time that grows with
the square of a prompt's length where it is made for that."""


class Tokenizer(Protocol):
    """What is needed of a `transformers` tokenizer."""

    def __call__(self, text: str, *, padding: str, max_length: int, truncation: bool) -> dict[str, list[int]]:
        """Token ids under `input_ids`, their mask under `attention_mask`."""
        ...


def clean(text: str) -> str:
    """Mend encodings, unescape HTML twice, make runs of white space one blank."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split())


def tokenize(tokenizer: Tokenizer, text: str, length: int) -> tuple[Tensor, Tensor]:
    """Token ids and mask, each (length,) int64, of cleaned text, padded or cut with the end token kept."""
    encoded = tokenizer(clean(text), padding="max_length", max_length=length, truncation=True)
    return torch.tensor(encoded["input_ids"]), torch.tensor(encoded["attention_mask"])


def is_too_long(tokenizer: Tokenizer, text: str, length: int) -> bool:
    """Whether `tokenize` cuts the text's end off."""
    return bool(tokenize(tokenizer, text, length + 1)[1].all())


def build_text_encoder(config: TextConfig) -> UMT5EncoderModel:
    """A UMT5 encoder of the given sizes, weights not set."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=config.vocab,
            d_model=config.dim,
            d_kv=config.dim_attn // config.num_heads,
            d_ff=config.dim_ffn,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            relative_attention_num_buckets=config.num_buckets,
            relative_attention_max_distance=128,
            dropout_rate=0.0,
            layer_norm_epsilon=1e-6,
            feed_forward_proj="gated-gelu",
        )
    )


def encode_text(encoder: UMT5EncoderModel, tokens: Tensor, mask: Tensor) -> Tensor:
    """Encode ids (length,) with their mask; returns (1, length, dim) on the encoder's device, zero past the mask."""
    device = encoder.encoder.final_layer_norm.weight.device
    table = encoder.shared  # on the CPU, wherever the rest of the encoder is
    embedded = table(tokens[None].to(table.weight.device)).to(device)
    mask = mask[None].to(device)
    encoded = encoder(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
    return encoded * mask[..., None].to(encoded.dtype)
