"""One robot and the server over a real socket: replies, every kind of bad input, timing, warnings."""

import logging

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosedError

from protocol.codec import Dialect, decode, encode
from protocol.robot import Observation
from tests.serving import Robot, get, observation, serving


async def test_the_handshake_comes_first_and_has_six_keys() -> None:
    async with serving() as (server, _), await Robot.connect(server) as robot:
        assert robot.handshake == {
            "image_resolution": [180, 320],
            "needs_wrist_camera": True,
            "n_external_cameras": 2,
            "needs_stereo_camera": False,
            "needs_session_id": True,
            "action_space": "joint_position",
        }


async def test_an_openpi_call_is_answered_with_actions_and_timing() -> None:
    async with serving() as (server, _), await Robot.connect(server) as robot:
        first = await robot.ask(observation())
        second = await robot.ask(observation(frames=4))
    for reply in (first, second):
        assert reply["actions"].shape == (24, 8)
        assert reply["actions"].dtype == np.float32
        assert np.isfinite(reply["actions"]).all()
        assert list(reply) == ["actions", "server_timing", "episode", "warnings"]
        assert all(type(value) is float for value in reply["server_timing"].values()), "clients average over them"
        assert reply["warnings"] == []
    timing = first["server_timing"]
    assert set(timing) == {"infer_ms", "wait_ms", "encode_ms", "prefill_ms", "denoise_ms"}
    assert set(second["server_timing"]) == {*timing, "prev_total_ms"}
    assert timing["infer_ms"] > 1
    assert 0 <= timing["wait_ms"] < timing["infer_ms"]
    assert second["server_timing"]["prev_total_ms"] >= timing["infer_ms"] + timing["wait_ms"]


async def test_a_call_with_an_endpoint_is_answered_with_a_map_too_and_a_reset_with_text() -> None:
    async with serving() as (server, policy), await Robot.connect(server) as robot:
        reply = await robot.ask(observation(endpoint="infer", session_id="episode"))
        assert type(reply) is dict
        assert await robot.ask({"endpoint": "reset", "reset_info": {}}) == "reset successful"
        again = await robot.ask(observation(endpoint="infer", session_id="episode"))
    np.testing.assert_array_equal(again["actions"], reply["actions"])
    assert policy.events == ["infer id episode", "end id episode", "infer id episode"]


@pytest.mark.parametrize(
    ("path", "reply", "bare"),
    [
        ("/", "map", False),
        ("/robots/7/", "map", False),
        ("/v1/realtime/robot/openpi", "map", True),
        ("/robots/7/v1/realtime/robot/openpi/?token=1", "map", True),
        ("/", "array", True),
    ],
)
async def test_the_bare_array_is_for_those_who_ask_for_it(path: str, reply: str, bare: bool) -> None:
    async with serving(reply=reply) as (server, _), await Robot.connect(server.url + path) as robot:
        for endpoint in (None, "infer"):
            answer = await robot.ask(observation(endpoint=endpoint))
            assert type(answer) is (np.ndarray if bare else dict)
            assert (answer if bare else answer["actions"]).shape == (24, 8)
        assert "expected" in await robot.ask(observation(prompt=None))
        assert await robot.ask({"endpoint": "reset"}) == "reset successful"


async def test_a_reset_with_nothing_to_reset_is_answered_without_the_engine() -> None:
    async with serving() as (server, policy), await Robot.connect(server) as robot:
        assert await robot.ask({"endpoint": "reset"}) == "reset successful"
    assert policy.events == []


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_the_reply_is_in_the_dialect_of_the_request(dialect: Dialect) -> None:
    async with serving() as (server, _), await Robot.connect(server) as robot:
        await robot.websocket.send(encode(observation(), dialect))
        value, answered_in = decode(await robot.websocket.recv())
    assert answered_in is dialect
    assert isinstance(value, dict)
    assert value["actions"].shape == (24, 8)


