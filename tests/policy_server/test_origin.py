"""Web pages cannot drive robots unless they are allowed to; robots, whatever they send, can."""

import pytest
from websockets.exceptions import InvalidStatus

from policy_server.origin import admits
from policy_server.settings import SettingsError, parse_settings
from protocol.robot import HANDSHAKE
from tests.serving import Robot, serving


@pytest.mark.parametrize(
    ("origins", "host", "admitted"),
    [
        ([], "127.0.0.1:8000", True),  # openpi-client, ws of Node, most others
        (["http://127.0.0.1:8000"], "127.0.0.1:8000", True),  # websocket-client: what it was given
        (["http://localhost:8000"], "LOCALHOST:8000", True),
        (["http://[::1]:8000"], "[::1]:8000", True),
        (["https://policy.lab"], "policy.lab", True),
        (["https://policy.lab"], "policy.lab:443", True),
        (["ws://policy.lab:8000"], "policy.lab:8000", True),
        (["http://evil.example"], "127.0.0.1:8000", False),
        (["http://localhost:3000"], "localhost:8000", False),
        (["http://127.0.0.1:8000.evil.example"], "127.0.0.1:8000", False),
        (["http://127.0.0.1:8000@evil.example"], "127.0.0.1:8000", False),
        (["http://127.0.0.1:99999"], "127.0.0.1:99999", False),
        (["null"], "127.0.0.1:8000", False),
        ([""], "127.0.0.1:8000", False),
        (["file://"], "", False),
        (["http://127.0.0.1:8000", "http://evil.example"], "127.0.0.1:8000", False),
    ],
)
def test_pages_of_the_host_asked_are_admitted_and_others_are_not(origins: list[str], host: str, admitted: bool) -> None:
    assert admits(origins, [host], allowed=(), is_loopback=False) is admitted
    assert admits(origins, [host], allowed=("*",), is_loopback=False)


@pytest.mark.parametrize(
    ("name", "admitted"), [("localhost", True), ("127.0.0.1", True), ("[::1]", True), ("evil.example", False)]
)
def test_a_page_whose_name_was_made_to_mean_this_machine_is_not_admitted(name: str, admitted: bool) -> None:
    assert admits([f"http://{name}:8000"], [f"{name}:8000"], allowed=(), is_loopback=True) is admitted


async def test_a_page_of_another_host_is_told_why_and_which_setting_lets_it_in() -> None:
    async with serving() as (server, _):
        with pytest.raises(InvalidStatus) as refused:
            await Robot.connect(server, origin="http://evil.example")
        assert refused.value.response.status_code == 403
        assert b"'http://evil.example' may not connect here. See --allow-origin." in refused.value.response.body
        for own in (None, f"http://127.0.0.1:{server.port}"):
            async with await Robot.connect(server, origin=own) as robot:
                assert robot.handshake == HANDSHAKE


async def test_pages_that_are_allowed_may_connect() -> None:
    async with serving(allow_origin="https://panel.lab, http://Other.lab:3000,null") as (server, _):
        for origin in ("https://panel.lab", "http://other.lab:3000", "null"):
            async with await Robot.connect(server, origin=origin):
                pass
        with pytest.raises(InvalidStatus):
            await Robot.connect(server, origin="http://panel.lab")


@pytest.mark.parametrize("text", ["policy.lab", "https://policy.lab/", "https://", "", "https://a,,https://b"])
def test_what_is_no_origin_is_a_bad_setting(text: str) -> None:
    with pytest.raises(SettingsError, match=r"allow-origin: expected (origins such as|a value)"):
        parse_settings(["--allow-origin", text])
