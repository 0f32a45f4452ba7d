"""Where a policy server is: from what people give as host and port to one URL, and whether a proxy lies on the way."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from websockets.exceptions import InvalidURI
from websockets.uri import parse_uri

from clients.errors import ConnectFailed

try:
    from websockets.proxy import get_proxy
except ImportError:  # websockets 15
    from websockets.uri import get_proxy  # type: ignore[attr-defined, no-redef]

_SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
_USUAL_PORTS = {"ws": 80, "wss": 443}


class Address(NamedTuple):
    """url: to connect to. shown: the same without a password. host: the name or address in it."""

    url: str
    shown: str
    host: str


def server_address(host: str, port: int | None) -> Address:
    """The address that is meant.

    host: a name, an address, either with a port or a path, or a whole URL (http and https stand for ws and wss).
    port: goes behind the host. Without one anywhere it is 80, or 443 with TLS, as in openpi's client.
    Raises ConnectFailed, which says what is wrong.
    """
    given = host.strip()
    scheme, rest = "ws", given
    found = re.match(r"([a-z][a-z0-9+.-]*)://", given, re.IGNORECASE)
    if found:
        scheme, rest = found[1].lower(), given[found.end() :]
    if scheme not in _SCHEMES:
        raise ConnectFailed(f"cannot connect to {given}: expected ws:// or wss://, found {scheme}://")
    scheme = _SCHEMES[scheme]
    try:
        parts = urlsplit(f"{scheme}://{_bracketed(rest)}")
        name, number = parts.hostname, _one_port(parts.port, port)
        if not name or re.search(r"\s", name):
            raise ValueError("expected a host name or address")
        location = f"{f'[{name}]' if ':' in name else name}:{number or _USUAL_PORTS[scheme]}"
        credentials, at, _ = parts.netloc.rpartition("@")
        path = "" if parts.path == "/" else parts.path
        url = urlunsplit((scheme, credentials + at + location, path, parts.query, parts.fragment))
        parse_uri(url)
    except (InvalidURI, ValueError) as error:
        problem = "a fragment (#) has no place in it" if isinstance(error, InvalidURI) and "#" in rest else error
        raise ConnectFailed(f"cannot connect to {scheme}://{rest.rpartition('@')[2]}: {problem}") from error
    return Address(url, urlunsplit((scheme, location, path, parts.query, "")), name)


def proxy_on_the_way(address: Address) -> str | None:
    """The URL of the proxy that the environment names for this address; never one for an address of this machine."""
    return None if _is_this_machine(address.host) else get_proxy(parse_uri(address.url))


def proxy_shown(proxy: str) -> str:
    """A proxy's URL without its password."""
    scheme, _, rest = proxy.rpartition("://")
    return f"{scheme or 'http'}://{rest.rpartition('@')[2]}"


def _bracketed(rest: str) -> str:
    """A URL behind its scheme, with brackets around an IPv6 address that stands there alone."""
    authority, slash, path = rest.partition("/")
    if authority.count(":") < 2 or "[" in authority:
        return rest
    try:
        ipaddress.IPv6Address(authority)
    except ValueError:
        raise ValueError("expected HOST or HOST:PORT, with brackets around an IPv6 address: [::1]:8000") from None
    return f"[{authority}]{slash}{path}"


def _one_port(inside: int | None, beside: int | None) -> int | None:
    if beside is None:
        number = inside
    else:
        number = int(beside)
        if inside is not None and inside != number:
            raise ValueError(f"the host names port {inside}, and port={number} was given beside it")
    if number is not None and not 0 < number < 2**16:
        raise ValueError(f"expected a port from 1 to 65535, found {number}")
    return number


def _is_this_machine(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified
