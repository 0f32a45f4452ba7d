"""The policy that robots use: observations of many sessions in, chunks of actions out."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import ModelConfig
from engine.embodiment import Embodiment, Observation, read_range
from engine.model import load_model
from engine.rollout import Rollout, RolloutSettings
from engine.session import Session
from engine.settings import EngineSettings
from engine.step_cache import parse_step_cache
from engine.trial import activation_bytes
from kv_cache.attention import choose_backend
from kv_cache.cache import KVCache, KVReport
from kv_cache.paged_kv import KVGeometry
from kv_cache.sizing import NotEnoughMemory, kv_bytes_available, one_session_bytes, plan_budget
from kv_cache.window import WindowPolicy

logger = logging.getLogger(__name__)


class PolicyLoadError(ValueError):
    """The policy cannot be loaded as asked: one line that says why."""


@dataclass(frozen=True)
class Chunk:
    """The answer to an observation: actions (24, 8) float32, and seconds of inference by phase."""

    actions: np.ndarray
    seconds: dict[str, float]


@dataclass(frozen=True)
class PolicyStats:
    """What the policy holds now; evictions are counted from the start."""

    sessions: int
    blocks_total: int
    blocks_free: int
    blocks_used: int
    block_bytes: int
    evictions: int


class Policy:
    """One model, its KV cache and its sessions. Used by one thread, but for `stats` and `info`."""

    def __init__(self, checkpoint: Checkpoint, rollout: Rollout, cache: KVCache, embodiment: Embodiment) -> None:
        self._checkpoint = checkpoint
        self._rollout = rollout
        self._cache = cache
        self._embodiment = embodiment
        self._sessions: dict[str, Session] = {}

    def infer(self, session_id: str, observation: Observation) -> Chunk:
        """The next actions for a session, which is made at its first observation.

        Where it raises, the session restarts its window at its next call; other sessions do not notice.
        """
        frames = self._embodiment.stitch(observation.views)
        state = self._embodiment.normalize_state(
            observation.joint_position, observation.gripper_position, self._rollout.config.max_state_dim
        )
        tokens, mask = self._rollout.tokenize(self._embodiment.prompt_text(observation.prompt))
        if session_id not in self._sessions:
            self._sessions[session_id] = Session(self._cache.session(session_id))
        prediction = self._rollout.call(self._sessions[session_id], frames, tokens, mask, state)
        actions = self._embodiment.actions(prediction.action_latents, observation.joint_position)
        return Chunk(actions, prediction.seconds)

    def end_session(self, session_id: str) -> None:
        """Forget a session and give back its K/V. An unknown id is fine."""
        self._sessions.pop(session_id, None)
        self._cache.forget(session_id)

    def free_caches(self) -> None:
        """Give memory back after the device ran out: the K/V of idle sessions, and what torch holds in reserve."""
        self._cache.evict_idle()
        torch.cuda.empty_cache()

    def stats(self) -> PolicyStats:
        """What the policy holds now. Cheap, and safe from any thread."""
        report = self.kv_report()
        return PolicyStats(
            sessions=len(self._sessions),
            blocks_total=report.blocks_total,
            blocks_free=report.blocks_free,
            blocks_used=report.blocks_used,
            block_bytes=report.block_bytes,
            evictions=report.evictions,
        )

    def kv_report(self) -> KVReport:
        """The KV cache's own instrument, session by session. Safe from any thread."""
        return self._cache.report()

    def info(self) -> dict[str, object]:
        """What is being served, ready for JSON."""
        config = self._rollout.config
        return {
            "checkpoint": self._checkpoint.name,
            "trained": self._checkpoint.trained,
            "action_horizon": config.action_horizon,
            "window_frames": config.dit.window_frames,
            "sizes": asdict(config),
            "device": str(self._rollout.device),
            "dtype": str(self._rollout.dtype).removeprefix("torch."),
            "attention_backend": self._cache.paged.backend,
            "kv_blocks": self._cache.report().blocks_total,
            "kv_sessions": self._cache.budget.sessions,
        }


