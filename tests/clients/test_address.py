"""What may be given as host and port."""

import pytest

from clients import ConnectFailed
from clients.address import proxy_on_the_way, server_address


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("robot-server", 8000, "ws://robot-server:8000"),
        ("0.0.0.0", None, "ws://0.0.0.0:80"),
        ("10.0.0.7:8000", None, "ws://10.0.0.7:8000"),
        ("10.0.0.7:8000", 8000, "ws://10.0.0.7:8000"),
        ("ws://host/", 8000, "ws://host:8000"),
        ("ws://host:8000/", None, "ws://host:8000"),
        ("ws://host/robots/3", 8000, "ws://host:8000/robots/3"),
        ("host/robots/3?key=a", 8000, "ws://host:8000/robots/3?key=a"),
        ("wss://host", None, "wss://host:443"),
        ("http://host", 8000, "ws://host:8000"),
        ("https://host/", None, "wss://host:443"),
        ("HTTPS://Host", None, "wss://host:443"),
        (" host ", "8000", "ws://host:8000"),
        ("::1", 8000, "ws://[::1]:8000"),
        ("[::1]", 8000, "ws://[::1]:8000"),
        ("[::1]:8000", None, "ws://[::1]:8000"),
        ("ws://[2001:db8::7]:8000/a", None, "ws://[2001:db8::7]:8000/a"),
        ("wsgi-robot", 8000, "ws://wsgi-robot:8000"),
    ],
)
def test_what_is_given_becomes_the_url_that_is_meant(host: str, port: int | None, url: str) -> None:
    assert server_address(host, port).url == server_address(host, port).shown == url


@pytest.mark.parametrize(
    ("host", "port", "problem"),
    [
        ("ftp://host", None, "expected ws:// or wss://, found ftp://"),
        ("host:8000", 9000, "names port 8000, and port=9000 was given"),
        ("host", 0, "a port from 1 to 65535, found 0"),
        ("host", 70000, "found 70000|out of range"),
        ("host", "eight", "eight"),
        ("host:70000", None, "out of range"),
        ("", 8000, "expected a host name"),
        ("ws://", None, "expected a host name"),
        ("ws://:8000", None, "expected a host name"),
        ("my robot", 8000, "expected a host name"),
        ("fe80::zz:8000", None, "brackets around an IPv6 address"),
        ("host#part", 8000, "fragment"),
    ],
)
def test_what_makes_no_url_says_what_is_wrong(host: str, port: int | None, problem: str) -> None:
    with pytest.raises(ConnectFailed, match=problem):
        server_address(host, port)


def test_a_password_in_the_url_is_used_and_not_shown() -> None:
    address = server_address("wss://robot:secret@host/a", 8443)
    assert address.url == "wss://robot:secret@host:8443/a"
    assert address.shown == "wss://host:8443/a"
    with pytest.raises(ConnectFailed) as refused:
        server_address("wss://robot:secret@host:1:2", None)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "0.0.0.0", "::1", "wss://localhost"])
def test_no_proxy_lies_on_the_way_to_this_machine(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert proxy_on_the_way(server_address(host, 8000)) is None
    assert proxy_on_the_way(server_address("10.0.0.7", 8000)) == "http://proxy:3128"
