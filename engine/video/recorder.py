"""What the model thought would happen: each finished episode's predicted video, with the actions beside it.

Latents are collected on the engine's thread and kept on the CPU. A thread of its own has them decoded when the engine
has nothing else to do, one latent frame at a time, and does all the encoding and writing.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.video.video_file import VideoFile

if TYPE_CHECKING:
    from torch import Tensor

    from engine.policy import Chunk, Policy

log = logging.getLogger(__name__)

SubmitIdle = Callable[[Callable[["Policy"], Any]], Future[Any]]
"""How work that can wait gets its turn on the engine's thread."""

MOST_BYTES = 2**30
"""Latents kept in memory, of all episodes that run or wait to be written: about 2400 calls of DROID's size."""

_LONGEST_NAME = 100


@dataclass
class _Window:
    """Latents (C, F, H, W) of the calls between two restarts, which are decoded together."""

    latents: list[Tensor] = field(default_factory=list)

    @property
    def frames(self) -> int:
        """Frames of the decoded video: one for the first latent frame, four for each other."""
        return 1 + 4 * (sum(latents.shape[1] for latents in self.latents) - 1)


@dataclass
class _Episode:
    """actions: (horizon, size) of each call. first_frames: the first frame of the video that each call predicted."""

    name: str
    began: datetime
    windows: list[_Window] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    first_frames: list[int] = field(default_factory=list)
    held: int = 0
    is_cut: bool = False


class Recorder:
    """Writes `<session>-<time>.mp4` and `.npz` for each finished episode into `directory`, which must exist.

    title: the session's name in file names, made from its id. most_bytes: of latents kept; an episode that would
    exceed it is written up to there. What cannot be written is logged, and never raised.

    `finished` is done when everything has been written after `close`.
    """

    def __init__(self, directory: Path, title: Callable[[str], str] = str, most_bytes: int = MOST_BYTES) -> None:
        self.directory = directory
        self.finished: Future[None] = Future()
        self._title = title
        self._most_bytes = most_bytes
        self._held = 0
        self._lock = threading.Lock()  # of _held, which both threads change
        self._episodes: dict[str, _Episode] = {}
        self._to_write: SimpleQueue[_Episode | None] = SimpleQueue()

    @property
    def held_bytes(self) -> int:
        """Latents in memory now."""
        return self._held

    def start(self, submit_idle: SubmitIdle) -> None:
        """Begin to write what is finished. Call it once."""
        threading.Thread(target=self._work, args=(submit_idle,), name="recorder", daemon=True).start()

    # On the engine's thread.

    def add(self, session_id: str, chunk: Chunk) -> None:
        """Take a call's video latents and actions into the session's episode."""
        episode = self._episodes.get(session_id)
        if episode is None:
            name = re.sub(r"[^A-Za-z0-9_-]+", "_", self._title(session_id))[:_LONGEST_NAME]
            episode = self._episodes[session_id] = _Episode(name, datetime.now(UTC))
        size = chunk.video_latents.nbytes
        if episode.is_cut:
            return
        if not self._hold(size):
            episode.is_cut = True
            calls = len(episode.actions)
            log.warning("recordings fill their memory: that of %s ends after %d calls", episode.name, calls)
            return
        episode.held += size
        if chunk.begins_window or not episode.windows:
            episode.windows.append(_Window())
        window = episode.windows[-1]
        known = window.frames if window.latents else 1  # at a restart the first frame is what the robot saw
        episode.first_frames.append(sum(each.frames for each in episode.windows[:-1]) + known)
        window.latents.append(chunk.video_latents.cpu())
        episode.actions.append(chunk.actions)

    def finish(self, session_id: str) -> None:
        """The session has ended: have its episode written. A session without calls is fine."""
        episode = self._episodes.pop(session_id, None)
        if episode is not None:
            self._to_write.put(episode)

    def close(self) -> None:
        """All sessions have ended, and no more will come."""
        for session_id in list(self._episodes):
            self.finish(session_id)
        self._to_write.put(None)

    def _hold(self, size: int) -> bool:
        with self._lock:
            if self._held + size > self._most_bytes:
                return False
            self._held += size
        return True

    # On the recorder's thread.

    def _work(self, submit_idle: SubmitIdle) -> None:
        while (episode := self._to_write.get()) is not None:
            try:
                if episode.actions:
                    self._write(episode, submit_idle)
            except Exception as error:
                log.warning("the recording of %s is lost: %s: %s", episode.name, type(error).__name__, error)
            with self._lock:
                self._held -= episode.held
        self.finished.set_result(None)

    def _write(self, episode: _Episode, submit_idle: SubmitIdle) -> None:
        path = self._unused(f"{episode.name}-{episode.began:%Y%m%dT%H%M%SZ}")
        with VideoFile(path) as file:
            for window in episode.windows:
                for frames in _decoded(window, submit_idle):
                    file.add_frames(frames)
            file.write_arrays(actions=np.stack(episode.actions), first_frame=np.array(episode.first_frames))
        log.info("recorded %s.mp4", path)

    def _unused(self, name: str) -> Path:
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(self.directory / each for each in names if not (self.directory / f"{each}.mp4").exists())


def _decoded(window: _Window, submit_idle: SubmitIdle) -> Iterator[np.ndarray]:
    """The window's video; each piece is asked for when the one before has been dealt with."""
    pieces: Iterator[np.ndarray] = submit_idle(lambda policy: policy.decode(window.latents)).result()
    while (frames := submit_idle(lambda _: next(pieces, None)).result()) is not None:
        yield frames
