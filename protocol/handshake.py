"""What the server says first on every connection.

RoboArena clients build a dataclass from it with `Config(**metadata)`: a key more breaks them, a key less as well.
"""

from typing import Final

HANDSHAKE: Final[dict[str, object]] = {
    "image_resolution": [180, 320],
    "needs_wrist_camera": True,
    "n_external_cameras": 2,
    "needs_stereo_camera": False,
    "needs_session_id": True,
    "action_space": "joint_position",
}
"""What robots of the RoboArena kind are told; `image_resolution` is height and width, and other sizes are resized."""
