"""The clients in the field, unmodified, and our own against a running server with the real tiny policy."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgpack_numpy
import numpy as np
import openpi_client.msgpack_numpy as openpi_numpy
import pytest
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from websockets.sync.client import connect

from clients import PolicyClient
from policy_server.server import PolicyServer
from protocol.handshake import HANDSHAKE
from tests.serving import SECONDS, observation, serving


@pytest.fixture
async def server() -> AsyncIterator[PolicyServer]:
    async with serving() as (running, _):
        yield running


async def test_openpi_client(server: PolicyServer) -> None:
    def episode() -> None:
        client = WebsocketClientPolicy("127.0.0.1", server.port)
        assert client.get_server_metadata() == HANDSHAKE
        first, second = (client.infer(observation(frames)) for frames in (1, 4))
        client.reset()
        for reply in (first, second):
            assert reply["actions"].shape == (24, 8)
            assert reply["actions"].dtype == np.float32
        assert set(second["server_timing"]) == {"infer_ms", "wait_ms", "prev_total_ms"}
        with pytest.raises(RuntimeError, match="prompt"):
            client.infer(observation(prompt=None))
        assert client.infer(observation(4))["actions"].shape == (24, 8)
        client._ws.close()

    await asyncio.to_thread(episode)


async def test_openpi_client_behind_its_action_broker(server: PolicyServer) -> None:
    """The broker cuts every array of the reply along the horizon, and must cope with what else is in there."""

    def episode() -> list[np.ndarray]:
        client = WebsocketClientPolicy("127.0.0.1", server.port)
        broker = ActionChunkBroker(client, action_horizon=8)
        actions = [broker.infer(observation())["actions"] for _ in range(8)]
        client._ws.close()
        return actions

    actions = await asyncio.to_thread(episode)
    assert all(action.shape == (8,) for action in actions)
    assert (actions[0] != actions[7]).any()


@dataclass
class Config:
    """What a RoboArena client makes of the handshake: exactly these fields."""

    image_resolution: tuple[int, int] | None
    needs_wrist_camera: bool
    n_external_cameras: int
    needs_stereo_camera: bool
    needs_session_id: bool
    action_space: str


async def test_a_roboarena_conversation(server: PolicyServer) -> None:
    def ask(websocket, message: dict[str, object]):  # type: ignore[no-untyped-def]
        websocket.send(openpi_numpy.packb(message))
        reply = websocket.recv()
        return reply if isinstance(reply, str) else openpi_numpy.unpackb(reply)

    def episode() -> None:
        with connect(server.url, compression=None, max_size=None) as websocket:
            config = Config(**openpi_numpy.unpackb(websocket.recv()))
            assert tuple(config.image_resolution or ()) == (180, 320)
            assert config.action_space == "joint_position"
            height, width = config.image_resolution or (0, 0)
            seen = {
                f"observation/{name}": np.zeros((height, width, 3), np.uint8)
                for name in ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")
            }
            seen |= {
                "observation/joint_position": np.zeros(7, np.float32),
                "observation/cartesian_position": np.zeros(6, np.float32),
                "observation/gripper_position": np.zeros(1, np.float32),
            }
            message = seen | {"prompt": "pick up the cup", "session_id": "0e6c", "endpoint": "infer"}
            actions = ask(websocket, message)
            assert isinstance(actions, np.ndarray)
            assert (actions.shape, actions.dtype) == ((24, 8), np.float32)
            assert ask(websocket, {"endpoint": "reset"}) == "reset successful"
            np.testing.assert_array_equal(ask(websocket, message), actions)
            assert "joint_position" in ask(websocket, message | {"observation/joint_position": np.zeros(6)})

    await asyncio.to_thread(episode)


async def test_msgpack_numpy_packer(server: PolicyServer) -> None:
    def episode() -> None:
        with connect(server.url, compression=None, max_size=None) as websocket:
            websocket.recv()
            websocket.send(msgpack_numpy.packb(observation(frames=4)))
            reply = msgpack_numpy.unpackb(websocket.recv())
            assert reply["actions"].shape == (24, 8)
            assert reply["server_timing"]["infer_ms"] > 0

    await asyncio.to_thread(episode)


async def test_an_openpi_droid_client_with_one_square_float_camera(server: PolicyServer) -> None:
    def episode() -> None:
        client = WebsocketClientPolicy("127.0.0.1", server.port)
        image = np.random.default_rng(0).random((3, 224, 224), np.float32)
        reply = client.infer(
            {
                "observation/exterior_image_1_left": image,
                "observation/wrist_image_left": image,
                "observation/joint_position": np.zeros(7),
                "observation/gripper_position": np.zeros(1),
                "prompt": "pick up the cup",
            }
        )
        assert reply["actions"].shape == (24, 8)
        client._ws.close()

    await asyncio.to_thread(episode)


async def test_our_client_goes_on_with_its_episode_over_a_broken_connection(server: PolicyServer) -> None:
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
