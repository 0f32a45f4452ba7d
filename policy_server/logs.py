"""One log line per event, as text or as JSON; nothing that a client sends can look like a line of its own."""

import json
import logging
import sys
import time
from collections.abc import Callable

_SHOWN_CHARACTERS = 200
_SECONDS_BETWEEN_LINES = 60.0


def configure_logging(*, level: str, as_json: bool) -> None:
    """Send every logger of the process to stderr, one line per event."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def log_event(logger: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Log `event`, a fixed text, with named values; strings among them may come from a client."""
    logger.log(level, event, extra={"fields": fields})


class RareEvent:
    """Logs an event that somebody outside can make happen thousands of times a second, once a minute at most.

    Each line says as `times` how often it happened since the line before. clock: seconds.
    """

    def __init__(
        self, logger: logging.Logger, level: int, event: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._level = level
        self._event = event
        self._clock = clock
        self._times = 0
        self._quiet_until = -float("inf")

    def happened(self, **fields: object) -> None:
        """It happened once more. fields: see log_event."""
        self._times += 1
        now = self._clock()
        if now >= self._quiet_until:
            log_event(self._logger, self._level, self._event, times=self._times, **fields)
            self._times, self._quiet_until = 0, now + _SECONDS_BETWEEN_LINES


class LogBudget:
    """Logs events that clients cause: so many lines at once, and then one in so many seconds.

    left_out: lines that there was no room for since one was written, which that next one says. clock: seconds.
    """

    def __init__(self, at_once: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = self._lines = float(at_once)
        self._seconds = seconds
        self._clock = clock
        self._counted_at = clock()
        self.left_out = 0

    def log(self, logger: logging.Logger, event: str, **fields: object) -> None:
        """Log an event at INFO if there is room for its line. fields: see log_event."""
        now = self._clock()
        self._lines = min(self._most, self._lines + (now - self._counted_at) / self._seconds)
        self._counted_at = now
        if self._lines < 1:
            self.left_out += 1
            return
        self._lines -= 1
        if self.left_out:
            fields["left_out"] = self.left_out
        self.left_out = 0
        log_event(logger, logging.INFO, event, **fields)


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.000 INFO session start connection=3 session="episode 7"`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; a traceback follows it with every line of it marked, so that none can pass for an event."""
        words = [_time(record), record.levelname, _escape(record.getMessage())]
        words += [f"{name}={_shown(value)}" for name, value in _fields(record).items()]
        lines = [" ".join(words)]
        if record.exc_info:
            lines += ["    | " + _escape(line) for line in self.formatException(record.exc_info).splitlines()]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, event, the event's fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry: dict[str, object] = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        entry |= {"event": record.getMessage()} | {name: _cut(value) for name, value in _fields(record).items()}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return getattr(record, "fields", {})


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"


def _cut(value: object) -> object:
    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS:
        return value[:_SHOWN_CHARACTERS] + "..."
    return value


def _shown(value: object) -> str:
    """A number as it is; a string quoted where it is more than one plain word, with everything odd escaped."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if not isinstance(value, str):
        return _escape(str(value))
    plain = value.isascii() and value.isprintable() and not set(value) & set(" \"'=\\")
    return str(_cut(value)) if plain and value else json.dumps(_cut(value))


def _escape(text: str) -> str:
    """Printable characters stay; line breaks, terminal sequences and the like become backslash escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
