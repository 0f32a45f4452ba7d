"""The rollout of model.md section 4 the straightforward way, as the thing the engine is compared with.

From one call to the next it keeps what a window needs: resident self-attention K/V, CLIP features and image
conditioning. All else is computed anew, the text at every call, contexts and their K/V in every forward.
"""

import time
from collections import deque
from collections.abc import Iterable

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from torch.nn.functional import interpolate

from benchmarks.plain_dit import PlainDiT, Register
from engine.model.solver import flow_sigmas, unipc
from engine.model.step_cache import StepCacheSettings
from engine.model.text import NEGATIVE_PROMPT, Tokenizer, encode_text, tokenize
from engine.model.vae import build_vae
from engine.model.vision import encode_image
from engine.model.weights import Model
from engine.rollout import Noise, RolloutSettings


class PlainRollout:
    """One session of one robot. seconds: of the last call, by phase."""

    def __init__(self, model: Model, tokenizer: Tokenizer, settings: RolloutSettings) -> None:
        if settings.step_cache != StepCacheSettings():
            raise ValueError("the plain rollout runs the DiT at every step; it has no step cache")
        config = model.config
        self.model, self.config, self.settings = model, config, settings
        self.dit, self.vae = PlainDiT(model), _plain_vae(model)
        final_noise = config.video_inference_final_noise if config.decouple_inference_noise else 0.0
        self.video_sigmas = flow_sigmas(settings.steps, settings.sigma_shift, final_noise)
        self.action_sigmas = flow_sigmas(settings.steps, settings.sigma_shift)
        self.negative = tokenize(tokenizer, NEGATIVE_PROMPT, config.dit.text_len)
        self.device, self.dtype = model.dit.patch_embedding.weight.device, model.dit.patch_embedding.weight.dtype
        self.frames: deque[Tensor] = deque(maxlen=4)
        self.prompt: Tensor | None = None
        self.start_frame = 0
        self.seconds: dict[str, float] = {}

    @torch.inference_mode()
    def call(
        self, frames: Iterable[Tensor], tokens: Tensor, mask: Tensor, state: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        """Video latents (C, F, H, W), the image's in front at a restart, and action latents (24, 32).

        frames: stitched, each (h, w, 3) uint8. tokens, mask: the prompt's, (text_len,). state: (max_state_dim,).
        """
        began = time.perf_counter()
        new = not self.frames
        self.frames.extend(frames)
        seen = [self.frames[0]] * (4 - len(self.frames)) + list(self.frames)
        window_frames = self.config.dit.window_frames
        if new or self.prompt is None or not torch.equal(tokens, self.prompt) or self.start_frame >= window_frames:
            self.start_frame = 0
            self.kv = (self.dit.empty_kv(), self.dit.empty_kv())
        self.prompt = tokens
        text_encoder = self.model.text_encoder
        self.texts = [encode_text(text_encoder, *prompt).to(self.device) for prompt in ((tokens, mask), self.negative)]
        latents = self._encode_image(seen[-1]) if self.start_frame == 0 else self._encode_observation(seen)
        encoded = time.perf_counter()
        self._prefill(latents)
        prefilled = time.perf_counter()
        video, action = self._denoise(state, noise)
        if self.start_frame == 1:
            video = torch.cat([latents, video], dim=2)
        self.start_frame += self.config.dit.num_frame_per_block
        denoised = time.perf_counter()
        self.seconds = {"encode": encoded - began, "prefill": prefilled - encoded, "denoise": denoised - prefilled}
        return video[0], action[0]

    def _encode_image(self, frame: Tensor) -> Tensor:
        """The window's CLIP features and conditioning; returns the image latent (1, C, 1, H, W)."""
        image = self._to_video([frame])
        self.features = encode_image(self.model.image_encoder, image[:, :, 0]).to(self.dtype)
        grey = image.new_zeros(1, 3, self.config.num_frames - 1, *image.shape[3:])
        latents = self._latents(torch.cat([image, grey], dim=2))
        first = latents.new_zeros(1, 4, *latents.shape[2:])
        first[:, :, 0] = 1
        self.ys = torch.cat([first, latents], dim=1).to(self.dtype)
        return latents[:, :, :1]

    def _encode_observation(self, frames: list[Tensor]) -> Tensor:
        """Latents (1, C, nf, H, W) of the last four frames."""
        block = self.config.dit.num_frame_per_block
        video = self._to_video(frames).repeat_interleave(block // (len(frames) // 4), dim=2)
        return self._latents(torch.cat([video[:, :, :1], video], dim=2))[:, :, -block:]

    def _latents(self, video: Tensor) -> Tensor:
        """Normalised latents (1, C, F, H, W) float32 of video (1, 3, T, h, w)."""
        latents = self.vae.encode(video.to(self.dtype)).latent_dist.mode().float()
        mean, std = (
            torch.tensor(each, device=self.device).view(1, -1, 1, 1, 1)
            for each in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        return (latents - mean) / std

    def _to_video(self, frames: list[Tensor]) -> Tensor:
        """Frames (h, w, 3) uint8 to (1, 3, T, video_height, video_width) in [-1, 1]."""
        video = (torch.stack(frames).to(self.device).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        size = (self.config.video_height, self.config.video_width)
        if video.shape[2:] != size:
            video = interpolate(video, size, mode="bilinear", align_corners=False)
        return video.transpose(0, 1)[None]

    def _prefill(self, latents: Tensor) -> None:
        """Make the K/V of clean latents (1, C, F, H, W) resident; at a restart they are frame 0."""
        start = max(0, self.start_frame - latents.shape[2])
        self._forward(latents, torch.zeros((), device=self.device), start, commit=True)
        self.start_frame = max(1, self.start_frame)

    def _denoise(self, state: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        video, action = noise.video.to(self.device), noise.action.to(self.device)
        state = state.to(self.device, self.dtype).view(1, 1, -1)
        video_solver, action_solver = unipc(self.video_sigmas), unipc(self.action_sigmas)
        for t, t_action in zip(video_solver.timesteps, action_solver.timesteps, strict=True):
            register = Register(action.to(self.dtype), state, t_action.to(self.device))
            positive, negative = self._forward(video, t.to(self.device), self.start_frame, register)
            velocity = negative[0] + self.settings.guidance_scale * (positive[0] - negative[0])
            video = video_solver.step(velocity, t, video).prev_sample
            action = action_solver.step(positive[1], t_action, action).prev_sample
        return video, action

    def _forward(
        self, latents: Tensor, timestep: Tensor, start: int, register: Register | None = None, commit: bool = False
    ) -> list[tuple[Tensor, ...]]:
        """Velocities of video and action in float32, of the positive and of the negative branch."""
        frames = latents.shape[2]
        y_start = min(start, self.ys.shape[2] - frames)  # the last ones where it runs past the end
        y, latents = self.ys[:, :, y_start : y_start + frames], latents.to(self.dtype)
        branches = []
        for text, kv in zip(self.texts, self.kv, strict=True):
            velocities = self.dit.forward(latents, y, timestep, start, text, self.features, kv, register, commit)
            branches.append(tuple(each.float() for each in velocities if each is not None))
        return branches


def _plain_vae(model: Model) -> AutoencoderKLWan:
    """The library's own VAE with the model's weights, in the layout they came in: the engine may have another."""
    with torch.device("meta"):
        vae = build_vae(model.config.vae)
    vae.load_state_dict({name: each.contiguous() for name, each in model.vae.state_dict().items()}, assign=True)
    return vae.eval()
