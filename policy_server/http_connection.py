"""Requests of plain HTTP as probes, proxies and people send them, made fit for a WebSocket library to read."""

import asyncio
import enum
import re
from typing import Any

from websockets.asyncio.server import ServerConnection

_LONGEST_HEAD = 2**16
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")  # people type requests with bare line feeds
_NO_HTTP = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_ABOUT_A_BODY = (b"content-length", b"transfer-encoding", b"expect")

# A body is waited for until so much has come or so long has passed, and then answered all the same.
_MOST_BODY_BYTES = 2**26
_BODY_SECONDS = 2.0


class _Stage(enum.Enum):
    HEAD = "the request's head is being received"
    BODY = "the body is, and the answer waits for its end"
    ANSWER = "the request has been handed over; whatever else is received goes nowhere"
    WEBSOCKET = "everything goes to the library"


class HttpConnection(ServerConnection):
    """A connection on which plain HTTP is answered whatever follows the request's head.

    The library reads a WebSocket's opening handshake and nothing else. It hangs up on a request that has a body, takes
    what follows a request for WebSocket frames, and forgets its answer when the client has closed its own direction by
    then. So the head is held until it is complete. A WebSocket's is then passed on as it came. Of any other, the
    library is shown the head without what it says of a body, once that body is here: a connection that is closed on
    bytes not yet read is reset, and the answer lost with it, which with TLS nothing after the answer can prevent.

    That takes nothing but asyncio's own callbacks, on the class that the library asks for. A server of HTTP in front
    would have to hand the socket on with TLS and all, for which the library has no door.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stage = _Stage.HEAD
        self._head = b""
        self._body_bytes_awaited = 0
        self._chunks_end = b""  # the last bytes of a chunked body so far
        self._patience: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        match self._stage:
            case _Stage.WEBSOCKET:
                super().data_received(data)
            case _Stage.HEAD:
                self._receive_head(data)
            case _Stage.BODY:
                self._receive_body(data)

    def eof_received(self) -> bool | None:  # type: ignore[override]  # which asyncio asks for, and the library narrows
        """The client sends no more; if it has asked over plain HTTP, it still waits for its answer."""
        if self._stage is _Stage.BODY:
            self._hand_over()
        answer_is_due = self._stage is _Stage.ANSWER and self.response is None
        if answer_is_due and self.transport.can_write_eof():  # TLS cannot be closed in one direction
            return True
        super().eof_received()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _receive_head(self, data: bytes) -> None:
        searched = max(0, len(self._head) - 3)
        self._head += data
        if not self._head[:1].isalpha():
            # Robots that try TLS here learn at once that there is none; a connection that just ends they try again.
            self._stage = _Stage.ANSWER
            self.transport.write(_NO_HTTP)
            self.transport.close()
            return
        end = _END_OF_HEAD.search(self._head, searched)
        if end is None and len(self._head) <= _LONGEST_HEAD:
            return
        request_line, *lines = self._head[: end.start() if end else 0].splitlines() or [b""]
        headers = {line.partition(b":")[0].lower(): line.partition(b":")[2].strip().lower() for line in lines}
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        if end is None or (headers.get(b"upgrade") == b"websocket" and not has_body):
            # Too long a head goes to the library as well, which knows what to say to it.
            received, self._head = self._head, b""
            self._stage = _Stage.WEBSOCKET
            super().data_received(received)
            return
        body = self._head[end.end() :]
        dropped = (*_ABOUT_A_BODY, b"upgrade") if has_body else _ABOUT_A_BODY
        kept = [line for line in lines if line.partition(b":")[0].lower() not in dropped]
        self._head = b"\r\n".join([request_line, *kept, b"", b""])
        self._body_bytes_awaited = _body_bytes(headers)
        self._chunks_end = b"\r\n" if b"transfer-encoding" in headers else b""
        self._stage = _Stage.BODY
        self._patience = self.loop.call_later(_BODY_SECONDS, self._hand_over)
        self._receive_body(body)

    def _receive_body(self, data: bytes) -> None:
        self._body_bytes_awaited -= len(data)
        if self._chunks_end:
            self._chunks_end = (self._chunks_end + data[-len(_LAST_CHUNK) :])[-len(_LAST_CHUNK) :]
        if self._body_bytes_awaited <= 0 or self._chunks_end == _LAST_CHUNK:
            self._hand_over()

    def _hand_over(self) -> None:
        self._stop_waiting()
        head, self._head = self._head, b""
        self._stage = _Stage.ANSWER
        super().data_received(head)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def _body_bytes(headers: dict[bytes, bytes]) -> int:
    """How many bytes to wait for; of a body in chunks, its last chunk ends it before."""
    if b"expect" in headers:  # the client waits for leave to send its body, and is not given it
        return 0
    if b"transfer-encoding" in headers:
        return _MOST_BODY_BYTES
    length = headers.get(b"content-length", b"0")
    return min(int(length), _MOST_BODY_BYTES) if length.isdigit() and len(length) < 20 else 0
