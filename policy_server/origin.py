"""Which web pages may open a WebSocket. Browsers let every page connect anywhere, and tell the server whose page it is.

Robots are no browsers. Most send no Origin, and some libraries send the address that they were given for the server.
"""

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

ANY = "*"
_DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}


class OriginError(ValueError):
    """A text is no origin."""


def read_origins(text: str) -> tuple[str, ...]:
    """The origins in a text that separates them by commas, "*" among them for all. Raises OriginError."""
    found = tuple(each.strip().lower() for each in text.split(","))
    for each in found:
        if each not in (ANY, "null") and (_address(each) is None or each.count("/") != 2):
            raise OriginError(f'expected origins such as "https://policy.lab:8443", or "*", found {each!r}')
    return found


def admits(origins: Sequence[str], hosts: Sequence[str], *, allowed: Sequence[str], is_loopback: bool) -> bool:
    """Whether a request with these Origin and Host headers may open a WebSocket.

    It may without an Origin, with one that is allowed, and with that of the host it was sent to. allowed: see
    read_origins. is_loopback: whether the server can be reached from its own machine alone; then hosts of other names
    are taken for what they are, a page whose owner has his name resolve to that machine.
    """
    if not origins or ANY in allowed:
        return True
    if len(origins) != 1 or len(hosts) != 1:
        return False
    origin = origins[0].lower()
    if origin in allowed:
        return True
    address = _address(origin)
    if address is None or address != _address(f"{origin.partition(':')[0]}://{hosts[0].lower()}"):
        return False
    return not is_loopback or _is_local(address[0])


def _address(origin: str) -> tuple[str, int] | None:
    """Host and port."""
    try:
        parts = urlsplit(origin)
        port = parts.port or _DEFAULT_PORTS[parts.scheme]
    except (ValueError, KeyError):
        return None
    return (parts.hostname, port) if parts.hostname else None


def _is_local(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
