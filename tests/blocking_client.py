"""Lets one test drive both policy clients."""

import asyncio
import threading
from typing import Any

from clients import AsyncPolicyClient


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

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        return self._call(self._client.infer(observation))

    def reset(self) -> None:
        self._call(self._client.reset())

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
