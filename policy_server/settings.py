"""What the server is told from outside: one typed object, from the command line and the environment."""

import argparse
import dataclasses
import ipaddress
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from engine.settings import EngineSettings
from policy_server.origin import ANY, OriginError, read_origins

ENVIRONMENT_PREFIX = "DREAMZERO_"
_KEY_SETTINGS = ("api_key", "api_key_file")
REPLIES = ("map", "array")
LOG_LEVELS = ("debug", "info", "warning", "error")


class SettingsError(ValueError):
    """A setting cannot be served with. The text is one line, for whoever started the server."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the server listens, whom it admits, what it puts up with; and what its engine runs.

    host: address to listen on; 0.0.0.0 for all of IPv4, :: for all of both. port: port to listen on; 0 takes a free
    one.
    api_key: what clients must send as "Authorization: Api-Key ..."; better given by file or environment, which
    other users of the machine do not see. api_key_file: a file that holds the key and nothing else.
    tls_cert: certificate chain (PEM) for wss:// and https://. tls_key: its private key (PEM).
    allow_origin: whose web pages may connect, beside pages of the server's own address: origins such as
    https://policy.lab, separated by commas, or * for all.
    max_message_mib: largest message taken, in MiB; a larger one closes its connection.
    max_connections: robots connected at once; more are answered 503.
    max_sessions: sessions that one connection may keep; more end the one that it used least recently. Four times as
    many are kept of robots that are gone. One that is idle takes a few MB of host memory, and of the device's only
    what nobody else needs.
    max_queue: calls that may wait for the engine; more are answered "busy".
    session_ttl: seconds that a disconnected robot's session is kept for its return.
    drain_timeout: seconds that SIGTERM and Ctrl-C leave to the calls already accepted.
    handshake_timeout: seconds in which a new connection must have asked for something.
    ping_interval: seconds between pings to a robot. ping_timeout: seconds after which a robot from which not a byte
    came, no answer to a ping either, is cut off. write_timeout: seconds after which a robot that does not read its
    replies is cut off.
    reply: what answers an observation: a "map" with actions, timing and warnings, or the "array" of actions alone, as
    DreamZero's own test client wants it.
    debug: send tracebacks to clients. log_json: log JSON lines. log_level: debug, info, warning or error.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allow_origin: str | None = None
    max_message_mib: int = 32
    max_connections: int = 128
    max_sessions: int = 128
    max_queue: int = 64
    session_ttl: float = 60.0
    drain_timeout: float = 30.0
    handshake_timeout: float = 10.0
    ping_interval: float = 20.0
    ping_timeout: float = 600.0
    write_timeout: float = 10.0
    reply: str = "map"
    debug: bool = False
    log_json: bool = False
    log_level: str = "info"
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        """Raises SettingsError on a value out of range, a contradiction or an unreadable key file."""
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"port: expected 0 to 65535, found {self.port}")
        for name in ("max_message_mib", "max_connections", "max_sessions", "max_queue"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{_flag(name)[2:]}: expected 1 or more, found {getattr(self, name)}")
        for name in ("session_ttl", "drain_timeout"):
            if not getattr(self, name) >= 0:
                raise SettingsError(f"{_flag(name)[2:]}: expected 0 or more seconds, found {getattr(self, name)}")
        for name in ("handshake_timeout", "ping_interval", "ping_timeout", "write_timeout"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{_flag(name)[2:]}: expected more than 0 seconds, found {getattr(self, name)}")
        if self.ping_timeout <= self.ping_interval:
            expected = f"more than ping-interval, which is {self.ping_interval:g} seconds"
            raise SettingsError(f"ping-timeout: expected {expected}, found {self.ping_timeout:g}")
        if self.reply not in REPLIES:
            raise SettingsError(f"reply: expected one of {', '.join(REPLIES)}, found {self.reply!r}")
        if self.log_level not in LOG_LEVELS:
            raise SettingsError(f"log-level: expected one of {', '.join(LOG_LEVELS)}, found {self.log_level!r}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingsError("tls-cert and tls-key are given together or not at all")
        try:
            read_origins(ANY if self.allow_origin is None else self.allow_origin)
        except OriginError as error:
            raise SettingsError(f"allow-origin: {error}") from None
        if self.api_key_file is not None:
            if self.api_key is not None:
                raise SettingsError("api-key and api-key-file: give one of the two")
            object.__setattr__(self, "api_key", _read_key(self.api_key_file))
            object.__setattr__(self, "api_key_file", None)  # so that dataclasses.replace sees one key, not two
        if self.api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", self.api_key):
            raise SettingsError("api-key: expected printable ASCII without spaces, and at least one character")

    @property
    def origins(self) -> tuple[str, ...]:
        """What allow_origin lists."""
        return () if self.allow_origin is None else read_origins(self.allow_origin)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> ServerSettings:
    """Settings from command-line arguments (without the program's name) and environment variables.

    Every setting `--some-name` is also read from DREAMZERO_SOME_NAME; the command line wins. Raises SettingsError.
    `--help` prints and raises SystemExit(0), as argparse does.
    """
    parser = _Parser(
        prog="python -m policy_server",
        description="Serves a DreamZero policy to robots over WebSocket.",
        epilog=f"Every setting may also come from the environment: --max-queue is {ENVIRONMENT_PREFIX}MAX_QUEUE, "
        "and so on. The command line wins.",
        allow_abbrev=False,
    )
    _add_arguments(parser.add_argument_group("server"), ServerSettings)
    _add_arguments(parser.add_argument_group("engine"), EngineSettings)
    on_command_line = vars(parser.parse_args(arguments))
    in_environment = _from_environment(environment)
    if any(name in on_command_line for name in _KEY_SETTINGS):  # two ways to say one thing
        in_environment = {name: value for name, value in in_environment.items() if name not in _KEY_SETTINGS}
    given: dict[str, Any] = in_environment | on_command_line
    of_engine = {name: given[name] for name in _settings_of(EngineSettings) if name in given}
    of_server = {name: given[name] for name in _settings_of(ServerSettings) if name in given}
    return ServerSettings(**of_server, engine=EngineSettings(**of_engine))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _add_arguments(group: argparse._ArgumentGroup, settings: type[Any]) -> None:
    """One argument per field; a field's help is what the class docstring says behind its name."""
    help_texts = _help_texts(settings)
    for name, (parse, default) in _settings_of(settings).items():
        # An argument that is not given stays out of the namespace, so that it does not hide the environment.
        text = f"{help_texts[name]} (default: {default})" if default is not None else help_texts[name]
        if parse is _parse_bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(_flag(name), action=action, default=argparse.SUPPRESS, help=text)
        else:
            group.add_argument(
                _flag(name), type=parse, default=argparse.SUPPRESS, help=text, metavar=name.split("_")[-1].upper()
            )


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    given = {}
    for name, (parse, _) in (_settings_of(ServerSettings) | _settings_of(EngineSettings)).items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environment:
            try:
                given[name] = parse(environment[variable])
            except ValueError:
                raise SettingsError(f"{variable}: cannot read {environment[variable]!r}") from None
    return given


def _settings_of(settings: type[Any]) -> dict[str, tuple[Callable[[str], object], object]]:
    """Field name to how its text is read, and its default; nested settings left out."""
    hints = typing.get_type_hints(settings)
    found: dict[str, tuple[Callable[[str], object], object]] = {}
    for each in dataclasses.fields(settings):
        if dataclasses.is_dataclass(hints[each.name]):
            continue
        kind = hints[each.name]
        if isinstance(kind, types.UnionType):  # "int | None": what is given is an int
            kind = next(option for option in typing.get_args(kind) if option is not type(None))
        found[each.name] = (_parse_bool if kind is bool else kind, each.default)
    return found


def _help_texts(settings: type[Any]) -> dict[str, str]:
    names = "|".join(_settings_of(settings))
    _, *pieces = re.split(rf"\b({names}): ", " ".join((settings.__doc__ or "").split()))
    return {name: text.strip().replace("%", "%%") for name, text in zip(pieces[::2], pieces[1::2], strict=True)}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parse_bool(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


def _read_key(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"api-key-file: cannot read {path}: {error}") from None
