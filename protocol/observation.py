"""A robot's observation as clients send it: which cameras they mean, what an image and a joint state may look like."""

from collections.abc import Mapping

import numpy as np

from protocol.errors import RequestError, described

EXTERIOR_KEYS = tuple(f"observation/exterior_image_{number}_left" for number in range(3))
WRIST_KEY = "observation/wrist_image_left"
JOINT_KEY = "observation/joint_position"
GRIPPER_KEY = "observation/gripper_position"

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


def camera_views(observation: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Camera name ("exterior_left", "exterior_right", "wrist") to frames (T,H,W,3) uint8 RGB, T the same for all.

    The wrist camera and one exterior one are needed; a missing exterior camera has no entry.
    Raises RequestError.
    """
    keys = _camera_keys(observation)
    views = {name: _frames(key, _needed(observation, key, _EXPECTED_IMAGE)) for name, key in keys.items()}
    wrist_frames = len(views["wrist"])
    for name, key in keys.items():
        if len(views[name]) != wrist_frames:
            expected = f"{wrist_frames} frames, as many as {WRIST_KEY} has"
            raise RequestError(key, expected, str(len(views[name])))
    return views


def joint_position(observation: Mapping[str, object]) -> np.ndarray:
    """Seven joint angles in radians, (7,) float64, finite. Raises RequestError."""
    return _numbers(JOINT_KEY, _needed(observation, JOINT_KEY, "7 joint angles"), 7)


def gripper_position(observation: Mapping[str, object]) -> np.ndarray:
    """How far the gripper is closed, (1,) float64, finite; clients may send a bare number. Raises RequestError."""
    value = _needed(observation, GRIPPER_KEY, "1 number")
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0:
        value = value.item()
    return _numbers(GRIPPER_KEY, [value] if type(value) in (int, float) else value, 1)


def _camera_keys(observation: Mapping[str, object]) -> dict[str, str]:
    """Camera name to the key it came under. RoboArena numbers exterior cameras 0 and 1, DROID 1 and 2."""
    zero, one, two = EXTERIOR_KEYS
    left, right = (zero, one) if zero in observation else (one, two)
    keys = {"wrist": WRIST_KEY}
    if left in observation:
        keys["exterior_left"] = left
    if right in observation:
        keys["exterior_right"] = right
    if len(keys) == 1:
        raise RequestError(zero, f"at least one exterior camera (this, or {one} and {two})", "nothing")
    if left == zero and right not in observation and two in observation:
        raise RequestError(two, f"{one} beside {zero}", "cameras 0 and 2, which no numbering has")
    return keys


def _needed(observation: Mapping[str, object], key: str, expected: str) -> object:
    if key not in observation:
        raise RequestError(key, expected, "nothing")
    return observation[key]


def _frames(key: str, image: object) -> np.ndarray:
    """(T,H,W,3) uint8, C-contiguous. A side of 3 is too small for an image, so the axis of size 3 is the channels."""
    if not isinstance(image, np.ndarray) or image.ndim not in (3, 4):
        raise RequestError(key, _EXPECTED_IMAGE, described(image))
    frames = image if image.ndim == 4 else image[np.newaxis]
    if frames.shape[3] != 3 and frames.shape[1] == 3:
        frames = frames.transpose(0, 2, 3, 1)
    count, height, width, channels = frames.shape
    sides_fit = min(height, width) >= SMALLEST_SIDE and max(height, width) <= LARGEST_SIDE
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
    numbers = value.astype(np.float64)
    for number in numbers.tolist():
        if not -_LARGEST_FLOAT32 <= number <= _LARGEST_FLOAT32:  # NaN fails
            raise RequestError(key, f"finite numbers of shape ({count},)", str(numbers.tolist()))
    return numbers
