"""From camera frames to latents, image conditioning and image features (model.md sections 4.3, 4.4 and 4.5)."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from engine.graphs import Capture, CapturedFunction
from engine.model.vae import normalize_latents
from engine.model.vision import encode_image
from engine.model.weights import Model


class FrameEncoder:
    """The encoders of one model.

    capture: captures the VAE's work where given. compiled: whether that work runs compiled.
    """

    def __init__(self, model: Model, capture: Capture | None, compiled: bool) -> None:
        self._model = model
        self._config = model.config
        self._device = model.dit.patch_embedding.weight.device
        self._dtype = model.dit.patch_embedding.weight.dtype
        encode = partial(model.video_encoder.encode, compiled=compiled)
        grey_frames = self._config.num_frames - 1
        encode_still = partial(model.video_encoder.encode_still, grey_frames=grey_frames, compiled=compiled)
        self._encode = CapturedFunction(encode, capture) if capture else encode
        self._encode_still = CapturedFunction(encode_still, capture) if capture else encode_still

    def image_features(self, image: Tensor) -> Tensor:
        """CLIP features (1, 257, vision_dim) of a frame (h, w, 3) uint8."""
        return encode_image(self._model.image_encoder, self._to_video([image])[:, :, 0]).to(self._dtype)

    def window(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """What a window starts with: latent (1, z, 1, H, W) float32 of a frame (h, w, 3) uint8, and its conditioning.

        The conditioning is (1, 4 + z, F, H, W): a mask of the first latent frame, and the latents of the image before
        grey frames.
        """
        latents = self._normal(self._encode_still(self._to_video([image]).to(self._dtype)))
        mask = latents.new_zeros(1, 4, *latents.shape[2:])
        mask[:, :, 0] = 1
        return latents[:, :, :1], torch.cat([mask, latents], dim=1).to(self._dtype)

    def observation(self, frames: list[Tensor]) -> Tensor:
        """Latents (1, z, nf, H, W) float32 of four frames (h, w, 3) uint8."""
        block = self._config.dit.num_frame_per_block
        video = self._to_video(frames).repeat_interleave(block // (len(frames) // 4), dim=2)
        video = torch.cat([video[:, :, :1], video], dim=2)
        return self._normal(self._encode(video.to(self._dtype)))[:, :, -block:]

    def _normal(self, latents: Tensor) -> Tensor:
        """Latents (1, z, F, H, W) float32 as the transformer has them."""
        return normalize_latents(self._model.vae, latents).float()

    def _to_video(self, frames: list[Tensor]) -> Tensor:
        """Frames (h, w, 3) uint8 to model range, (1, 3, T, video_height, video_width) float32 on the device."""
        video = (torch.stack(frames).to(self._device).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        size = (self._config.video_height, self._config.video_width)
        if video.shape[2:] != size:
            video = interpolate(video, size, mode="bilinear", align_corners=False)
        return video.transpose(0, 1)[None]
