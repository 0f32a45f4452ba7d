"""What the server says first on every connection.

RoboArena clients build a dataclass from it with `Config(**metadata)`: a key more breaks them, a key less as well.
"""

from typing import Final

IMAGE_RESOLUTION: Final = (180, 320)
"""Height and width of the camera images that the policy was trained on; others are accepted and resized."""

HANDSHAKE: Final[dict[str, object]] = {
    "image_resolution": list(IMAGE_RESOLUTION),
    "needs_wrist_camera": True,
    "n_external_cameras": 2,
    "needs_stereo_camera": False,
    "needs_session_id": True,
    "action_space": "joint_position",
}
