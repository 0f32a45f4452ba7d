"""Sizes of a model, read from a checkpoint's `config.json` (model.md sections 1, 2 and 8). Missing keys are DROID's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

T = TypeVar("T")

# Far above any model: a config with more is broken, and building it would take hours or all memory.
_LARGEST_SIZE = 1_000_000
_MOST_LAYERS = 1_000

_COMPONENTS = ("diffusion_model_cfg", "text_encoder_cfg", "image_encoder_cfg", "vae_cfg")


class ConfigError(ValueError):
    """A `config.json` that no model can be built from; the message names the key."""


@dataclass(frozen=True)
class DitConfig:
    """The causal video-and-action transformer (model.md section 3)."""

    model_type: str = "i2v"
    dim: int = 5120
    ffn_dim: int = 13824
    freq_dim: int = 256
    text_dim: int = 4096
    text_len: int = 512
    in_dim: int = 36
    out_dim: int = 16
    num_heads: int = 40
    num_layers: int = 40
    frame_seqlen: int = 880
    max_chunk_size: int = 4
    num_frame_per_block: int = 2
    num_action_per_block: int = 24
    num_state_per_block: int = 1
    hidden_size: int = 1024
    eps: float = 1e-6
    concat_first_frame_latent: bool = True

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads

    @property
    def window_frames(self) -> int:
        """`local_attn_size`: latent frames that attention sees together."""
        return self.max_chunk_size * self.num_frame_per_block + 1

    @property
    def register_tokens(self) -> int:
        """Action and state tokens appended to the video tokens of a denoise forward."""
        return self.num_action_per_block + self.num_state_per_block


@dataclass(frozen=True)
class TextConfig:
    """The UMT5 encoder."""

    vocab: int = 256384
    dim: int = 4096
    dim_attn: int = 4096
    dim_ffn: int = 10240
    num_heads: int = 64
    num_layers: int = 24
    num_buckets: int = 32


@dataclass(frozen=True)
class ImageConfig:
    """The CLIP vision encoder."""

    image_size: int = 224
    patch_size: int = 14
    vision_dim: int = 1280
    vision_mlp_ratio: int = 4
    vision_heads: int = 16
    vision_layers: int = 32

    @property
    def tokens(self) -> int:
        """Patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


@dataclass(frozen=True)
class VaeConfig:
    """The video autoencoder. `wan22` is the 48-channel one of the small backbone (model.md section 8)."""

    dim: int = 96
    z_dim: int = 16
    dec_dim: int = 256
    wan22: bool = False

    @property
    def spatial(self) -> int:
        """Pixels per latent in each direction of space."""
        return 16 if self.wan22 else 8