def load_policy(settings: EngineSettings, report: Callable[[str], None]) -> Policy:
    """Load the checkpoint and size the KV cache; `report` is told what is being done.

    Raises PolicyLoadError where a setting, the checkpoint or the device's memory does not allow it.
    """
    try:
        return _load_policy(settings, report)
    except (ValueError, NotEnoughMemory) as error:
        raise PolicyLoadError(str(error)) from error


def _load_policy(settings: EngineSettings, report: Callable[[str], None]) -> Policy:
    step_cache = parse_step_cache(settings.step_cache, settings.steps)
    device = _device(settings.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backend = choose_backend(device)
    report(f"reading checkpoint {settings.checkpoint}")
    checkpoint = open_checkpoint(settings.checkpoint)
    embodiment = Embodiment(
        checkpoint.config.view_height,
        checkpoint.config.view_width,
        state=read_range(checkpoint.statistics, "state"),
        action=read_range(checkpoint.statistics, "action"),
    )
    report("loading weights")
    model = load_model(checkpoint.config, checkpoint.fetch, device, dtype)
    if unused := checkpoint.entries - model.entry_names():
        logger.info("%d of %d checkpoint entries are not used", len(unused), len(checkpoint.entries))
    rollout_settings = RolloutSettings(
        steps=settings.steps,
        guidance_scale=settings.guidance_scale,
        sigma_shift=settings.sigma_shift,
        seed=settings.seed,
        step_cache=step_cache,
    )

    def serve_from(kv_bytes: int) -> tuple[Rollout, KVCache]:
        cache = build_cache(checkpoint.config, kv_bytes, device, dtype, backend)
        return Rollout(model, cache, checkpoint.tokenizer, rollout_settings), cache

    report("sizing the KV cache")
    activations = 0
    if device.type == "cuda" and settings.kv_bytes is None:
        least = one_session_bytes(kv_geometry(checkpoint.config, dtype), _window(checkpoint.config))
        rollout, cache = serve_from(least)
        activations = activation_bytes(rollout, cache.session("trial"))
        del rollout, cache
    available = kv_bytes_available(device, settings.kv_fraction, settings.kv_bytes, reserved=activations)
    return Policy(checkpoint, *serve_from(available), embodiment)


def kv_geometry(config: ModelConfig, dtype: torch.dtype) -> KVGeometry:
    """What a model's K/V look like."""
    return KVGeometry(
        layers=config.dit.num_layers,
        heads=config.dit.num_heads,
        head_dim=config.dit.head_dim,
        frame_tokens=config.dit.frame_seqlen,
        frames_per_forward=config.dit.num_frame_per_block,
        register_tokens=config.dit.register_tokens,
        text_tokens=config.dit.text_len,
        image_tokens=config.image.tokens,
        dtype=dtype,
    )


def build_cache(
    config: ModelConfig, available: int, device: torch.device, dtype: torch.dtype, backend: str = "sdpa"
) -> KVCache:
    """A KV cache for a model, within `available` bytes. Raises NotEnoughMemory where not one session fits."""
    geometry, policy = kv_geometry(config, dtype), _window(config)
    budget = plan_budget(geometry, policy, available)
    logger.info(
        "KV cache: %d blocks of %.1f MiB, %.1f MiB with cross-attention, room for %d sessions, attention by %s",
        budget.blocks - 1,
        geometry.block_bytes / 2**20,
        (budget.blocks * geometry.block_bytes + budget.cross_bytes) / 2**20,
        budget.sessions,
        backend,
    )
    return KVCache(geometry, policy, budget, device, backend)


def _window(config: ModelConfig) -> WindowPolicy:
    return WindowPolicy(config.dit.window_frames)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is not a torch device; try auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} asked for, but torch sees no CUDA device")
    return device
