"""The policy that robots use: observations of many sessions in, chunks of actions out."""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.open import Checkpoint
from engine.model.text import LONGEST_PROMPT
from engine.presets import Preset
from engine.robot.embodiment import Embodiment
from engine.robot.transforms import Transforms
from engine.rollout import Rollout
from engine.session import BUFFERED_FRAMES, Session, Window
from kv_cache.cache import KVCache, KVReport
from protocol.robot import Observation


@dataclass(frozen=True)
class Chunk:
    """The answer to an observation.

    actions: (horizon, action size) float32. seconds: of inference, by phase.
    video_latents: what the model thinks will be seen, (C, F, H, W) float32 on the device. window: whether this call
    went on with the session's window or began one; the first latent frame is then the image that was observed.
    call: its number in the session, from 1. warnings: what is wrong with the observation although it was used, a
    sentence each.
    """

    actions: np.ndarray
    seconds: dict[str, float]
    video_latents: Tensor
    window: Window
    call: int
    warnings: tuple[str, ...] = ()

    @property
    def begins_window(self) -> bool:
        """Whether the session's window began with this call."""
        return self.window is not Window.CONTINUED


@dataclass(frozen=True)
class PolicyStats:
    """What the policy holds now; evictions are counted from the start.

    text_bytes: of prompts' cross-attention K/V. start_bytes: of what windows were started with. session_bytes: the most
    that one session can hold on the device.
    """

    sessions: int
    blocks_total: int
    blocks_free: int
    blocks_used: int
    block_bytes: int
    text_bytes: int
    start_bytes: int
    session_bytes: int
    evictions: int


class Policy:
    """One model, its KV cache and its sessions. Used by one thread, but for `stats` and `info`.

    slowest_call: seconds that the slowest call so far took, those of the warm-up included.
    """

    def __init__(
        self, checkpoint: Checkpoint, rollout: Rollout, cache: KVCache, transforms: Transforms, preset: Preset
    ) -> None:
        self._checkpoint = checkpoint
        self._rollout = rollout
        self._cache = cache
        self._transforms = transforms
        self._preset = preset
        self._sessions: dict[str, Session] = {}
        self.slowest_call = 0.0

    def infer(self, session_id: str, observation: Observation) -> Chunk:
        """The next actions for a session, which is made at its first observation.

        Where it raises, the session restarts its window at its next call; other sessions do not notice.
        """
        began = time.monotonic()
        newest = {view: frames[-BUFFERED_FRAMES:] for view, frames in observation.views.items()}
        frames = self._transforms.stitch(newest, observation.enlarge_to)
        state = self._transforms.normalize_state(observation.state)
        prompt = observation.prompt.strip()
        text = self._transforms.embodiment.prompt_text(prompt[:LONGEST_PROMPT])
        tokens, mask = self._rollout.tokenize(text)
        warnings = self._transforms.state_warnings(observation.state)
        if len(prompt) > LONGEST_PROMPT or (mask.all() and self._rollout.is_too_long(text)):
            warnings.append(f"prompt: the model reads {len(mask)} tokens, the end of this one is cut off")
        if session_id not in self._sessions:
            self._sessions[session_id] = Session(self._cache.session(session_id))
        session = self._sessions[session_id]
        prediction = self._rollout.call(session, frames, tokens, mask, state)
        actions = self._transforms.actions(prediction.action_latents, observation.state)
        self.slowest_call = max(self.slowest_call, time.monotonic() - began)
        return Chunk(
            actions, prediction.seconds, prediction.video_latents, prediction.window, session.calls, tuple(warnings)
        )

    def decode(self, latents: list[Tensor]) -> Iterator[np.ndarray]:
        """Video of the latents of a window's calls, piece by piece: frames (1, h, w, 3), then (4, h, w, 3), uint8.

        Each piece is computed when it is asked for, on the policy's thread; calls may be made between two.
        """
        return self._rollout.decode(torch.cat(latents, dim=1))

    @property
    def embodiment(self) -> Embodiment:
        """The kind of robot that is served."""
        return self._transforms.embodiment

    @property
    def calls_per_window(self) -> int:
        """Calls from one restart of a session's window to the next, where nothing else restarts it."""
        dit = self._rollout.config.dit
        return math.ceil((dit.window_frames - 1) / dit.num_frame_per_block)

    def reset_counters(self) -> None:
        """Count evictions and attention plans from here on."""
        self._cache.reset_counters()

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
            text_bytes=report.text_bytes,
            start_bytes=report.cross_bytes - report.text_bytes,
            session_bytes=report.session_bytes,
            evictions=report.evictions,
        )

    def kv_report(self) -> KVReport:
        """What the KV cache holds, session by session. Safe from any thread."""
        return self._cache.report()

    def info(self) -> dict[str, object]:
        """What is being served, ready for JSON."""
        config, embodiment = self._rollout.config, self._transforms.embodiment
        return {
            "checkpoint": self._checkpoint.name,
            "trained": self._checkpoint.trained,
            "embodiment": embodiment.name,
            "action_horizon": config.action_horizon,
            "action_size": embodiment.action_size,
            "window_frames": config.dit.window_frames,
            "sizes": asdict(config),
            "device": str(self._rollout.device),
            "dtype": str(self._rollout.dtype).removeprefix("torch."),
            "attention_backend": self._cache.paged.backend,
            "preset": self._preset.info(),
            "execution": self._rollout.execution,
            "execution_reason": self._rollout.execution_reason,
            "guidance": self._rollout.guidance,
            "kv_blocks": self._cache.report().blocks_total,
            "kv_sessions": self._cache.budget.sessions,
            "session_bytes": self._cache.report().session_bytes,
        }
