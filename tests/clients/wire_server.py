"""A small policy server that speaks the wire and misbehaves on demand; it runs on a thread of its own."""

import asyncio
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Self

import numpy as np
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from protocol.codec import Dialect, decode, encode
from protocol.messages import RESET_REPLY, RequestError, ResetRequest, infer_reply, parse_request
from protocol.robot import HANDSHAKE
from tests.droid import DROID

DISCONNECT = object()  # what `answer` returns to have the connection cut instead of a reply


def mark(message: dict[str, Any]) -> np.ndarray:
    """Actions (24, 8) by which a reply can be told to belong to its request: filled with the first joint's angle."""
    return np.full((24, 8), message["observation/joint_position"][0], np.float32)


def spec_answer(message: dict[str, Any], dialect: Dialect) -> Any:
    try:
        request = parse_request(message, dialect, DROID)
    except RequestError as error:
        return str(error)
    if isinstance(request, ResetRequest):
        return RESET_REPLY
    return infer_reply(request, mark(message), {"server_timing": {"infer_ms": 1.0}})


class WireServer:
    """A server on 127.0.0.1, for use in a `with` block.

    answer: takes a message and its dialect, returns the reply, DISCONNECT, or an awaitable of either. api_key: wanted
    from clients. loading: how many connections are turned away with 503 first. first_frame: sent in place of the
    handshake. Received messages are in `messages`, the headers of each attempt to connect in `headers`.
    """

    def __init__(
        self,
        answer: Callable[[dict[str, Any], Dialect], Any] = spec_answer,
        *,
        port: int = 0,
        api_key: str | None = None,
        loading: int = 0,
        first_frame: bytes | str | None = None,
        max_size: int = 2**26,
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.headers: list[Headers] = []
        self.port = port
        self.loading = loading
        self._answer = answer
        self._api_key = api_key
        self._first_frame = encode(HANDSHAKE, Dialect.OPENPI) if first_frame is None else first_frame
        self._max_size = max_size
        self._connections: set[ServerConnection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._server: Server = self._call(self._start())
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def close_connections(self) -> None:
        """Close every connection from this side, in good order, and return when that is done."""

        async def close() -> None:
            for connection in list(self._connections):
                await connection.close(1001)

        self._call(close())

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _start(self) -> Server:
        return await serve(
            self._converse,
            "127.0.0.1",
            self.port,
            process_request=self._admit,
            compression=None,
            max_size=self._max_size,
        )

    async def _stop(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        self.headers.append(request.headers)
        if self.loading > 0:
            self.loading -= 1
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "loading weights\n")
        if self._api_key and request.headers.get("Authorization") != f"Api-Key {self._api_key}":
            return connection.respond(HTTPStatus.UNAUTHORIZED, "an API key is needed\n")
        return None

    async def _converse(self, connection: ServerConnection) -> None:
        self._connections.add(connection)
        try:
            await connection.send(self._first_frame)
            async for frame in connection:
                assert isinstance(frame, bytes)
                message, dialect = decode(frame)
                assert isinstance(message, dict)
                self.messages.append(message)
                reply = self._answer(message, dialect)
                if asyncio.iscoroutine(reply):
                    reply = await reply
                if reply is DISCONNECT:
                    connection.transport.abort()
                    return
                await connection.send(reply)
        finally:
            self._connections.discard(connection)
