"""One call of the policy (model.md section 4): restart or continue the window, prefill, denoise."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from engine.execution import DirectExecution, Execution
from engine.graphs import CaptureError, CudaCapture, GraphExecution
from engine.model.config import ModelConfig
from engine.model.dit import CrossContext, ForwardContext, Register
from engine.model.encoders import FrameEncoder
from engine.model.rope import Rope, Rotation
from engine.model.solver import FlowSolver, flow_sigmas, flow_timesteps
from engine.model.step_cache import StepCacheSettings
from engine.model.text import NEGATIVE_PROMPT, Tokenizer, encode_text, is_too_long, tokenize
from engine.model.vae import decode_video
from engine.model.weights import Model
from engine.session import Session, Window
from kv_cache.attention import AttentionPlan
from kv_cache.cache import KVCache

logger = logging.getLogger(__name__)

POSITIVE, NEGATIVE = 0, 1
"""The two guidance branches: the robot's prompt and the negative prompt."""


class NotFinite(RuntimeError):
    """The model's actions hold NaN or infinite numbers, which are for no robot."""


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How a call denoises; by default every step runs, with the release's numbers for the rest.

    seed_per_session: whether each call of each session has noise of its own, which follows from the seed, the
        session's key and the number of its calls; otherwise the noise is the same at every call.
    execution: one of `engine.execution.EXECUTIONS`. execution_reason: why it is not what was asked for, if it is not.
    guidance: "batched" where both guidance branches go through the DiT at once, "separate" where one after the other.
    """

    steps: int = 16
    guidance_scale: float = 5.0
    sigma_shift: float = 5.0
    seed: int = 1140
    seed_per_session: bool = False
    step_cache: StepCacheSettings = field(default_factory=StepCacheSettings)
    execution: str = "eager"
    execution_reason: str | None = None
    guidance: str = "batched"


@dataclass(frozen=True)
class Noise:
    """What denoising starts from: video (1, C, nf, H, W) and action (1, 24, 32), float32."""

    video: Tensor
    action: Tensor


@dataclass(frozen=True)
class Prediction:
    """The outcome of a call.

    video_latents: (C, F, H, W) float32, the image latent in front at a restart. action_latents: (24, 32) float32,
    finite, on the CPU.
    dit_forwards: forwards of the DiT, both branches counted. seconds: time by phase. window: what became of it.
    """

    video_latents: Tensor
    action_latents: Tensor
    dit_forwards: int
    seconds: dict[str, float]
    window: Window


class Rollout:
    """Runs calls of one model over one KV cache, on `device` in `dtype`. One thread owns it."""

    def __init__(self, model: Model, cache: KVCache, tokenizer: Tokenizer, settings: RolloutSettings) -> None:
        config = model.config
        self._model = model
        self._cache = cache
        self._tokenizer = tokenizer
        self._settings = settings
        self.device = model.dit.patch_embedding.weight.device
        self.dtype = model.dit.patch_embedding.weight.dtype
        self._rope = Rope(
            config.dit.head_dim, config.latent_height // 2, config.latent_width // 2,
            config.dit.num_frame_per_block, config.dit.num_action_per_block, config.dit.num_state_per_block,
        )  # fmt: skip
        final_noise = config.video_inference_final_noise if config.decouple_inference_noise else 0.0
        video_sigmas = flow_sigmas(settings.steps, settings.sigma_shift, final_noise)
        action_sigmas = flow_sigmas(settings.steps, settings.sigma_shift)
        with torch.inference_mode():
            self._set_execution(CudaCapture(self.device) if settings.execution == "graph" else None)
            # Noise levels are the same at every call, and so is all that depends on them alone.
            self._video_solver = FlowSolver(video_sigmas, self.device)
            self._action_solver = FlowSolver(action_sigmas, self.device)
            timesteps = torch.stack([flow_timesteps(video_sigmas), flow_timesteps(action_sigmas)], dim=1)
            timesteps = timesteps.to(self.device)
            self._clean_time = model.dit.embed_time(torch.zeros(1, device=self.device))
            self._times = [model.dit.embed_time(pair) for pair in timesteps]
            self._action_times = model.dit.embed_action_time(timesteps[:, 1])
            self._negative_tokens, negative_mask = self.tokenize(NEGATIVE_PROMPT)
            cache.keep_text(
                _prompt_key(self._negative_tokens),
                lambda: self._text_kv(self._negative_tokens, negative_mask),
            )

    @property
    def execution(self) -> str:
        """One of `engine.execution.EXECUTIONS`."""
        return self._settings.execution

    @property
    def execution_reason(self) -> str | None:
        """Why it is not the one that was asked for, where it is not."""
        return self._settings.execution_reason

    @property
    def guidance(self) -> str:
        """As in RolloutSettings."""
        return self._settings.guidance

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model."""
        return self._model.config

    def tokenize(self, text: str) -> tuple[Tensor, Tensor]:
        """Token ids and mask, each (text_len,) int64."""
        return tokenize(self._tokenizer, text, self.config.dit.text_len)

    def is_too_long(self, text: str) -> bool:
        """Whether `tokenize` cuts the text's end off."""
        return is_too_long(self._tokenizer, text, self.config.dit.text_len)

    def noise(self, session: Session) -> Noise:
        """The noise of a session's next call, from two generators with one seed, drawn in bfloat16."""
        config = self.config
        shapes = {
            "video": (1, config.dit.out_dim, config.dit.num_frame_per_block, config.latent_height, config.latent_width),
            "action": (1, config.action_horizon, config.max_action_dim),
        }
        seed = self._settings.seed
        if self._settings.seed_per_session:
            own = f"{seed} {session.calls} {session.kv.key}".encode()
            seed = int.from_bytes(blake2b(own, digest_size=7).digest(), "big")
        drawn = {}
        for name, shape in shapes.items():
            generator = torch.Generator(self.device).manual_seed(seed)
            drawn[name] = torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16).float()
        return Noise(**drawn)

    @torch.inference_mode()
    def call(
        self, session: Session, frames: Tensor, tokens: Tensor, mask: Tensor, state: Tensor, noise: Noise | None = None
    ) -> Prediction:
        """Take the session one chunk further.

        frames: stitched (T, h, w, 3) uint8. tokens, mask: the prompt's, (text_len,). state: (max_state_dim,) float32,
        normalised. noise: instead of the seeded noise.
        Where anything raises, K/V and frames are as before the call, and the session's next call restarts its window.
        Where a forward cannot be captured, or its capture gives other numbers, none is captured from then on.
        """
        try:
            return self._call(session, frames, tokens, mask, state, noise)
        except CaptureError as error:
            self._stop_capturing(error)
        return self._call(session, frames, tokens, mask, state, noise)

    def _stop_capturing(self, error: CaptureError) -> None:
        logger.error("%s; forwards are compiled and not captured from here on", error)
        self._settings = replace(self._settings, execution="compile", execution_reason=str(error))
        self._set_execution(None)

    def _set_execution(self, capture: CudaCapture | None) -> None:
        compiled = self._settings.execution != "eager"
        direct = DirectExecution(self._model.dit, self._cache.paged, self.guidance, compiled)
        self._execution: Execution = GraphExecution(direct, capture) if capture else direct
        self._frames = FrameEncoder(self._model, capture, compiled and self.device.type == "cuda")

    def _call(
        self, session: Session, frames: Tensor, tokens: Tensor, mask: Tensor, state: Tensor, noise: Noise | None
    ) -> Prediction:
        clock = _PhaseClock(self.device)
        forwards = 0
        prompt = _prompt_key(tokens)
        window = self._window(session, prompt)
        seen_before = (session.frames.copy(), session.called)
        seen = session.push_frames(frames)
        session.prompt = prompt
        restart = window is not Window.CONTINUED
        try:
            with self._cache.call(session.kv):
                with clock.phase("encode"):
                    if restart:
                        self._cache.restart(session.kv)
                        latents = self._start_window(session, seen[-1])
                    else:
                        latents = self._frames.observation(seen)
                    self._publish_text(session, tokens, mask)
                with clock.phase("prefill"):
                    forwards += self._prefill(session, latents)
                with clock.phase("denoise"):
                    video, action, steps_run = self._denoise(session, state, noise or self.noise(session))
                    action = action.cpu()
                if not np.isfinite(action.numpy()).all():  # of a broken checkpoint, or of an overflow in half precision
                    raise NotFinite("the model gave actions that are not finite")
                forwards += 2 * steps_run
                if restart:
                    video = torch.cat([latents, video], dim=2)
        except BaseException:
            session.failed = True
            session.frames, session.called = seen_before  # the call may be tried again with the same frames
            raise
        session.failed = False
        session.calls += 1
        return Prediction(video[0], action[0], forwards, clock.seconds, window)

    def decode(self, latents: Tensor) -> Iterator[np.ndarray]:
        """Video of a window's latents (C, F, H, W): frames (1, h, w, 3) uint8, then (4, h, w, 3) for each latent more.

        Each piece is computed when it is asked for; calls may be made between two.
        """
        for piece in decode_video(self._model.vae, latents[None].to(self.device)):
            pixels = ((piece[0].float() + 1) * 127.5).round().to(torch.uint8)
            yield pixels.permute(1, 2, 3, 0).cpu().numpy()

    def _window(self, session: Session, prompt: bytes) -> Window:
        """Whether the session's next call, with this prompt, goes on with its window, or why it begins one."""
        if not session.called:
            return Window.NEW
        if prompt != session.prompt:
            return Window.PROMPT
        if session.failed:
            return Window.FAILED
        if session.kv.resident_frames == 0:
            return Window.EVICTED
        frames_seen = session.kv.resident_frames + self.config.dit.num_frame_per_block  # the last denoised ones, too
        return Window.BOUNDARY if self._cache.policy.restarts(frames_seen) else Window.CONTINUED

    def _start_window(self, session: Session, image: Tensor) -> Tensor:
        """Image conditioning and image K/V of a new window; returns the image latent (1, C, 1, H, W)."""
        self._cache.publish_image(session.kv, lambda: self._model.dit.image_kv(self._frames.image_features(image)))
        latents, conditioning = self._frames.window(image)
        self._cache.publish_conditioning(session.kv, conditioning)
        return latents

    def _publish_text(self, session: Session, tokens: Tensor, mask: Tensor) -> None:
        self._cache.publish_text(session.kv, POSITIVE, session.prompt, lambda: self._text_kv(tokens, mask))
        negative = _prompt_key(self._negative_tokens)
        self._cache.publish_text(session.kv, NEGATIVE, negative, _never_computed)

    def _text_kv(self, tokens: Tensor, mask: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        encoded = encode_text(self._model.text_encoder, tokens, mask).to(self.device)
        return self._model.dit.text_kv(encoded)

    def _prefill(self, session: Session, latents: Tensor) -> int:
        """Make the K/V of clean latents (1, C, F, H, W) resident in both branches; returns the forwards run."""
        frames = latents.shape[2]
        start = session.kv.resident_frames
        tokens = self._model.dit.embed_tokens(latents.to(self.dtype), self._conditioning(session, start, frames))
        rotation = self._rope.rotation(start, frames, False, self.device)
        with self._cache.lease(session.kv, frames, commit=True) as plan:
            self._execution.prefill(tokens, self._clean_time, self._context(session, rotation, plan))
        return 2

    def _denoise(self, session: Session, state: Tensor, noise: Noise) -> tuple[Tensor, Tensor, int]:
        """Video latents (1, C, nf, H, W), action latents (1, 24, 32), and the number of steps that ran the DiT."""
        dit, block = self._model.dit, self.config.dit.num_frame_per_block
        start = session.kv.resident_frames
        y = self._conditioning(session, start, block)
        rotation = self._rope.rotation(start, block, True, self.device)
        state = state.to(self.device, self.dtype).view(1, 1, -1)
        video, action = noise.video.to(self.device), noise.action.to(self.device)
        video_path, action_path = self._video_solver.start(video), self._action_solver.start(action)
        steps = self._settings.step_cache.start()
        steps_run = 0
        with self._cache.lease(session.kv, block) as plan:
            forward = self._execution.forward(self._context(session, rotation, plan))
            for step, (time_embedding, action_time) in enumerate(zip(self._times, self._action_times, strict=True)):
                if steps.runs(step):
                    register = Register(action.to(self.dtype), action_time, state)
                    hidden = forward(dit.embed_tokens(video.to(self.dtype), y, register), time_embedding)
                    positive, negative = dit.video_velocity(hidden, time_embedding, video).float().split(1)
                    velocity = negative + self._settings.guidance_scale * (positive - negative)
                    action_velocity = dit.action_velocity(hidden[:1]).float()
                    steps.computed(velocity)
                    steps_run += 1
                video = video_path.step(velocity)
                action = action_path.step(action_velocity)
        return video, action, steps_run

    def _context(self, session: Session, rotation: Rotation, plan: AttentionPlan) -> ForwardContext:
        texts = tuple(session.kv.text(branch) for branch in (POSITIVE, NEGATIVE))
        return ForwardContext(rotation, plan, CrossContext(texts, session.kv.image))

    def _conditioning(self, session: Session, start: int, frames: int) -> Tensor:
        """ys at latent frames start ..., its last ones where that runs past the end."""
        ys = session.kv.conditioning
        start = min(start, ys.shape[2] - frames)
        return ys[:, :, start : start + frames]


class _PhaseClock:
    """Seconds by phase; waits for the device at a phase's end, so that each has what it cost."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = time.perf_counter() - start


def _prompt_key(tokens: Tensor) -> bytes:
    return tokens.to(torch.int32).numpy().tobytes()


def _never_computed() -> tuple[tuple[Tensor, Tensor], ...]:
    raise LookupError("the negative prompt's K/V are kept from the start")
