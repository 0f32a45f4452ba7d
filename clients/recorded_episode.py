"""Reads an episode from a robot's three camera recordings."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import av
import numpy as np

from clients.episode import CAMERAS, FRAMES_PER_SECOND, Episode, EpisodeError, cut_into_calls, is_scheduled

_FILES_ALONE = {"protocol_whitelist": "file"}
_LONGEST_PAUSE_SECONDS = 10.0
_SLACK = 0.1  # of a frame's time, by which the last one may come early


def read_episode(directory: Path) -> Episode:
    """The episode recorded in a directory's three files CAMERAS.mp4. Raises EpisodeError."""
    if not directory.is_dir():
        raise EpisodeError(f"{directory} is not a directory")
    frames, lengths = {}, {}
    for camera in CAMERAS:
        frames[camera], lengths[camera] = _read_scheduled(directory / f"{camera}.mp4")
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{camera}.mp4 {length}" for camera, length in lengths.items())
        raise EpisodeError(f"the recordings in {directory} differ in their number of frames: {found}")
    return cut_into_calls(directory.name, lengths[CAMERAS[0]], frames)


def _read_scheduled(path: Path) -> tuple[dict[int, np.ndarray], int]:
    """The frames of a video that the schedule may ask for, by number, and how many frames it has in all.

    Frames are counted as of a recording with FRAMES_PER_SECOND, whatever the video's own rate is.
    """
    if not path.is_file():
        raise EpisodeError(f"{path} is missing")
    frames: dict[int, np.ndarray] = {}
    length = 0
    try:
        # Of another format it could be a playlist, which has other files and addresses read.
        with av.open(str(path), format="mov", options=_FILES_ALONE, metadata_errors="replace") as container:
            if not container.streams.video:
                raise EpisodeError(f"{path} has no video in it")
            for number, frame in _resampled(path, container.decode(video=0)):
                if is_scheduled(number):
                    frames[number] = frame.to_ndarray(format="rgb24")
                length = number + 1
    except EpisodeError:
        raise
    except (av.FFmpegError, ValueError) as error:
        problem = error.strerror if isinstance(error, av.FFmpegError) else str(error)
        raise EpisodeError(f"{path} cannot be read after frame {length}: {problem}") from error
    if not frames:
        raise EpisodeError(f"{path} has no frames")
    sizes = {f"{image.shape[1]}x{image.shape[0]}": None for image in frames.values()}
    if len(sizes) > 1:
        raise EpisodeError(f"{path} has frames of more than one size: {', '.join(sizes)}")
    return frames, length


def _resampled(path: Path, frames: Iterable[av.VideoFrame]) -> Iterator[tuple[int, av.VideoFrame]]:
    """For each moment at FRAMES_PER_SECOND from the first frame to the last, its number and the frame nearest to it."""
    moment = 0
    began = last_at = 0.0
    last: av.VideoFrame | None = None
    for number, frame in enumerate(frames):
        if frame.time is None:
            raise EpisodeError(f"{path} does not say when its frame {number} was taken")
        if last is None:
            began = frame.time
        at = (frame.time - began) * FRAMES_PER_SECOND
        if last is not None:
            if not 0 < at - last_at <= _LONGEST_PAUSE_SECONDS * FRAMES_PER_SECOND:
                raise EpisodeError(
                    f"{path}: frame {number} comes {(at - last_at) / FRAMES_PER_SECOND:.3g} s after the one before, "
                    f"expected more than 0 s and at most {_LONGEST_PAUSE_SECONDS:g}"
                )
            while moment < (last_at + at) / 2:
                yield moment, last
                moment += 1
        last, last_at = frame, at
    while last is not None and moment <= last_at + _SLACK:
        yield moment, last
        moment += 1
