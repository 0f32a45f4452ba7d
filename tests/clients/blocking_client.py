"""Lets one test drive both policy clients."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from clients import AsyncPolicyClient, PolicyClient


class Blocking:
    """An AsyncPolicyClient with the methods of PolicyClient, its event loop running on a thread."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._client = AsyncPolicyClient(*arguments, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._call(self._client.__aenter__())
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "Blocking":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def infer(self, observation: dict[str, Any], **options: Any) -> dict[str, Any]:
        return self._call(self._client.infer(observation, **options))

    def reset(self, **options: Any) -> None:
        self._call(self._client.reset(**options))

    def get_server_metadata(self) -> dict[str, Any]:
        return self._call(self._client.get_server_metadata())

    def close(self) -> None:
        self._call(self._client.close())
        self.stop()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)


both_clients = pytest.mark.parametrize("connect", [PolicyClient, Blocking], ids=["blocking", "asyncio"])
"""Gives a test the class of each client as `connect`."""


def observation(number: float = 0, **more: object) -> dict[str, Any]:
    """A valid observation that tests.clients.wire_server answers with `actions(number)`."""
    image = np.zeros((18, 32, 3), np.uint8)
    return {
        "observation/exterior_image_1_left": image,
        "observation/wrist_image_left": image,
        "observation/joint_position": np.full(7, number),
        "observation/gripper_position": np.zeros(1),
        "prompt": "fold the towel",
        **more,
    }


def actions(number: float) -> np.ndarray:
    return np.full((24, 8), number, np.float32)
