"""Our own client against the running server with the real tiny policy."""

import asyncio

import numpy as np

from clients import PolicyClient
from tests.serving import SECONDS, observation, serving


async def test_our_client_goes_on_with_its_episode_over_a_broken_connection() -> None:
    async with serving() as (server, _):

        def calls(session_id: str, broken_between: bool) -> list[np.ndarray]:
            with PolicyClient("127.0.0.1", server.port, resend=True) as client:
                actions = []
                for seed in (1, 2):
                    actions.append(client.infer(observation(4, seed, session_id=session_id))["actions"])
                    if broken_between:
                        asyncio.run_coroutine_threadsafe(break_connections(), loop).result(SECONDS)
                return actions

        async def break_connections() -> None:
            for connection in server._listener.connections:
                connection.transport.abort()

        loop = asyncio.get_running_loop()
        unbroken = await asyncio.to_thread(calls, "unbroken", False)
        broken = await asyncio.to_thread(calls, "broken", True)
    np.testing.assert_array_equal(broken, unbroken)
