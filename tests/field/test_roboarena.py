"""The conversations of RoboArena's and DreamZero's own clients, as their public code holds them."""

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from openpi_client.image_tools import resize_with_pad

from protocol.robot import Observation
from tests.field.field_client import field_client, pictures, state
from tests.serving import serving


@dataclass
class Config:
    """What RoboArena clients make of the handshake: exactly these fields."""

    image_resolution: tuple[int, int] | None
    needs_wrist_camera: bool
    n_external_cameras: int
    needs_stereo_camera: bool
    needs_session_id: bool
    action_space: str


async def test_the_script_that_tests_a_policy_server() -> None:
    """RoboArena's scripts/test_policy_server.py: builds what the handshake asks for and wants a dict, nothing else."""

    def script(url: str) -> None:
        with field_client(url) as client:
            config = Config(**client.handshake)
            height, width = config.image_resolution or (288, 512)
            numbers = range(config.n_external_cameras)
            views = [*(f"exterior_image_{number}" for number in numbers), "wrist_image"]
            message = {f"observation/{view}_left": np.zeros((height, width, 3), np.uint8) for view in views}
            message |= state() | {"session_id": "38DSA3hd3", "prompt": "test"}
            reply = client.infer(message)
            assert type(reply) is dict
            actions = reply["actions"]
            assert isinstance(actions, np.ndarray)
            assert actions.ndim == 2
            assert actions.shape[-1] == 8
            assert config.action_space == "joint_position"
            assert client.reset({}) == "reset successful"

    async with serving() as (server, _):
        await asyncio.to_thread(script, server.url)


async def test_the_evaluator() -> None:
    """It numbers its cameras 1 and 2, executes all 24 actions, and resets by name after its operator's forms."""
    rng = np.random.default_rng(0)
    sent: list[dict[str, Any]] = []

    def episode(url: str, steps: int) -> list[np.ndarray]:
        with field_client(url) as client:
            executed: list[np.ndarray] = []
            chunk: np.ndarray = np.zeros((0, 8))
            done = 0
            for _ in range(steps):
                if done >= len(chunk):
                    sent.append(pictures(rng, tuple(client.handshake["image_resolution"]), (1, 2)))
                    named = {"prompt": "pick up the cup", "session_id": "4f1c-A"}
                    reply = client.infer(sent[-1] | state(dtype=np.float64) | named)
                    chunk, done = np.asarray(reply["actions"]), 0
                action = np.array(chunk[done], dtype=np.float32)
                action[-1] = 1.0 if action[-1] > 0.5 else 0.0
                executed.append(action)
                done += 1
            client.reset({"session_id": "4f1c-A"})
            return executed

    seen: list[Observation] = []
    async with serving(lambda session_id, each: seen.append(each)) as (server, policy):
        executed = await asyncio.to_thread(episode, server.url, 50)
    assert [action.shape for action in executed] == [(8,)] * 50
    assert policy.events == [*["infer id 4f1c-A"] * 3, "end id 4f1c-A"]
    for message, observed in zip(sent, seen, strict=True):
        np.testing.assert_array_equal(observed.views["exterior_left"][-1], message["observation/exterior_image_1_left"])
        np.testing.assert_array_equal(
            observed.views["exterior_right"][-1], message["observation/exterior_image_2_left"]
        )


async def test_dreamzeros_test_client_wants_the_bare_array() -> None:
    """DreamZero's test_client_AR.py: frame 0, then four frames a call; needs a server with `--reply array`."""

    def run(url: str) -> list[Any]:
        rng = np.random.default_rng(0)
        named = {"prompt": "move the pan forward", "session_id": str(uuid.uuid4())}
        with field_client(url, ping_interval=60, ping_timeout=600) as client:
            config = Config(**client.handshake)
            assert (config.n_external_cameras, config.needs_wrist_camera) == (2, True)
            shapes = [(180, 320), (4, 180, 320), (4, 180, 320)]
            replies = [client.infer(pictures(rng, shape) | state() | named) for shape in shapes]
            assert client.reset({}) == "reset successful"
            return replies

    async with serving(reply="array") as (server, _):
        replies = await asyncio.to_thread(run, server.url)
    for actions in replies:
        assert isinstance(actions, np.ndarray)
        assert (actions.shape, actions.dtype) == ((24, 8), np.float32)


@pytest.mark.parametrize("form", ["map", "array"])
async def test_dreamzeros_sim_client(form: str) -> None:
    """run_sim_eval.py: the state of one environment with its batch axis, 8 of 24 actions, no reset but a new id."""

    def episode(url: str) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        executed = []
        with field_client(url, ping_interval=60, ping_timeout=600) as client:
            session_id = str(uuid.uuid4())
            for _ in range(2):
                images = {key: resize_with_pad(frame, 180, 320) for key, frame in pictures(rng, (720, 1280)).items()}
                named = {"prompt": "put the cube in the bowl", "session_id": session_id}
                result = client.infer(images | state((1,), np.float64) | named)
                actions = result["actions"] if isinstance(result, dict) else result
                assert isinstance(result, dict) == (form == "map")
                executed += [np.concatenate([action[:-1], [action[-1].item() > 0.5]]) for action in actions[:8]]
        return executed

    async with serving(reply=form) as (server, _):
        executed = await asyncio.to_thread(episode, server.url)
    assert [action.shape for action in executed] == [(8,)] * 16


async def test_an_error_is_raised_with_its_text_and_the_next_call_is_right() -> None:
    def run(url: str) -> None:
        message = pictures(np.random.default_rng(0)) | state() | {"prompt": "test", "session_id": "one"}
        with field_client(url) as client:
            with pytest.raises(RuntimeError, match="observation/joint_position"):
                client.infer(message | {"observation/joint_position": np.zeros(6)})
            assert client.infer(message)["actions"].shape == (24, 8)

    async with serving() as (server, _):
        await asyncio.to_thread(run, server.url)
