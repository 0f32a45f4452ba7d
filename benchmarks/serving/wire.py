"""The cost of a 4-frame observation on the wire, beside openpi_client's codec and a server of the usual kind."""

import functools
import time
from collections.abc import Callable

import numpy as np
from openpi_client import msgpack_numpy
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from benchmarks.serving.processes import StubPolicy, observation, running, serve_ours, serve_plainly
from engine.robot.embodiment_file import read_embodiment
from protocol.codec import Limits
from protocol.messages import read_request

BLOCKS = 10
LIMITS = Limits()
DROID = read_embodiment("oxe_droid").observation_spec


def wire_table(rounds: int) -> list[str]:
    """Markdown rows: what, theirs, ours, ratio with the range of its blocks. Theirs and ours alternate call by call."""
    message = observation()
    frame = msgpack_numpy.packb(message)
    stub = functools.partial(StubPolicy, 0.0)
    with running(serve_plainly, stub) as (plain, _), running(serve_ours, stub) as (port, _):
        theirs, ours = (WebsocketClientPolicy("127.0.0.1", each) for each in (plain, port))

        def ours_parsed() -> object:
            return read_request(frame, DROID, LIMITS)

        rows = [
            _row("decode, ours with validation", rounds, lambda: msgpack_numpy.unpackb(frame), ours_parsed),
            _row("the same, theirs made writable", rounds, lambda: _writable(frame), ours_parsed),
            _row("round trip on loopback", rounds, lambda: theirs.infer(message), lambda: ours.infer(message)),
        ]
        for client in (theirs, ours):
            client._ws.close()
    head = [
        f"| {len(frame) / 1e6:.2f} MB observation | openpi style, ms | this server, ms | ratio (range) |",
        "| --- | --- | --- | --- |",
    ]
    return head + rows


def _writable(frame: bytes) -> object:
    message = msgpack_numpy.unpackb(frame)
    return {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in message.items()}


def _row(name: str, rounds: int, theirs: Callable[[], object], ours: Callable[[], object]) -> str:
    for warm_up in (theirs, ours) * 5:
        warm_up()
    seconds = np.array([[_timed(theirs), _timed(ours)] for _ in range(rounds)])
    blocks = np.median(seconds.reshape(BLOCKS, -1, 2), axis=1)
    ratios = blocks[:, 1] / blocks[:, 0]
    medians = 1e3 * np.median(seconds, axis=0)
    span = f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"
    return f"| {name} | {medians[0]:.3f} | {medians[1]:.3f} | {span} |"


def _timed(call: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - started_at
    del result  # freeing is not part of it, for either
    return seconds