@dataclass(frozen=True)
class ModelConfig:
    """All sizes of a checkpoint.

    view_height, view_width: pixels of one camera view. video_height, video_width: of the stitched video that the
    encoders see. num_frames: video frames of the image conditioning. lora_rank, lora_alpha: of a fine-tune's adapters;
    0 where the config has none.
    """

    dit: DitConfig
    text: TextConfig
    image: ImageConfig
    vae: VaeConfig
    action_horizon: int = 24
    max_action_dim: int = 32
    max_state_dim: int = 64
    num_frames: int = 33
    decouple_inference_noise: bool = False
    video_inference_final_noise: float = 0.8
    view_height: int = 176
    view_width: int = 320
    video_height: int = 352
    video_width: int = 640
    lora_rank: int = 0
    lora_alpha: float = 0

    @property
    def latent_height(self) -> int:
        """Rows of a latent frame."""
        return self.video_height // self.vae.spatial

    @property
    def latent_width(self) -> int:
        """Columns of a latent frame."""
        return self.video_width // self.vae.spatial

    @property
    def conditioning_frames(self) -> int:
        """Latent frames of the image conditioning: one for the image, one for each four that follow."""
        return (self.num_frames - 1) // 4 + 1


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read a checkpoint's `config.json`, given as parsed JSON.

    Top-level `view_height` and `view_width` are this project's addition for checkpoints of another size than DROID's.
    Raises ConfigError naming the key that is missing or does not fit the others.
    """
    head = _section(config, "action_head_cfg", "config.json")
    head = _section(head, "config", "action_head_cfg")
    dit_keys, text_keys, image_keys, vae_keys = (_section(head, key, "config", {}) for key in _COMPONENTS)
    wan22 = str(vae_keys.get("_target_", "")).endswith("WanVideoVAE38")
    if wan22:
        vae_keys = {"dim": 160, "z_dim": 48, **vae_keys}
    dit = _fill(DitConfig, dit_keys, "diffusion_model_cfg")
    vae = _fill(VaeConfig, {**vae_keys, "wan22": wan22}, "vae_cfg")
    view = {key: config[key] for key in ("view_height", "view_width") if key in config}
    view_height, view_width = view.get("view_height", 176), view.get("view_width", 320)
    video = (2 * view_height, 2 * view_width)
    if dit.model_type == "ti2v":
        video = (head.get("target_video_height", video[0]), head.get("target_video_width", video[1]))
        if "target_video_height" not in head and dit.frame_seqlen in (50, 55):
            video = (176 if dit.frame_seqlen == 55 else 160, 320)
    lora = {key: dit_keys[key] for key in ("lora_rank", "lora_alpha") if key in dit_keys}
    model = _fill(ModelConfig, {
        **lora, **head, **view, "dit": dit, "vae": vae, "video_height": video[0], "video_width": video[1],
        "text": _fill(TextConfig, text_keys, "text_encoder_cfg"),
        "image": _fill(ImageConfig, image_keys, "image_encoder_cfg"),
    }, "action_head_cfg.config")  # fmt: skip
    _check(model)
    return model


def _section(
    parent: Mapping[str, Any], key: str, where: str, default: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    section = parent.get(key, default)
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where} needs a map {key!r} with the sizes of the model, found {type(section).__name__}")
    return section


def _fill(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """An instance of a config class from those of `values` that it knows and that are not null."""
    known = {}
    for spec in fields(kind):  # type: ignore[arg-type]
        value = values.get(spec.name)
        if value is None:
            continue
        if spec.type is bool and not isinstance(value, bool):
            raise ConfigError(f"{where}.{spec.name} must be true or false, found {value!r}")
        # A rank of 0 says that there are no adapters; no other count can be 0.
        if spec.type is int and (type(value) is not int or value < (spec.name != "lora_rank")):
            raise ConfigError(f"{where}.{spec.name} must be a whole number of at least 1, found {value!r}")
        most = _MOST_LAYERS if spec.name.endswith("layers") else _LARGEST_SIZE
        if spec.type is int and value > most:
            raise ConfigError(f"{where}.{spec.name} must be at most {most:,}, found {value:.3g}")
        if spec.type is float and not (type(value) in (int, float) and 0 <= value < math.inf):
            raise ConfigError(f"{where}.{spec.name} must be a number of at least 0, found {value!r}")
        known[spec.name] = value
    return kind(**known)


def _check(model: ModelConfig) -> None:
    dit, vae = model.dit, model.vae
    if dit.model_type not in ("i2v", "ti2v"):
        raise ConfigError(f"diffusion_model_cfg.model_type must be 'i2v' or 'ti2v', found {dit.model_type!r}")
    if dit.dim % dit.num_heads or dit.head_dim % 2:
        raise ConfigError(f"diffusion_model_cfg.dim {dit.dim} does not divide into {dit.num_heads} heads of even width")
    image = model.image
    if image.vision_dim % image.vision_heads:
        raise ConfigError(
            f"image_encoder_cfg.vision_dim {image.vision_dim} does not divide into {image.vision_heads} heads"
        )
    tokens = (model.latent_height // 2) * (model.latent_width // 2)
    if tokens != dit.frame_seqlen:
        raise ConfigError(
            f"diffusion_model_cfg.frame_seqlen is {dit.frame_seqlen}, but video of {model.video_height}x"
            f"{model.video_width} pixels has {tokens} tokens a latent frame: the view size does not fit"
        )
    expected = vae.z_dim + (vae.z_dim + 4 if dit.concat_first_frame_latent and dit.model_type == "i2v" else 0)
    if dit.in_dim != expected or dit.out_dim != vae.z_dim:
        raise ConfigError(
            f"diffusion_model_cfg.in_dim {dit.in_dim} and out_dim {dit.out_dim} do not fit a VAE of {vae.z_dim} "
            f"channels: {expected} and {vae.z_dim} expected"
        )
    if model.text.dim != dit.text_dim:
        raise ConfigError(f"text_encoder_cfg.dim {model.text.dim} is not diffusion_model_cfg.text_dim {dit.text_dim}")
