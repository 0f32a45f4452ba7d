"""openpi-client from PyPI, its own code, against a running server with the real tiny policy."""

import asyncio
import time
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.image_tools import resize_with_pad
from openpi_client.runtime.agents.policy_agent import PolicyAgent
from openpi_client.runtime.environment import Environment
from openpi_client.runtime.runtime import Runtime
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from protocol.robot import HANDSHAKE
from tests.serving import observation, serving


async def test_calls_an_error_and_the_next_call() -> None:
    def episode(port: int) -> None:
        client = WebsocketClientPolicy("127.0.0.1", port)
        assert client.get_server_metadata() == HANDSHAKE
        for frames in (1, 4):
            reply = client.infer(observation(frames))
            assert (reply["actions"].shape, reply["actions"].dtype) == ((24, 8), np.float32)
        with pytest.raises(RuntimeError, match="prompt"):
            client.infer(observation(prompt=None))
        assert client.infer(observation(4))["actions"].shape == (24, 8)
        client._ws.close()

    async with serving() as (server, _):
        await asyncio.to_thread(episode, server.port)


async def test_its_reset_says_nothing_to_the_server_and_a_new_session_id_does() -> None:
    def episodes(port: int) -> tuple[np.ndarray, ...]:
        client = WebsocketClientPolicy("127.0.0.1", port)
        first = client.infer(observation(session_id="one"))["actions"]
        client.reset()
        second = client.infer(observation(session_id="one"))["actions"]
        anew = client.infer(observation(session_id="two"))["actions"]
        client._ws.close()
        return first, second, anew

    async with serving() as (server, _):
        first, second, anew = await asyncio.to_thread(episodes, server.port)
    assert (second != first).any()
    np.testing.assert_array_equal(anew, first)


async def test_the_simple_client_can_average_everything_in_server_timing() -> None:
    """openpi's examples/simple_client makes columns of all values, of equal length, after two calls to warm up."""

    def measure(port: int) -> dict[str, list[float]]:
        client = WebsocketClientPolicy("127.0.0.1", port)
        columns = defaultdict(list)
        for _ in range(2):
            client.infer(observation())
        for call in range(4):  # in which a window ends and another begins
            start = time.monotonic()
            reply = client.infer(observation() if call else observation(session_id="another"))
            columns["client_infer_ms"].append(1e3 * (time.monotonic() - start))
            for group in ("server_timing", "policy_timing"):
                for name, value in reply.get(group, {}).items():
                    columns[f"{group}_{name}"].append(value)
        client._ws.close()
        return columns

    async with serving() as (server, _):
        columns = await asyncio.to_thread(measure, server.port)
    assert {"server_timing_infer_ms", "server_timing_prev_total_ms"} <= columns.keys()
    for values in columns.values():
        assert len(values) == 4
        assert all(type(value) is float for value in values)
        assert np.isfinite([np.mean(values), np.std(values), np.quantile(values, 0.25)]).all()


class Arm(Environment):
    """Joints that go where an action says; an episode is four actions long."""

    def __init__(self) -> None:
        self.episode = 0
        self.actions: list[dict[str, Any]] = []

    def reset(self) -> None:
        self.episode += 1
        self.joints = np.zeros(7)

    def is_episode_complete(self) -> bool:
        return len(self.actions) % 4 == 0

    def get_observation(self) -> dict[str, Any]:
        changes = {"observation__joint_position": self.joints, "session_id": f"episode {self.episode}"}
        return observation(**changes)

    def apply_action(self, action: dict[str, Any]) -> None:
        self.actions.append(action)
        self.joints = action["actions"][:7]


async def test_its_runtime_with_agent_and_action_broker() -> None:
    """The broker cuts every array of a reply along the horizon and must cope with whatever else is in there."""

    def run(port: int) -> list[dict[str, Any]]:
        client = WebsocketClientPolicy("127.0.0.1", port)
        arm = Arm()
        agent = PolicyAgent(ActionChunkBroker(client, action_horizon=3))
        Runtime(arm, agent, [], num_episodes=2).run()
        client._ws.close()
        return arm.actions

    async with serving() as (server, policy):
        actions = await asyncio.to_thread(run, server.port)
    assert [action["actions"].shape for action in actions] == [(8,)] * 8
    assert policy.events.count("infer id episode 1") == policy.events.count("infer id episode 2") == 2


@pytest.mark.parametrize("kind", ["letterboxed", "float, channels first"])
async def test_a_droid_robot_with_one_square_camera(kind: str) -> None:
    """openpi's examples/droid sends one exterior camera, its frames resized with bars to 224x224, and no session id."""

    def call(port: int) -> dict[str, Any]:
        client = WebsocketClientPolicy("127.0.0.1", port)
        rng = np.random.default_rng(0)
        frame = rng.integers(0, 256, (720, 1280, 3), np.uint8)[..., ::-1]
        image = resize_with_pad(frame, 224, 224) if kind == "letterboxed" else rng.random((3, 224, 224), np.float32)
        reply = client.infer(
            {
                "observation/exterior_image_1_left": image,
                "observation/wrist_image_left": image,
                "observation/joint_position": np.zeros(7),
                "observation/gripper_position": np.zeros(1),
                "prompt": "pick up the cup",
            }
        )
        client._ws.close()
        return reply

    async with serving() as (server, _):
        reply = await asyncio.to_thread(call, server.port)
    assert reply["actions"].shape == (24, 8)
