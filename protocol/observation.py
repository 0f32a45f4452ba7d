"""A robot's observation as clients send it: which cameras they mean, what an image and a joint state may look like."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from protocol.errors import RequestError, described
from protocol.observation_spec import ObservationSpec

SMALLEST_SIDE = 8
LARGEST_SIDE = 4096
MOST_FRAMES = 32
"""More frames of one camera in one call are refused: the model looks at the last four."""

_UINT8 = np.dtype(np.uint8)
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_ROUNDING_SLACK = 1e-3  # one step of float16 at 1.0, where a client's own resizing may end up
_EXPECTED_IMAGE = (
    f"an RGB image (H,W,3) or frames (T,H,W,3), uint8 or float in [0,1], channels last or first, "
    f"sides {SMALLEST_SIDE} to {LARGEST_SIDE}, T 1 to {MOST_FRAMES}"
)


def camera_views(observation: Mapping[str, object], spec: ObservationSpec) -> dict[str, np.ndarray]:
    """Camera name to frames (T,H,W,3) uint8 RGB, T the same for all; a camera that may be missing and is has no entry.

    Raises RequestError.
    """
    keys = _camera_keys(observation, spec)
    views: dict[str, np.ndarray] = {}
    for name, key in keys.items():
        if key not in observation:
            raise RequestError(key, _EXPECTED_IMAGE, "nothing")
        views[name] = _frames(key, observation[key])
    first, *others = views
    for name in others:
        if len(views[name]) != len(views[first]):
            expected = f"{len(views[first])} frames, as many as {keys[first]} has"
            raise RequestError(keys[name], expected, str(len(views[name])))
    return views


def state_vectors(observation: Mapping[str, object], spec: ObservationSpec) -> dict[str, np.ndarray]:
    """State vector name to (size,) float64, finite; clients may send a bare number for a size of 1.

    Raises RequestError.
    """
    vectors = {}
    for vector in spec.state:
        key, size = vector.key, vector.size
        if key not in observation:
            raise RequestError(key, f"{size} {vector.meaning}", "nothing")
        value = observation[key]
        if size == 1:
            if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0:
                value = value.item()
            value = [value] if type(value) in (int, float) else value
        vectors[vector.name] = _numbers(key, value, size)
    return vectors


def _camera_keys(observation: Mapping[str, object], spec: ObservationSpec) -> dict[str, str]:
    """Camera name to the key it came under, the first of its keys that was sent and carries no other camera.

    A camera that is needed and was not sent has the key that it should have come under.
    """
    keys: dict[str, str] = {}
    numbering: tuple[int, str] | None = None
    taken: set[str] = set()
    for camera in spec.cameras:
        for index, key in enumerate(camera.keys):  # noqa: B007 (used below)
            if key in observation and key not in taken:
                break
        else:
            if camera.required:
                keys[camera.name] = camera.keys[numbering[0] if numbering and len(camera.keys) > 1 else 0]
            continue
        keys[camera.name] = key
        taken.add(key)
        if len(camera.keys) > 1:
            numbering = numbering or (index, key)
            if index != numbering[0]:
                numbers = " and ".join(map(_number, (numbering[1], key)))
                expected = f"{camera.keys[numbering[0]]} beside {numbering[1]}"
                raise RequestError(key, expected, f"cameras {numbers}, which no numbering has")
    for group, members in spec.groups.items():
        if keys.keys().isdisjoint(members):
            this, *others = dict.fromkeys(key for camera in members.values() for key in camera.keys)
            raise RequestError(this, f"at least one {group} (this, or {' or '.join(others)})", "nothing")
    return keys


def _number(key: str) -> str:
    """The number of a numbered camera, by which messages name it."""
    digits = re.search(r"\d+", key)
    return digits[0] if digits else key


def _frames(key: str, image: object) -> np.ndarray:
    """(T,H,W,3) uint8, C-contiguous. A side of 3 is too small for an image, so the axis of size 3 is the channels."""
    if not isinstance(image, np.ndarray) or image.ndim not in (3, 4):
        raise RequestError(key, _EXPECTED_IMAGE, described(image))
    frames = image if image.ndim == 4 else image[np.newaxis]
    if frames.shape[3] != 3 and frames.shape[1] == 3:
        frames = frames.transpose(0, 2, 3, 1)
    count, height, width, channels = frames.shape
    sides_fit = SMALLEST_SIDE <= height <= LARGEST_SIDE and SMALLEST_SIDE <= width <= LARGEST_SIDE
    if channels != 3 or not sides_fit or not 1 <= count <= MOST_FRAMES:
        raise RequestError(key, _EXPECTED_IMAGE, described(image))
    if frames.dtype.kind == "f":
        return _bytes_from_floats(key, frames)
    if frames.dtype != _UINT8:
        raise RequestError(key, _EXPECTED_IMAGE, described(image))
    return np.ascontiguousarray(frames)


def _bytes_from_floats(key: str, frames: np.ndarray) -> np.ndarray:
    lowest, highest = frames.min(), frames.max()
    if not (lowest >= -_ROUNDING_SLACK and highest <= 1 + _ROUNDING_SLACK):  # NaN fails both comparisons
        raise RequestError(key, "float values in [0,1]", f"values from {lowest:.4g} to {highest:.4g}")
    scaled = np.multiply(frames, 255, dtype=np.float32, casting="same_kind", order="C")
    return np.clip(np.rint(scaled, out=scaled), 0, 255, out=scaled).astype(np.uint8)


def _numbers(key: str, value: object, count: int) -> np.ndarray:
    """(count,) float64 from an array or a plain list of numbers, finite also as float32, the model's input."""
    if isinstance(value, list) and all(type(item) in (int, float) for item in value):
        value = np.array(value, dtype=np.float64)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf" or value.shape != (count,):
        raise RequestError(key, f"numbers of shape ({count},)", described(value))
    numbers = value.astype(np.float64, copy=False)
    for number in numbers.tolist():
        if not -_LARGEST_FLOAT32 <= number <= _LARGEST_FLOAT32:  # NaN fails
            raise RequestError(key, f"finite numbers of shape ({count},)", str(numbers.tolist()))
    return numbers
