"""A server on a thread of its own that says what a test wants, from the first byte on."""

import asyncio
import base64
import hashlib
import threading
from collections.abc import Awaitable, Callable

from websockets.frames import Frame, Opcode

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class HostileServer:
    """Talks to each connection as `talk` does, for use in a `with` block. connections: how many there were."""

    def __init__(self, talk: Talk) -> None:
        self.connections = 0
        self._talk = talk
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "HostileServer":
        self._thread.start()
        start = asyncio.start_server(self._converse, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._talk(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client had enough, or the test
        finally:
            writer.transport.abort()

    async def _end(self) -> None:
        self._server.close()
        talks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)


async def upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept a WebSocket."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    key = next(line.split(": ")[1] for line in head.split("\r\n") if line.lower().startswith("sec-websocket-key"))
    accept = base64.b64encode(hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()
    lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"]
    writer.write("\r\n".join([*lines, f"Sec-WebSocket-Accept: {accept}", "", ""]).encode())
    await writer.drain()


def frame(data: bytes, opcode: Opcode = Opcode.BINARY, fin: bool = True) -> bytes:
    """A WebSocket frame as servers send it."""
    return Frame(opcode, data, fin).serialize(mask=False, extensions=[])


async def silence() -> None:
    await asyncio.Event().wait()
