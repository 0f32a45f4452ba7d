"""What the log looks like, and that nobody can write in it but the server."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from policy_server.logs import JsonFormatter, TextFormatter, log_event
from tests.serving import Robot, observation, serving, until

FORGERY = "a\n1999-01-01 00:00:00.000 ERROR session end \x1b[2J\u2028\u202e\r\x00\"'\\"


@pytest.fixture(params=["text", "json"])
def lines(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """What a server's loggers write at debug level."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if request.param == "json" else TextFormatter())
    logger = logging.getLogger("policy_server")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


async def test_an_id_or_a_prompt_cannot_forge_a_line(lines: io.StringIO) -> None:
    def fail(session_id: str, each: object) -> None:
        raise RuntimeError(FORGERY)

    async with serving(fail) as (server, _):
        async with await Robot.connect(server) as robot, await Robot.connect(server) as other:
            await robot.ask(observation(session_id=FORGERY, prompt=FORGERY))
            await other.ask(observation(session_id=FORGERY))
            await robot.ask({FORGERY: FORGERY, "endpoint": FORGERY})
            await robot.websocket.close(reason=FORGERY[:60])
        await until(lambda: lines.getvalue().count("connection close") == 2)
    text = lines.getvalue()
    assert text.count("internal error") >= 1
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)
        assert not line.startswith("1999"), line
        if line and not line.startswith(("20", "{")):
            assert line.startswith("    | "), line


async def test_an_ordinary_run_has_one_line_per_event(lines: io.StringIO) -> None:
    async with serving() as (server, _):
        async with await Robot.connect(server) as robot:
            await robot.ask(observation(session_id="episode 7"))
        await until(lambda: "connection close" in lines.getvalue())
    events = ["listening", "connection open", "session start", "call", "request", "connection close", "stopped"]
    written = lines.getvalue().splitlines()
    assert len(written) == len(events)
    for line, event in zip(written, events, strict=True):
        if line.startswith("{"):
            entry = json.loads(line)
            assert entry["event"] == event
            assert {"time", "level", "logger"} <= set(entry)
        else:
            assert f" {event} " in line + " "
    assert "episode 7" in written[2]


def formatted(formatter: logging.Formatter, event: str, **fields: object) -> str:
    logger = logging.Logger("test")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    log_event(logger, logging.INFO, event, **fields)
    return stream.getvalue()


def test_text_quotes_what_is_more_than_a_word_and_cuts_what_is_long() -> None:
    line = formatted(TextFormatter(), "event", plain="abc", spaced="a b", empty="", number=0.123456, nothing=None)
    assert line.endswith('INFO event plain=abc spaced="a b" empty="" number=0.1235 nothing=None\n')
    assert len(formatted(TextFormatter(), "event", long="x" * 10_000)) < 300
    assert formatted(TextFormatter(), "another\nlibrary's words").count("\n") == 1
    assert 'sly="x=1"' in formatted(TextFormatter(), "event", sly="x=1")


def test_json_keeps_values_and_cuts_what_is_long() -> None:
    entry = json.loads(formatted(JsonFormatter(), "event", spaced="a b", number=0.5, long="x" * 10_000))
    assert (entry["event"], entry["spaced"], entry["number"], entry["level"]) == ("event", "a b", 0.5, "info")
    assert len(entry["long"]) < 300
