"""The policy clients, blocking and asyncio, against a server that speaks the wire."""

import asyncio
import inspect
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from clients import AsyncPolicyClient, ConnectFailed, PolicyClient, PolicyError, ReplyLost
from protocol.codec import CodecError, Dialect
from protocol.robot import HANDSHAKE
from tests.clients.blocking_client import Blocking, actions, observation
from tests.clients.wire_server import DISCONNECT, WireServer, spec_answer

Connect = Callable[..., Any]


@pytest.fixture(params=[PolicyClient, Blocking], ids=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients of one kind, which are closed at the end."""
    made = []

    def make(*arguments: Any, **options: Any) -> Any:
        made.append(request.param(*arguments, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_infer_gives_writable_actions_and_the_timing(connect: Connect) -> None:
    with WireServer() as server:
        client = connect("127.0.0.1", server.port)
        assert client.get_server_metadata() == HANDSHAKE
        for number in (1.5, 2.5):
            reply = client.infer(observation(number))
            assert reply["server_timing"] == {"infer_ms": 1.0}
            assert np.array_equal(reply["actions"], actions(number))
            assert reply["actions"].dtype == np.float32
            reply["actions"] += 1
        assert "endpoint" not in server.messages[0]


def test_signature_and_methods_are_those_of_the_openpi_client() -> None:
    theirs = inspect.signature(WebsocketClientPolicy.__init__).parameters
    for ours in (PolicyClient, AsyncPolicyClient):
        parameters = inspect.signature(ours.__init__).parameters
        assert [(name, parameters[name].default) for name in theirs] == [(p.name, p.default) for p in theirs.values()]
        for name in ("infer", "reset", "get_server_metadata"):
            positional = [
                parameter.name
                for parameter in inspect.signature(getattr(ours, name)).parameters.values()
                if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
            ]
            assert positional == list(inspect.signature(getattr(WebsocketClientPolicy, name)).parameters)


def test_host_may_be_a_whole_url(connect: Connect) -> None:
    with WireServer() as server:
        assert connect(server.url).infer(observation(1))["actions"][0, 0] == 1
        assert connect("ws://127.0.0.1", server.port).infer(observation(2))["actions"][0, 0] == 2


def test_the_api_key_is_sent_as_openpi_sends_it(connect: Connect) -> None:
    with WireServer(api_key="secret") as server:
        connect("127.0.0.1", server.port, "secret").infer(observation())
        assert server.headers[-1]["Authorization"] == "Api-Key secret"


def test_a_wrong_key_is_no_reason_to_wait(connect: Connect) -> None:
    with WireServer(api_key="secret") as server, pytest.raises(ConnectFailed, match=r"HTTP 401 .*an API key is needed"):
        connect("127.0.0.1", server.port, "guess")


def test_reset_tells_the_server_which_session_ends(connect: Connect) -> None:
    with WireServer() as server:
        client = connect(server.url)
        client.reset()
        client.infer(observation(session_id="episode"))
        client.reset()
        client.infer(observation())
        client.reset()
        assert [message for message in server.messages if "endpoint" in message] == [
            {"endpoint": "reset"},
            {"endpoint": "reset", "session_id": "episode"},
            {"endpoint": "reset"},
        ]


def test_a_refused_reset_is_an_error(connect: Connect) -> None:
    with (
        WireServer(lambda message, dialect: "no reset here") as server,
        pytest.raises(PolicyError, match="no reset here"),
    ):
        connect(server.url).reset()


def test_an_error_text_is_raised_and_the_connection_stays(connect: Connect) -> None:
    with WireServer() as server:
        client = connect(server.url)
        with pytest.raises(PolicyError, match=r"observation/wrist_image_left: expected an RGB image"):
            client.infer(observation(**{"observation/wrist_image_left": "junk"}))
        assert issubclass(PolicyError, RuntimeError)  # what code for the openpi client catches
        assert client.infer(observation(3))["actions"][0, 0] == 3
        assert len(server.headers) == 1


@pytest.mark.parametrize("reply", [b"\xc1", b"\x01"])
def test_a_reply_that_makes_no_sense_is_an_error(connect: Connect, reply: bytes) -> None:
    with WireServer(lambda message, dialect: reply) as server, pytest.raises(PolicyError, match="server's message"):
        connect(server.url).infer(observation())


def test_what_cannot_be_sent_is_refused_here(connect: Connect) -> None:
    with WireServer() as server:
        client = connect(server.url)
        with pytest.raises(CodecError, match="cannot be sent"):
            client.infer(observation(extra=object()))
        assert client.infer(observation(3))["actions"][0, 0] == 3


def test_the_client_waits_for_a_server_that_is_not_up(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "clients")
    server = WireServer(port=free_port())
    start = threading.Timer(0.4, server.__enter__)
    start.start()
    try:
        assert connect("127.0.0.1", server.port).infer(observation(1))["actions"][0, 0] == 1
    finally:
        start.join()
        server.__exit__()
    assert f"waiting for the policy server at ws://127.0.0.1:{server.port}: " in caplog.text


def test_the_client_waits_while_the_server_loads(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "clients")
    with WireServer(loading=2) as server:
        connect(server.url).infer(observation())
        assert len(server.headers) == 3
    assert "HTTP 503 Service Unavailable loading weights" in caplog.text


def test_the_client_does_not_wait_longer_than_told(connect: Connect) -> None:
    start = time.monotonic()
    with pytest.raises(ConnectFailed, match=r"no policy server at .* within 0\.5 s"):
        connect("127.0.0.1", free_port(), connect_timeout=0.5)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("host", ["ws://no-such-host.invalid", "ws://:bad", "wss://127.0.0.1:1:2"])
def test_an_address_that_cannot_be_right_is_no_reason_to_wait(connect: Connect, host: str) -> None:
    with pytest.raises(ConnectFailed, match="cannot connect to ws"):
        connect(host)


@pytest.mark.parametrize("first", [b"\xc1", b"\x90", "go away"])
def test_what_does_not_begin_with_a_handshake_is_no_policy_server(connect: Connect, first: bytes | str) -> None:
    with WireServer(first_frame=first) as server, pytest.raises(ConnectFailed, match="did not begin with a handshake"):
        connect(server.url)


def test_a_connection_lost_between_calls_is_made_again(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    with WireServer() as server:
        client = connect(server.url)
        client.infer(observation(1))
        server.close_connections()
        time.sleep(0.1)
        assert client.infer(observation(2))["actions"][0, 0] == 2
        assert len(server.messages) == 2
        assert "was lost; connecting again" in caplog.text


class FirstDropped:
    """Cuts the connection at observation 1; the second time it is answered."""

    def __init__(self) -> None:
        self.done = False

    def __call__(self, message: dict[str, Any], dialect: Dialect) -> Any:
        if message.get("observation/joint_position", [0])[0] == 1 and not self.done:
            self.done = True
            return DISCONNECT
        return spec_answer(message, dialect)


@pytest.fixture
def dropping_server() -> Iterator[WireServer]:
    with WireServer(FirstDropped()) as server:
        yield server


def test_a_lost_reply_is_reported_and_the_next_call_connects_again(
    connect: Connect, dropping_server: WireServer
) -> None:
    client = connect(dropping_server.url)
    with pytest.raises(ReplyLost, match="may or may not have acted"):
        client.infer(observation(1))
    assert issubclass(ReplyLost, ConnectionError)
    assert client.infer(observation(2))["actions"][0, 0] == 2
    assert [message["observation/joint_position"][0] for message in dropping_server.messages] == [1, 2]


def test_an_observation_is_sent_again_where_the_caller_wants_that(
    connect: Connect, dropping_server: WireServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(dropping_server.url, resend=True)
    assert client.infer(observation(1))["actions"][0, 0] == 1
    assert [message["observation/joint_position"][0] for message in dropping_server.messages] == [1, 1]
    assert "connecting and sending again" in caplog.text


def test_an_observation_is_sent_again_once_only(connect: Connect) -> None:
    with WireServer(lambda message, dialect: DISCONNECT) as server:
        with pytest.raises(ReplyLost):
            connect(server.url, resend=True).infer(observation())
        assert len(server.messages) == 2


def test_a_message_too_big_for_the_server_is_not_sent_again(connect: Connect) -> None:
    with WireServer(max_size=10_000) as server:
        client = connect(server.url, resend=True)
        with pytest.raises(ReplyLost, match="1009"):
            client.infer(observation(extra=bytes(20_000)))
        assert len(server.headers) == 1


def test_a_reset_whose_reply_is_lost_is_sent_again(connect: Connect) -> None:
    replies = iter([DISCONNECT, "reset successful"])
    with WireServer(lambda message, dialect: next(replies)) as server:
        connect(server.url).reset()
        assert server.messages == [{"endpoint": "reset"}] * 2


async def slow_answer(message: dict[str, Any], dialect: Dialect) -> Any:
    if message["observation/joint_position"][0] == 1:
        await asyncio.sleep(0.5)
    return spec_answer(message, dialect)


async def test_the_reply_to_a_cancelled_call_never_answers_the_next_one() -> None:
    with WireServer(slow_answer) as server:
        async with AsyncPolicyClient(server.url) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.infer(observation(1))
            assert (await client.infer(observation(2)))["actions"][0, 0] == 2
            await asyncio.sleep(0.6)
            assert (await client.infer(observation(3)))["actions"][0, 0] == 3


def test_the_reply_to_an_interrupted_call_never_answers_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with WireServer() as server, PolicyClient(server.url) as client:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(client._connection, "recv_streaming", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.infer(observation(1))
        assert client.infer(observation(2))["actions"][0, 0] == 2


async def test_calls_made_at_once_take_turns() -> None:
    with WireServer(slow_answer) as server:
        async with AsyncPolicyClient(server.url) as client:
            replies = await asyncio.gather(*(client.infer(observation(number)) for number in range(4)))
    assert [reply["actions"][0, 0] for reply in replies] == [0, 1, 2, 3]


def test_threads_take_turns() -> None:
    with WireServer() as server, PolicyClient(server.url) as client:
        wrong = []

        def ask(number: int) -> None:
            for _ in range(20):
                if client.infer(observation(number))["actions"][0, 0] != number:
                    wrong.append(number)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(server.messages) == 80


def test_leaving_the_context_closes_the_connection() -> None:
    with WireServer() as server:
        with PolicyClient(server.url) as client:
            client.infer(observation())
        deadline = time.monotonic() + 5
        while server._connections and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not server._connections
