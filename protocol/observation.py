"""A robot's observation as clients send it: which cameras they mean, what an image and a joint state may look like."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np

from protocol.errors import RequestError, described
from protocol.robot import Observation, ObservationSpec

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


def read_observation(request: Mapping[str, object], spec: ObservationSpec) -> tuple[Observation, tuple[str, ...]]:
    """The observation that a request holds, and what is wrong with it although it is used, a sentence each.

    The black bars that openpi's `resize_with_pad` adds are cut off. State vectors are float64; clients may send a bare
    number for a size of 1. Raises RequestError, which names the key at fault and what was expected there.
    """
    views, enlarge_to, warnings = _views(request, spec)
    return Observation(views, _state(request, spec), _prompt(request), enlarge_to), warnings


def _prompt(request: Mapping[str, object]) -> str:
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise RequestError("prompt", "text", described(prompt) if "prompt" in request else "nothing")
    return prompt


def _views(
    observation: Mapping[str, object], spec: ObservationSpec
) -> tuple[dict[str, np.ndarray], tuple[int, int] | None, tuple[str, ...]]:
    """Frames by view, what they are to be enlarged to, and warnings."""
    keys = _view_keys(observation, spec)
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
    top, bottom = _letterbox(list(views.values()), spec.resolution)
    cut = {name: frames[:, top : frames.shape[1] - bottom] for name, frames in views.items()}
    warnings = [
        _size_warning(keys[name], views[name], cut[name], spec.resolution)
        for name in views
        if views[name].shape[1:3] != spec.resolution
    ]
    enlarge = top > 0 and _same_aspect(cut[first], spec.resolution)
    return cut, spec.resolution if enlarge else None, tuple(warnings)


def _state(observation: Mapping[str, object], spec: ObservationSpec) -> dict[str, np.ndarray]:
    vectors = {}
    for vector in spec.state:
        key, size = vector.key, vector.size
        if key not in observation:
            raise RequestError(key, f"{size} {vector.meaning}", "nothing")
        vectors[vector.name] = _numbers(key, observation[key], size)
    return vectors


def _view_keys(observation: Mapping[str, object], spec: ObservationSpec) -> dict[str, str]:
    """View to the key it came under, the first of its keys that was sent and carries no other view.

    One that is needed and was not sent has the key that it should have come under.
    """
    keys: dict[str, str] = {}
    numbering: tuple[int, str] | None = None
    taken: set[str] = set()
    for view in spec.views:
        for index, key in enumerate(view.keys):  # noqa: B007 (used below)
            if key in observation and key not in taken:
                break
        else:
            if view.required:
                keys[view.name] = view.keys[numbering[0] if numbering and len(view.keys) > 1 else 0]
            continue
        keys[view.name] = key
        taken.add(key)
        if len(view.keys) > 1:
            numbering = numbering or (index, key)
            if index != numbering[0]:
                numbers = " and ".join(map(_number, (numbering[1], key)))
                expected = f"{view.keys[numbering[0]]} beside {numbering[1]}"
                raise RequestError(key, expected, f"cameras {numbers}, which no numbering has")
    for group, members in spec.groups.items():
        if keys.keys().isdisjoint(members):
            this, *others = dict.fromkeys(key for view in members.values() for key in view.keys)
            raise RequestError(this, f"at least one {group} (this, or {' or '.join(others)})", "nothing")
    return keys


def _letterbox(pictures: list[np.ndarray], resolution: tuple[int, int]) -> tuple[int, int]:
    """Rows above and below that `resize_with_pad` left black in square pictures of wider cameras; 0 and 0 for none.

    They are exactly black in all frames (T,S,S,3) of all cameras, and those of a camera of the aspect that `resolution`
    has, in which further dark rows may follow, or just those of one that is 4:3. A camera's own rounding may make them
    a row more or less.
    """
    shapes = {frames.shape[1:3] for frames in pictures}
    side, width = next(iter(shapes))
    if len(shapes) > 1 or side != width:
        return 0, 0
    lit = np.flatnonzero(np.logical_or.reduce([frames.any(axis=(0, 2, 3)) for frames in pictures]))
    if not lit.size:
        return 0, 0
    found = (int(lit[0]), side - 1 - int(lit[-1]))
    best = side * resolution[0] // max(resolution)
    for height in (best, best - 1, best + 1, *(side * 3 // 4 + extra for extra in (0, -1, 1))):
        above = (side - height) // 2
        if 0 < height < side and found == (above, side - height - above):
            return found
    above = (side - best) // 2
    below = side - best - above
    return (above, below) if above > 0 and found[0] >= above and found[1] >= below else (0, 0)


def _same_aspect(frames: np.ndarray, resolution: tuple[int, int]) -> bool:
    """But for a pixel, which is what rounding leaves of the same aspect."""
    height, width = frames.shape[1:3]
    return abs(height * resolution[1] - width * resolution[0]) <= max(resolution)


def _size_warning(key: str, sent: np.ndarray, cut: np.ndarray, resolution: tuple[int, int]) -> str:
    """Of pictures (T,H,W,3) that are not of the size that robots are told to send."""
    effects = ["its black bars are cut off"] if cut.shape != sent.shape else []
    effects.append("resized" if _same_aspect(cut, resolution) else "distorted by resizing, being of another aspect")
    found, best = ("x".join(map(str, size)) for size in (sent.shape[1:3], resolution))
    return f"{key} is {found} where {best} is best: {', '.join(effects)}"


def _number(key: str) -> str:
    """The number of a numbered camera, by which messages name it."""
    digits = re.search(r"\d+", key)
    return digits[0] if digits else key


def _frames(key: str, image: object) -> np.ndarray:
    """(T,H,W,3) uint8, C-contiguous. A side of 3 is too small for an image, so the axis of size 3 is the channels."""
    if isinstance(image, list) and 1 <= len(image) <= MOST_FRAMES and _are_alike(image):
        image = np.stack(image)
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
    """(count,) float64 from numbers in a row, finite also as float32, the model's input.

    An array, a list or, for one, a bare number; axes of size 1 around the row may be there.
    """
    row = value
    if isinstance(row, list):
        items = list(_leaves(row, count))
        row = np.array(items, dtype=np.float64) if all(_is_number(item) for item in items) else None
    elif _is_number(row):
        row = np.array([row], dtype=np.float64)
    is_row = isinstance(row, np.ndarray) and row.dtype.kind in "iuf" and row.size == count == max(row.shape, default=1)
    if not is_row:
        raise RequestError(key, f"numbers of shape ({count},)", described(value))
    numbers = cast(np.ndarray, row).astype(np.float64, copy=False).reshape(count)
    for number in numbers.tolist():
        if not -_LARGEST_FLOAT32 <= number <= _LARGEST_FLOAT32:  # NaN fails
            raise RequestError(key, f"finite numbers of shape ({count},)", str(numbers.tolist()))
    return numbers


def _leaves(items: list[object], most: int) -> Iterator[object]:
    """What lists in lists and arrays in them hold; arrays of more than `most` values as they are."""
    for item in items:
        if isinstance(item, np.ndarray) and item.size <= most:
            item = item.tolist()
        if isinstance(item, list):
            yield from _leaves(item, most)
        else:
            yield item


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _are_alike(items: list[object]) -> bool:
    first = items[0]
    return isinstance(first, np.ndarray) and all(
        isinstance(item, np.ndarray) and (item.shape, item.dtype) == (first.shape, first.dtype) for item in items
    )
