"""One policy client for several sessions, and what it says of episodes and warnings."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clients import AsyncPolicyClient, PolicyClient, PolicyError
from protocol.codec import Dialect, encode
from tests.clients.blocking_client import actions, both_clients, observation
from tests.clients.wire_server import WireServer, spec_answer

Connect = Callable[..., Any]


class Episodes:
    """Answers as a server that knows its sessions: the call's number in the episode, and warnings if there are any."""

    def __init__(self, *warnings: str) -> None:
        self.calls: dict[str | None, int] = {}
        self.warnings = list(warnings)

    def __call__(self, message: dict[str, Any], dialect: Dialect) -> Any:
        name = message.get("session_id")
        if "endpoint" in message:
            self.calls.pop(name, None)
            return spec_answer(message, dialect)
        call = self.calls[name] = self.calls.get(name, 0) + 1
        number = message["observation/joint_position"][0]
        episode = {"call": call, "window": "new" if call == 1 else "continued"}
        reply = {"actions": actions(number), "server_timing": {}, "episode": episode, "warnings": self.warnings}
        return encode(reply, dialect)


def resets(server: WireServer) -> list[object]:
    return [message.get("session_id") for message in server.messages if message.get("endpoint") == "reset"]


@both_clients
def test_environments_share_a_client(connect: Connect) -> None:
    with WireServer(Episodes()) as server, connect(server.url) as client:
        for call in (1, 2, 3):
            for number in range(4):
                reply = client.infer(observation(number, session_id=f"env-{number}"))
                assert reply["actions"][0, 0] == number
                assert reply["episode"]["call"] == call
        client.reset(session_id="env-1")
        client.reset(session_id=7)
        client.reset()
        assert resets(server) == ["env-1", "7", "env-3"]
        for number, call in ((0, 4), (1, 1), (2, 4), (3, 1)):
            assert client.infer(observation(session_id=f"env-{number}"))["episode"]["call"] == call
        assert len(server.headers) == 1


def test_a_reset_ends_the_session_of_the_thread_that_asks() -> None:
    with WireServer(Episodes()) as server, PolicyClient(server.url) as client:
        in_turn = threading.Barrier(3)

        def drive(name: str) -> None:
            client.infer(observation(session_id=name))
            in_turn.wait(10)
            client.reset()

        threads = [threading.Thread(target=drive, args=(name,)) for name in ("a", "b", "c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(str, resets(server))) == ["a", "b", "c"]
        client.infer(observation(session_id="d"))
        stranger = threading.Thread(target=client.reset)  # used none: the session that the client used last
        stranger.start()
        stranger.join()
        assert resets(server)[-1] == "d"


def test_a_reset_of_the_unnamed_session_does_not_end_another() -> None:
    with WireServer(Episodes()) as server, PolicyClient(server.url) as client:
        client.infer(observation())
        other = threading.Thread(target=client.infer, args=(observation(session_id="other"),))
        other.start()
        other.join()
        with pytest.raises(PolicyError, match="give it one"):
            client.reset()  # which the server would take for the session that the connection used last
        client.infer(observation())
        client.reset()
        assert resets(server) == [None]


async def test_a_reset_ends_the_session_of_the_task_that_asks() -> None:
    async def drive(name: str) -> None:
        await client.infer(observation(session_id=name))
        await asyncio.sleep(0.05)
        await client.reset()

    with WireServer(Episodes()) as server:
        async with AsyncPolicyClient(server.url) as client:
            await asyncio.gather(*map(drive, "abc"))
    assert sorted(map(str, resets(server))) == ["a", "b", "c"]


def lose_the_connection(server: WireServer) -> None:
    server.close_connections()
    time.sleep(0.1)


@both_clients
def test_an_episode_that_a_reconnect_lost_is_told(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    episodes = Episodes()
    with WireServer(episodes) as server, connect(server.url) as client:
        for name in ("lost", "reset", "kept"):
            client.infer(observation(session_id=name))
        lose_the_connection(server)
        del episodes.calls["lost"]
        client.reset(session_id="reset")
        for name in ("lost", "reset", "kept", "new", "lost"):
            client.infer(observation(session_id=name))
    lost = [record.getMessage() for record in caplog.records if "episode" in record.getMessage()]
    assert lost == ["the episode of session 'lost' was lost with the connection: the server began a new one"]


@both_clients
def test_an_episode_that_goes_on_after_a_reconnect_is_told(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "clients")
    with WireServer(Episodes()) as server, connect(server.url) as client:
        client.infer(observation())
        lose_the_connection(server)
        client.infer(observation())
    assert "after the reconnect the episode of the session without a name goes on with call 2" in caplog.text


@both_clients
def test_warnings_of_the_server_are_logged_once_each(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    with WireServer(Episodes("wrist images are 90x160", "joints look like\n degrees")) as server:
        with connect(server.url) as client:
            for _ in range(3):
                reply = client.infer(observation())
        assert reply["warnings"] == ["wrist images are 90x160", "joints look like\n degrees"]
    assert [record.getMessage() for record in caplog.records if record.name == "clients"] == [
        "the policy server warns: wrist images are 90x160",
        r"the policy server warns: joints look like\n degrees",
    ]


def test_warnings_without_end_are_not_all_logged(caplog: pytest.LogCaptureFixture) -> None:
    many = Episodes(*("a" * number + "b" * 1000 for number in range(500)))
    with WireServer(many) as server, PolicyClient(server.url) as client:
        client.infer(observation())
    warnings = [record.getMessage() for record in caplog.records if record.name == "clients"]
    assert len(warnings) == 100
    assert warnings[-1].endswith("further warnings are not logged")
    assert max(map(len, warnings)) < 600


@both_clients
@pytest.mark.parametrize("odd", [{"episode": 1, "warnings": "a"}, {"episode": {"call": "1"}, "warnings": [b"\x00", 1]}])
def test_odd_news_beside_the_actions_harm_nobody(connect: Connect, odd: dict[str, Any]) -> None:
    reply = {"actions": actions(1), **odd}
    with WireServer(lambda message, dialect: encode(reply, dialect)) as server, connect(server.url) as client:
        for _ in range(2):
            assert client.infer(observation())["actions"][0, 0] == 1
            lose_the_connection(server)


@both_clients
def test_a_bare_array_is_made_a_reply(connect: Connect) -> None:
    with WireServer(lambda message, dialect: encode(actions(3), dialect)) as server, connect(server.url) as client:
        reply = client.infer(observation())
        assert list(reply) == ["actions"]
        assert np.array_equal(reply["actions"], actions(3))
