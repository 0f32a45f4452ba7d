"""An episode that the project renders itself: a gripper leads a red block in a circle over a table.

The scene is ray-cast from three cameras with NumPy, so the views agree with each other as a robot's do, and every
rendering is the same.
"""

import numpy as np

from clients.episode import CAMERAS, Episode, cut_into_calls, schedule

HEIGHT, WIDTH = 180, 320
LENGTH = 120  # frames, 8 s
_TABLE_HALF_SIZE = (0.55, 0.4)  # metres; the table's top is the plane z = 0, the origin its centre
_BLOCK_HALF_SIZE = np.array([0.04, 0.04, 0.04])
_GRIPPER_HALF_SIZE = np.array([0.02, 0.05, 0.1])
_LIGHT = np.array([0.3, -0.5, 0.81])
_UP = np.array([0.0, 0.0, 1.0])


def synthetic_episode() -> Episode:
    """The rendered episode: three cameras, 180x320, as long as six calls."""
    numbers = sorted({number for call in schedule(LENGTH) for number in call})
    frames = {camera: {number: _render(camera, number) for number in numbers} for camera in CAMERAS}
    return cut_into_calls("synthetic", LENGTH, frames)


def _render(camera: str, number: int) -> np.ndarray:
    """One image (180,320,3) uint8 RGB."""
    turn = 2 * np.pi * number / LENGTH
    block = np.array([0.22 * np.cos(turn), 0.16 * np.sin(turn), _BLOCK_HALF_SIZE[2]])
    gripper = block + np.array([-0.06 * np.sin(turn), 0.06 * np.cos(turn), 0.1])
    eye, target, zoom, sees_gripper = {
        CAMERAS[0]: (np.array([-0.7, -0.75, 0.6]), np.zeros(3), 1.0, True),
        CAMERAS[1]: (np.array([0.75, -0.7, 0.55]), np.zeros(3), 1.0, True),
        CAMERAS[2]: (gripper + np.array([0.0, -0.12, 0.22]), block, 0.7, False),
    }[camera]
    rays = _rays(eye, target, zoom)
    image, distance = _background(eye, rays)
    _draw_box(image, distance, eye, rays, block, _BLOCK_HALF_SIZE, (200, 40, 35))
    if sees_gripper:
        _draw_box(image, distance, eye, rays, gripper, _GRIPPER_HALF_SIZE, (70, 75, 85))
    return np.clip(image, 0, 255).astype(np.uint8)


def _rays(eye: np.ndarray, target: np.ndarray, zoom: float) -> np.ndarray:
    """Directions (3,180,320), unit length, through the pixels of a pinhole camera that looks at the target."""
    forward = (target - eye) / np.linalg.norm(target - eye)
    right = np.cross(forward, _UP)
    right /= np.linalg.norm(right)
    down = np.cross(forward, right)
    columns = (np.arange(WIDTH) + 0.5 - WIDTH / 2) / (WIDTH * zoom)
    rows = (np.arange(HEIGHT) + 0.5 - HEIGHT / 2) / (WIDTH * zoom)
    axes = np.stack([forward, right, down])[..., None, None]
    rays = axes[0] + columns[None, None, :] * axes[1] + rows[None, :, None] * axes[2]
    return (rays / np.sqrt((rays**2).sum(axis=0))).astype(np.float32)


def _background(eye: np.ndarray, rays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Wall and table as colours (180,320,3) float, and how far away each pixel's surface is (180,320)."""
    image = np.array([175, 180, 185], np.float32) + 35 * rays[2][..., None]  # the wall, lighter above
    below = rays[2] < 0
    distance = np.divide(-eye[2], rays[2], where=below, out=np.full_like(rays[2], np.inf))
    x, y = (eye[axis] + np.where(below, distance, 0) * rays[axis] for axis in (0, 1))
    on_table = below & (np.abs(x) < _TABLE_HALF_SIZE[0]) & (np.abs(y) < _TABLE_HALF_SIZE[1])
    grain = 9 * np.sin(60 * y + 3 * np.sin(7 * x)) - 14 * (np.abs((x * 5) % 1 - 0.5) > 0.48)
    image[on_table] = (np.array([165, 125, 80]) + grain[..., None])[on_table]
    return image, np.where(on_table, distance, np.inf)


def _draw_box(
    image: np.ndarray,
    distance: np.ndarray,
    eye: np.ndarray,
    rays: np.ndarray,
    centre: np.ndarray,
    half_size: np.ndarray,
    colour: tuple[int, int, int],
) -> None:
    """Draw an axis-parallel box where it is nearer than what is drawn already; image and distance are updated."""
    corners = np.stack([centre - half_size - eye, centre + half_size - eye]).astype(np.float32)
    with np.errstate(divide="ignore"):
        to_planes = corners[..., None, None] / rays
    entries, exits = to_planes.min(axis=0), to_planes.max(axis=0)
    entry, leave = entries.max(axis=0), exits.min(axis=0)
    hit = (entry < leave) & (entry > 0) & (entry < distance)
    axis = entries.argmax(axis=0)
    normal_along_axis = -np.sign(np.take_along_axis(rays, axis[None], axis=0))[0]
    light = 0.55 + 0.45 * np.clip(normal_along_axis * _LIGHT[axis], 0, 1)
    image[hit] = (light[..., None] * np.array(colour))[hit]
    distance[hit] = entry[hit]
