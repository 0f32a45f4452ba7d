"""Reads an episode from a robot's three camera recordings."""

from pathlib import Path

import av
import numpy as np

from clients.episode import CAMERAS, Episode, EpisodeError, cut_into_calls, is_scheduled


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
    """The frames of a video that the schedule may ask for, by number, and how many frames it has in all."""
    if not path.is_file():
        raise EpisodeError(f"{path} is missing")
    frames: dict[int, np.ndarray] = {}
    length = 0
    try:
        with av.open(str(path), metadata_errors="replace") as container:
            if not container.streams.video:
                raise EpisodeError(f"{path} has no video in it")
            for frame in container.decode(video=0):
                if is_scheduled(length):
                    frames[length] = frame.to_ndarray(format="rgb24")
                length += 1
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
