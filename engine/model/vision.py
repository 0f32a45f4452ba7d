"""CLIP features of the newest frame (model.md section 4.4)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import CLIPVisionConfig, CLIPVisionModel

from engine.model.config import ImageConfig

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


def build_image_encoder(config: ImageConfig) -> CLIPVisionModel:
    """A CLIP vision encoder of the given sizes, weights not set, without the final norm that no feature passes."""
    encoder = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=config.vision_dim,
            intermediate_size=config.vision_dim * config.vision_mlp_ratio,
            num_hidden_layers=config.vision_layers,
            num_attention_heads=config.vision_heads,
            image_size=config.image_size,
            patch_size=config.patch_size,
            hidden_act="gelu",
            layer_norm_eps=1e-5,
        )
    )
    encoder.post_layernorm = nn.Identity()
    return encoder


def encode_image(encoder: CLIPVisionModel, image: Tensor) -> Tensor:
    """Features (1, 257, vision_dim) of an image (1, 3, H, W) in model range [-1, 1]: the last but one hidden state."""
    size = encoder.config.image_size
    small = interpolate(image.float(), (size, size), mode="bicubic", align_corners=False) * 0.5 + 0.5
    mean, std = (torch.tensor(c, device=image.device)[:, None, None] for c in (_MEAN, _STD))
    pixels = ((small - mean) / std).to(encoder.dtype)
    return encoder(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
