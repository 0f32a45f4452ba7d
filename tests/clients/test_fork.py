"""A forked process leaves its parent's connection alone and opens its own."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from clients import AsyncPolicyClient, PolicyClient
from protocol.codec import Dialect
from tests.clients.blocking_client import observation
from tests.clients.wire_server import WireServer, spec_answer

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no process forks here"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # threads of the server in this process
]


def in_a_child(work: Callable[[], None]) -> None:
    """Do some work in a forked process, which must succeed within half a minute."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


def test_a_child_opens_a_connection_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        for number in (2, 3):
            assert client.infer(observation(number), timeout=10)["actions"][0, 0] == number
        client.close()
        assert "lost" not in caplog.text  # nothing was

    with WireServer() as server, PolicyClient(server.url) as client:
        client.infer(observation(1))
        in_a_child(work)
        assert len(server.headers) == 2
        assert client.infer(observation(4))["actions"][0, 0] == 4
        assert len(server.headers) == 2  # the parent's lives on
        assert [message["observation/joint_position"][0] for message in server.messages] == [1, 2, 3, 4]


def test_a_child_that_only_closes_does_not_close_the_parents(caplog: pytest.LogCaptureFixture) -> None:
    with WireServer() as server, PolicyClient(server.url) as client:
        in_a_child(client.close)
        assert client.infer(observation(1))["actions"][0, 0] == 1
        assert len(server.headers) == 1
        assert caplog.text == ""


def test_a_child_does_not_wait_for_a_call_of_the_parents() -> None:
    async def slow_answer(message: dict[str, Any], dialect: Dialect) -> Any:
        if message["observation/joint_position"][0] == 1:
            await asyncio.sleep(1)
        return spec_answer(message, dialect)

    def work() -> None:
        assert client.infer(observation(2), timeout=10)["actions"][0, 0] == 2

    replies: list[Any] = []
    with WireServer(slow_answer) as server, PolicyClient(server.url) as client:
        caller = threading.Thread(target=lambda: replies.append(client.infer(observation(1))))
        caller.start()
        while not server.messages:
            time.sleep(0.01)
        in_a_child(work)
        caller.join()
    assert replies[0]["actions"][0, 0] == 1


async def test_a_child_of_an_asyncio_program_opens_a_connection_of_its_own() -> None:
    async def drive() -> None:
        for number in (2, 3):
            assert (await client.infer(observation(number), timeout=10))["actions"][0, 0] == number
        await client.close()

    with WireServer() as server:
        async with AsyncPolicyClient(server.url) as client:
            await client.infer(observation(1))
            in_a_child(lambda: asyncio.run(drive()))
            assert (await client.infer(observation(4)))["actions"][0, 0] == 4
            assert len(server.headers) == 2


def test_an_asyncio_client_goes_on_in_another_event_loop() -> None:
    async def ask(number: int) -> None:
        assert (await client.infer(observation(number)))["actions"][0, 0] == number

    with WireServer() as server:
        client = AsyncPolicyClient(server.url)
        for number in (1, 2):
            asyncio.run(ask(number))
        asyncio.run(client.close())