async def test_a_policy_gets_what_the_robot_sent_in_writable_arrays() -> None:
    seen: list[Observation] = []
    sent = observation(frames=4)
    async with serving(lambda session_id, each: seen.append(each)) as (server, _), await Robot.connect(server) as robot:
        await robot.ask(sent)
    (received,) = seen
    keys = {"exterior_left": "exterior_image_0_left", "exterior_right": "exterior_image_1_left"}
    for view in ("exterior_left", "exterior_right", "wrist"):
        frames = received.views[view]
        np.testing.assert_array_equal(frames, sent[f"observation/{keys.get(view, 'wrist_image_left')}"])
        assert frames.flags.writeable
    np.testing.assert_array_equal(received.state["joint_position"], sent["observation/joint_position"])
    assert received.prompt == sent["prompt"]


def with_object_array() -> bytes:
    pickled = {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": b"cos\nsystem\n(S'false'\ntR."}
    return msgpack.packb({"observation/joint_position": pickled})


BAD = {
    "not msgpack": (b"\xc1 not msgpack", ""),
    "empty": (b"", ""),
    "a number": (msgpack.packb(7), "map"),
    "cut short": (msgpack_numpy.packb(observation())[:1000], ""),
    "a text frame": ("hello", "binary frame"),
    "no wrist camera": (observation(observation__wrist_image_left=None), "wrist_image_left"),
    "no exterior camera": (
        observation(observation__exterior_image_0_left=None, observation__exterior_image_1_left=None),
        "exterior_image",
    ),
    "a flat image": (observation(observation__wrist_image_left=np.zeros((180, 320), np.uint8)), "wrist_image_left"),
    "an int64 image": (
        observation(observation__wrist_image_left=np.zeros((180, 320, 3), np.int64)),
        "wrist_image_left",
    ),
    "six joints": (observation(observation__joint_position=np.zeros(6)), "joint_position"),
    "NaN joints": (observation(observation__joint_position=np.full(7, np.nan)), "joint_position"),
    "no gripper": (observation(observation__gripper_position=None), "gripper_position"),
    "an object array": (with_object_array(), "joint_position"),
    "a prompt of numbers": (observation(prompt=[1, 2]), "prompt"),
    "no prompt": (observation(prompt=None), "prompt"),
    "an unknown endpoint": (observation(endpoint="dance"), "endpoint"),
    "a session id of bytes": (observation(session_id=b"\xff\xfe"), "session_id"),
}


async def test_bad_input_is_answered_and_leaves_the_session_and_other_robots_alone() -> None:
    """Two robots alternate; one sends every kind of rubbish between its calls. Both get what they would have got."""
    async with serving() as (server, policy):
        alone = [await calls(server, frames=4, seed=seed, count=3) for seed in (1, 2)]
        policy.events.clear()
        async with await Robot.connect(server) as good, await Robot.connect(server) as bad:
            beside: list[list[np.ndarray]] = [[], []]
            rubbish = list(BAD.items())
            for _ in range(3):
                for name, (message, named) in rubbish[: len(BAD) // 2 + 1]:
                    reply = await bad.ask(message)
                    assert isinstance(reply, str), name
                    assert named in reply, name
                    assert "Traceback" not in reply, name
                beside[0].append((await good.ask(observation(frames=4, seed=1)))["actions"])
                beside[1].append((await bad.ask(observation(frames=4, seed=2, session_id="b")))["actions"])
                rubbish = rubbish[len(BAD) // 2 :] + rubbish[: len(BAD) // 2]
        _, _, metrics = await get(server, "/metrics")
    np.testing.assert_array_equal(beside, alone)
    assert len([event for event in policy.events if event.startswith("infer")]) == 6
    assert 'outcome="bad_request"' in metrics


async def calls(server: object, frames: int, seed: int, count: int) -> list[np.ndarray]:
    async with await Robot.connect(server) as robot:  # type: ignore[arg-type]
        return [(await robot.ask(observation(frames=frames, seed=seed)))["actions"] for _ in range(count)]


async def test_a_message_over_the_limit_closes_that_connection_alone() -> None:
    async with (
        serving(max_message_mib=3) as (server, _),
        await Robot.connect(server) as good,
        await Robot.connect(server) as bad,
    ):
        assert "actions" in await bad.ask(observation(frames=4))
        with pytest.raises(ConnectionClosedError) as closed:
            await bad.ask(b"\x00" * (3 * 2**20 + 1))
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        assert "actions" in await good.ask(observation())


async def test_a_large_but_allowed_message_is_served() -> None:
    images = np.random.default_rng(0).random((4, 360, 640, 3))  # 22 MB of float64, decoded beside the event loop
    async with serving() as (server, _), await Robot.connect(server) as robot:
        reply = await robot.ask(observation(4, observation__exterior_image_0_left=images))
    assert reply["actions"].shape == (24, 8)


async def test_an_odd_image_size_is_told_each_time_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    square = np.zeros((224, 224, 3), np.uint8)
    caplog.set_level(logging.WARNING, "policy_server")
    async with serving() as (server, _):
        async with await Robot.connect(server) as robot:
            await robot.ask(observation())
            assert caplog.messages == []
            for _ in range(2):
                reply = await robot.ask(
                    observation(
                        observation__exterior_image_0_left=square,
                        observation__exterior_image_1_left=None,
                        observation__wrist_image_left=square,
                    )
                )
                assert [warning.split()[1:3] for warning in reply["warnings"]] == [["is", "224x224"]] * 2
        assert caplog.messages == ["observation"] * 2  # one a camera
    assert "224x224" in caplog.records[0].fields["found"]  # type: ignore[attr-defined]


async def test_a_state_in_other_units_is_told_and_logged_once_a_connection(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "policy_server")
    odd = {"observation__joint_position": np.full(7, 45.0), "observation__gripper_position": np.array([85.0])}
    async with serving() as (server, _), await Robot.connect(server) as robot:
        for scale in (1, 2):
            reply = await robot.ask(observation(**{key: scale * value for key, value in odd.items()}))
            joints, gripper = reply["warnings"]
            assert joints.startswith(f"observation/joint_position[0] is {45 * scale}, far outside the -0.9 to 0.9")
            assert gripper.startswith(f"observation/gripper_position[0] is {85 * scale}, far outside the 0 to 1")
            assert reply["actions"].shape == (24, 8)
    assert caplog.messages == ["observation"] * 2


async def test_an_engine_error_is_answered_with_an_id_that_the_log_has_too(caplog: pytest.LogCaptureFixture) -> None:
    def fail(session_id: str, each: Observation) -> None:
        if each.prompt == "fail":
            raise RuntimeError("secret detail")

    async with serving(fail) as (server, _), await Robot.connect(server) as robot, await Robot.connect(server) as other:
        fresh = await other.ask(observation(seed=5))
        reply = await robot.ask(observation(prompt="fail"))
        assert reply.startswith("internal error, id ")
        assert "secret" not in reply
        (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
        assert record.fields["id"] == reply.split()[-1]  # type: ignore[attr-defined]
        assert record.exc_info is not None
        assert "secret detail" in str(record.exc_info[1])
        after = await robot.ask(observation(seed=5))
        np.testing.assert_array_equal(after["actions"], fresh["actions"])


async def test_debug_sends_the_traceback() -> None:
    def fail(session_id: str, each: Observation) -> None:
        raise RuntimeError("secret detail")

    async with serving(fail, debug=True) as (server, _), await Robot.connect(server) as robot:
        reply = await robot.ask(observation())
    assert "Traceback" in reply
    assert "secret detail" in reply


async def test_no_call_of_a_connection_overtakes_another() -> None:
    """A robot that sends three requests ahead gets three answers, in order, worked on one at a time."""
    prompts: list[str] = []

    def note(session_id: str, each: Observation) -> None:
        prompts.append(each.prompt)

    async with serving(note) as (server, _), await Robot.connect(server) as robot:
        for prompt in ("one", "two", "three"):
            await robot.send(observation(prompt=prompt))
        deepest = 0
        for _ in range(3):
            deepest = max(deepest, server.engine.stats().waiting)
            assert "actions" in await robot.reply()
    assert prompts == ["one", "two", "three"]
    assert deepest <= 1
