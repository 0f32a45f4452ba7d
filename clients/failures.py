"""What an error of the connection means: whether it may pass, and how to say it."""

from __future__ import annotations

import socket
import ssl

from websockets.exceptions import (
    ConnectionClosed,
    InvalidMessage,
    InvalidProxy,
    InvalidProxyStatus,
    InvalidStatus,
)

from clients.address import proxy_shown

_NOT_UP = (502, 503, 504)  # HTTP: what stands before the server does not reach it, or it loads
_COMES_BACK = (1001, 1006, 1012, 1013)  # close codes: going away, broken, restarting, try again later
_NOT_WITH_THIS_MESSAGE = (1007, 1008, 1009)  # close codes: invalid data, against a policy, too big
_AGAINST_THE_PROTOCOL = (1002, 1003, 1007)
_TOO_BIG = 1009


def may_pass(error: Exception) -> bool:
    """Whether connecting later may succeed: the server is not up yet, or still loading."""
    if isinstance(error, (socket.gaierror, ssl.SSLError)):
        return isinstance(error, ssl.SSLEOFError)
    if isinstance(error, OSError):
        return True
    if isinstance(error, (InvalidStatus, InvalidProxyStatus)):
        return error.response.status_code in _NOT_UP
    if isinstance(error, InvalidMessage):
        return isinstance(error.__cause__, EOFError)
    if isinstance(error, ConnectionClosed):
        return _code_of_ours(error) is None and (error.rcvd is None or error.rcvd.code in _COMES_BACK)
    return False


def is_answer_to_the_message(error: Exception) -> bool:
    """Whether the message would break a connection again, or its reply."""
    if not isinstance(error, ConnectionClosed):
        return False
    return _code_of_ours(error) is not None or (error.rcvd is not None and error.rcvd.code in _NOT_WITH_THIS_MESSAGE)


def reason(error: Exception, max_size: int, proxy: str | None = None, host: str = "") -> str:
    """The error in words. max_size: of the server's messages. proxy: through which `host` was to be reached."""
    through = (
        f" (through the proxy {proxy_shown(proxy)} of the environment; NO_PROXY={host} avoids it)" if proxy else ""
    )
    return f"{_in_words(error, max_size)}{through}"


def _in_words(error: Exception, max_size: int) -> str:
    if isinstance(error, InvalidStatus):
        body = error.response.body.decode("utf-8", "replace").strip() if error.response.body else ""
        return f"HTTP {error.response.status_code} {error.response.reason_phrase} {body[:200]}".strip()
    if isinstance(error, InvalidProxyStatus):
        return f"the proxy answered HTTP {error.response.status_code} {error.response.reason_phrase}".strip()
    if isinstance(error, InvalidProxy):
        return f"no valid proxy: {error.msg}"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return f"{error}; a server without TLS is reached by ws://"
    if isinstance(error, ConnectionClosed) and error.sent is not None:
        code = _code_of_ours(error)
        if code == _TOO_BIG:
            return f"its message is larger than the {max_size} bytes allowed (max_size): {error.sent.reason}"
        if code is not None:
            return f"its message breaks the WebSocket protocol: {error.sent.reason}"
        if not error.rcvd_then_sent and error.sent.reason == "keepalive ping timeout":
            return "the link is dead, no ping was answered"
    return str(error) or type(error).__name__


def _code_of_ours(error: ConnectionClosed) -> int | None:
    """The code with which this side ended the connection for what the server had sent; None where it did not."""
    if error.sent is None or error.rcvd_then_sent:
        return None
    return error.sent.code if error.sent.code in (*_AGAINST_THE_PROTOCOL, _TOO_BIG) else None
