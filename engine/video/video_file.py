"""An H.264 video that appears under its name when it is whole, with an episode's actions beside it."""

from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self

import av
import numpy as np

FRAMES_PER_SECOND = Fraction(5)
"""A call predicts eight frames for 24 actions, which DROID arms execute at 15 Hz."""


class VideoFile:
    """Writes `<path>.mp4` and `<path>.npz` for `path` in a `with` block; where the block raises, there is neither.

    Raises OSError where the disk does not take it.
    """

    def __init__(self, path: Path) -> None:
        self._video, self._part, self._arrays = (
            path.with_name(path.name + suffix) for suffix in (".mp4", ".mp4.part", ".npz")
        )

    def __enter__(self) -> Self:
        self._container = av.open(str(self._part), "w", format="mp4")
        self._stream = self._container.add_stream("libx264", rate=FRAMES_PER_SECOND)
        self._stream.pix_fmt = "yuv420p"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._container.mux(self._stream.encode(None))
            self._container.close()
            if kind is None:
                self._part.replace(self._video)
        finally:
            self._part.unlink(missing_ok=True)
            if not self._video.exists():
                self._arrays.unlink(missing_ok=True)

    def add_frames(self, frames: np.ndarray) -> None:
        """Append frames (T, h, w, 3) uint8 RGB; h and w are even and the same for all."""
        if not self._stream.codec_context.is_open:
            self._stream.height, self._stream.width = frames.shape[1:3]
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            self._container.mux(self._stream.encode(picture))

    def write_arrays(self, **arrays: np.ndarray) -> None:
        """Write the arrays beside the video, by name."""
        np.savez(self._arrays, **arrays)
