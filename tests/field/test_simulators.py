"""Simulators and other servers' clients, as their public code holds the conversation."""

import asyncio
import uuid

import msgpack_numpy
import numpy as np

from tests.field.field_client import FieldClient, field_client, pictures, state
from tests.serving import serving

NAMED = {"prompt": "pick up the object"}


async def test_molmospaces() -> None:
    """msgpack-numpy's own code, one picture under both exterior cameras, a new id per episode and never a reset."""

    def episodes(url: str) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        chunks = []
        with field_client(url, msgpack_numpy, ping_interval=60, ping_timeout=600) as client:
            for session_id in (str(uuid.uuid4()) for _ in range(2)):
                for _ in range(2):
                    seen = pictures(rng)
                    seen["observation/exterior_image_1_left"] = seen["observation/exterior_image_0_left"]
                    result = client.infer(seen | state(dtype=np.float64) | NAMED | {"session_id": session_id})
                    chunks.append(result["actions"])
        return chunks

    async with serving() as (server, _):
        chunks = await asyncio.to_thread(episodes, server.url)
    for chunk in chunks:
        assert (len(chunk), chunk.dtype) == (24, np.float32)
        assert all(row[:7].reshape(7).shape == (7,) and 0 <= np.clip(row[7], 0.0, 1.0) <= 1 for row in chunk)


class Environments:
    """N environments of Isaac Lab-Arena or RoboLab over one connection: an id for each, frames of their own."""

    def __init__(self, client: FieldClient, count: int) -> None:
        self._client = client
        self._rngs = [np.random.default_rng(number) for number in range(count)]
        self.ids = [str(uuid.uuid4()) for _ in range(count)]

    def step(self, number: int) -> np.ndarray:
        """Actions (24, 8) for this environment's next observation."""
        message = pictures(self._rngs[number]) | state() | NAMED | {"session_id": self.ids[number]}
        response = self._client.infer(message)
        return np.asarray(response.get("actions", response) if isinstance(response, dict) else response, np.float32)

    def begin_anew(self, number: int) -> None:
        self._rngs[number] = np.random.default_rng(number)
        self.ids[number] = str(uuid.uuid4())


ISAAC = {"compression": "deflate", "max_size": 2**20, "ping_interval": 60, "ping_timeout": 300}


async def test_environments_over_one_connection_are_as_good_as_alone() -> None:
    """Isaac Lab-Arena: calls interleaved, one environment reset by its id, and null for an id when it leaves."""
    steps = 3

    def alone(url: str) -> list[list[np.ndarray]]:
        chunks = []
        for number in range(2):
            with field_client(url, **ISAAC) as client:
                environments = Environments(client, 2)
                chunks.append([environments.step(number) for _ in range(steps)])
        return chunks

    def together(url: str) -> None:
        with field_client(url, **ISAAC) as client:
            environments = Environments(client, 2)
            for step in range(steps):
                if step == 1:
                    assert client.reset({"session_ids": [environments.ids[1]]}) == "reset successful"
                    environments.begin_anew(1)
                np.testing.assert_array_equal(environments.step(0), solo[0][step])
                np.testing.assert_array_equal(environments.step(1), solo[1][max(step - 1, 0)])
            assert client.reset({"session_ids": None}) == "reset successful"

    async with serving() as (server, _):
        solo = await asyncio.to_thread(alone, server.url)
        await asyncio.to_thread(together, server.url)


async def test_a_reset_of_an_environment_without_an_id_ends_no_others_episode() -> None:
    """RoboLab resets before its first call, and twice in a row: `session_ids` is null then, the others go on."""

    def run(url: str) -> None:
        with field_client(url, ping_interval=60, ping_timeout=600) as client:
            assert client.reset({"session_ids": None}) == "reset successful"
            environments = Environments(client, 2)
            environments.step(0)
            environments.step(1)
            client.reset({"session_ids": [environments.ids[0]]})
            client.reset({"session_ids": None})
            environments.step(1)

    async with serving() as (server, policy):
        await asyncio.to_thread(run, server.url)
    first, second = policy.events[:2]
    assert policy.events == [first, second, first.replace("infer", "end"), second]


async def test_vllm_omnis_example_gets_the_bare_array_on_its_path() -> None:
    """It converts the whole reply to an array, resets without a name, and expects the first actions again."""

    def run(url: str) -> None:
        rng = np.random.default_rng(0)
        named = NAMED | {"session_id": str(uuid.uuid4())}
        first, second = (pictures(rng, shape) | state() | named for shape in [(180, 320), (4, 180, 320)])
        with field_client(f"{url}/v1/realtime/robot/openpi", ping_interval=300, ping_timeout=3600) as client:
            actions = [np.asarray(client.infer(message), dtype=np.float32) for message in (first, second)]
            assert client.reset({}) == "reset successful"
            actions.append(np.asarray(client.infer(first), dtype=np.float32))
        assert all(each.shape == (24, 8) and np.isfinite(each).all() for each in actions)
        np.testing.assert_array_equal(actions[2], actions[0])

    async with serving() as (server, _):
        await asyncio.to_thread(run, server.url)
