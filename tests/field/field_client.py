"""A client as the field's Python clients are written: blocking, one connection, pack, send, take what comes."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import openpi_client.msgpack_numpy
from websockets.sync.client import ClientConnection, connect


class FieldClient:
    """What the clients of RoboArena, DreamZero, MolmoSpaces and vLLM-Omni have in common.

    codec: the module whose packb and unpackb are used.
    """

    def __init__(self, websocket: ClientConnection, codec: ModuleType) -> None:
        self._websocket = websocket
        self._codec = codec
        self.handshake = codec.unpackb(websocket.recv())

    def infer(self, observation: dict[str, Any]) -> Any:
        """Raises RuntimeError with the text of an error."""
        reply = self._ask(observation | {"endpoint": "infer"})
        if isinstance(reply, str):
            raise RuntimeError(f"Error in inference server:\n{reply}")
        return self._codec.unpackb(reply)

    def reset(self, reset_info: dict[str, Any]) -> Any:
        return self._ask(reset_info | {"endpoint": "reset"})

    def _ask(self, message: dict[str, Any]) -> str | bytes:
        self._websocket.send(self._codec.packb(message))
        return self._websocket.recv()


@contextmanager
def field_client(url: str, codec: ModuleType = openpi_client.msgpack_numpy, **options: Any) -> Iterator[FieldClient]:
    """A connected client; options go to websockets and stand beside what nearly every client passes."""
    with connect(url, **{"compression": None, "max_size": None} | options) as websocket:
        yield FieldClient(websocket, codec)


def state(shape: tuple[int, ...] = (), dtype: type[np.floating[Any]] = np.float32) -> dict[str, Any]:
    """Joints, gripper and the cartesian position that nobody uses, at rest; shape stands before the vectors' own."""
    return {
        "observation/joint_position": np.zeros((*shape, 7), dtype),
        "observation/cartesian_position": np.zeros((6,), dtype),
        "observation/gripper_position": np.zeros((*shape, 1), dtype),
    }


def pictures(
    rng: np.random.Generator, shape: tuple[int, ...] = (180, 320), numbering: tuple[int, int] = (0, 1)
) -> dict[str, np.ndarray]:
    """A frame of noise, or several, under each camera's key."""
    keys = (*(f"exterior_image_{number}_left" for number in numbering), "wrist_image_left")
    return {f"observation/{key}": rng.integers(0, 256, (*shape, 3), np.uint8) for key in keys}
