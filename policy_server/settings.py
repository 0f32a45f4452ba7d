"""What the server is told from outside: one typed object, from the command line and the environment."""

import argparse
import importlib.metadata
import ipaddress
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

from pydantic import ByteSize, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from engine.settings import EngineSettings, explain, setting
from policy_server.origin import ANY, OriginError, read_origins

ENVIRONMENT_PREFIX = "DREAMZERO_"
_KEY_SETTINGS = ("api_key", "api_key_file")


class SettingsError(ValueError):
    """A setting cannot be served with. The text is one line, for whoever started the server."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the server listens, whom it admits, what it puts up with; and what its engine runs.

    Raises ValidationError, a ValueError that `engine.settings.explain` puts into one line.
    """

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for all of IPv4, :: for all of both")
    port: int = setting(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    api_key: str | None = setting(
        None,
        'what clients must send as "Authorization: Api-Key ..."; better given by file or environment, which other '
        "users of the machine do not see",
        metavar="KEY",
        repr=False,
    )
    api_key_file: Path | None = setting(None, "a file that holds the key and nothing else")
    tls_cert: Path | None = setting(None, "certificate chain (PEM) for wss:// and https://")
    tls_key: Path | None = setting(None, "its private key (PEM)")
    allow_origin: str | None = setting(
        None,
        "whose web pages may connect, beside pages of the server's own address: origins such as https://policy.lab, "
        "separated by commas, or * for all",
        metavar="ORIGINS",
    )
    max_message_mib: int = setting(
        32, "largest message taken, in MiB; a larger one closes its connection", ge=1, le=4096
    )
    max_connections: int = setting(128, "robots connected at once; more are answered 503", ge=1, le=100_000)
    max_sessions: int = setting(
        128,
        "sessions that one connection may keep; more end the one that it used least recently. Four times as many are "
        "kept of robots that are gone. One that is idle takes a few MB of host memory, and of the device's only what "
        "nobody else needs",
        ge=1,
        le=1_000_000,
    )
    max_queue: int = setting(64, 'calls that may wait for the engine; more are answered "busy"', ge=1, le=1_000_000)
    session_ttl: float = setting(
        60.0, "seconds that a disconnected robot's session is kept for its return", metavar="SECONDS", ge=0
    )
    drain_timeout: float = setting(
        30.0, "seconds that SIGTERM and Ctrl-C leave to the calls already accepted", metavar="SECONDS", ge=0
    )
    handshake_timeout: float = setting(
        10.0, "seconds in which a new connection must have asked for something", metavar="SECONDS", gt=0
    )
    ping_interval: float = setting(20.0, "seconds between pings to a robot", metavar="SECONDS", gt=0)
    ping_timeout: float = setting(
        600.0,
        "seconds after which a robot from which not a byte came, no answer to a ping either, is cut off",
        metavar="SECONDS",
        gt=0,
    )
    write_timeout: float = setting(
        10.0, "seconds after which a robot that does not read its replies is cut off", metavar="SECONDS", gt=0
    )
    reply: Literal["map", "array"] = setting(
        "map",
        "what answers an observation: a map with actions, timing and warnings, or the array of actions alone, as "
        "DreamZero's own test client wants it",
    )
    debug: bool = setting(False, "send tracebacks to clients")
    log_json: bool = setting(False, "log JSON lines")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "the least grave lines that are logged")
    engine: EngineSettings = setting(EngineSettings(), "what the engine runs")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.ping_timeout <= self.ping_interval:
            raise ValueError(
                f"ping-timeout: expected more than ping-interval, which is {self.ping_interval:g} seconds, found "
                f"{self.ping_timeout:g}"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls-cert and tls-key are given together or not at all")
        try:
            read_origins(ANY if self.allow_origin is None else self.allow_origin)
        except OriginError as error:
            raise ValueError(f"allow-origin: {error}") from None
        if self.api_key_file is not None:
            if self.api_key is not None:
                raise ValueError("api-key and api-key-file: give one of the two")
            object.__setattr__(self, "api_key", _read_key(self.api_key_file))
            object.__setattr__(self, "api_key_file", None)  # so that dataclasses.replace sees one key, not two
        if self.api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", self.api_key):
            raise ValueError("api-key: expected printable ASCII without spaces, and at least one character")
        return self

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
    `--help` and `--version` print and raise SystemExit(0), as argparse does.
    """
    parser = _Parser(
        prog="python -m policy_server",
        description="Serves a DreamZero policy to robots over WebSocket.",
        epilog=f"Every setting may also come from the environment: --max-queue is {ENVIRONMENT_PREFIX}MAX_QUEUE, "
        "and so on. The command line wins.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=importlib.metadata.version("dreamzero-policy-server"),
        help="print the version and leave",
    )  # fmt: skip
    fields = {"server": _fields(ServerSettings), "engine": _fields(EngineSettings)}
    for title, of_group in fields.items():
        _add_arguments(parser.add_argument_group(title), of_group)
    on_command_line = vars(parser.parse_args(arguments))
    variables = {name: ENVIRONMENT_PREFIX + name.upper() for of_group in fields.values() for name in of_group}
    in_environment = {name: environment[variable] for name, variable in variables.items() if variable in environment}
    if any(name in on_command_line for name in _KEY_SETTINGS):  # two ways to say one thing
        in_environment = {name: value for name, value in in_environment.items() if name not in _KEY_SETTINGS}
    given: dict[str, Any] = in_environment | on_command_line
    names = {name: variables[name] for name in in_environment.keys() - on_command_line.keys()}
    for name, value in given.items():
        # Nothing would be this directory as a path, every network as a host, an open door as a key.
        if isinstance(value, str) and not value.strip():
            raise SettingsError(f"{names.get(name, name.replace('_', '-'))}: expected a value, found nothing")
    try:
        engine = EngineSettings(**{name: given[name] for name in fields["engine"] if name in given})
        return ServerSettings(**{name: given[name] for name in fields["server"] if name in given}, engine=engine)
    except ValidationError as error:
        raise SettingsError(explain(error, names)) from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _fields(settings: type[Any]) -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = settings.__pydantic_fields__
    return {name: field for name, field in fields.items() if name != "engine"}


def _add_arguments(group: argparse._ArgumentGroup, fields: Mapping[str, FieldInfo]) -> None:
    """One argument per field, whose text goes to the settings as it is.

    One that is not given stays out of the namespace, so that it does not hide the environment.
    """
    for name, field in fields.items():
        text = (field.description or "").replace("%", "%%")
        if field.default is not None:
            shown = field.default
            text += f" (default: {','.join(map(str, shown)) if isinstance(shown, tuple) else shown})"
        flag, kind = "--" + name.replace("_", "-"), _kind(field)
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            group.add_argument(flag, default=argparse.SUPPRESS, help=text, metavar=_metavar(field, kind))


def _kind(field: FieldInfo) -> Any:
    """The type of what is given: for "int | None" an int."""
    if isinstance(field.annotation, types.UnionType) or typing.get_origin(field.annotation) is typing.Union:
        return next(each for each in typing.get_args(field.annotation) if each is not type(None))
    return field.annotation


def _metavar(field: FieldInfo, kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(typing.get_args(kind)) + "}"
    extra = field.json_schema_extra
    own = extra["metavar"] if isinstance(extra, dict) else None
    return str(own or {int: "N", float: "X", Path: "FILE", ByteSize: "SIZE"}.get(kind, "NAME"))


def _read_key(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api-key-file: cannot read {path}: {error}") from None
