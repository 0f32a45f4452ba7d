"""What the server's port answers to plain HTTP, and whom it lets open a WebSocket."""

import hmac
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

_OPEN_PATHS = ("/healthz", "/readyz")
_METHODS = "GET, HEAD, OPTIONS"
_KEY_SCHEMES = ("api-key", "bearer")  # of openpi's clients, of RoboLab's
_RETRY_AFTER_SECONDS = "5"
_SCHEME_AND_HOST = re.compile(r"^https?://[^/?]*", re.IGNORECASE)  # what proxies put before a path

GREETING_SECONDS = 20.0
"""The handshake waits so long for a server that loads. Some robots give up on one that takes 30 s; their first request
waits instead, for which nobody is in such a hurry."""

_ARRAY_PATH = "/v1/realtime/robot/openpi"  # of vLLM-Omni, whose clients take the bare array
_WAIT = re.compile(r"\bwait=(\d{1,9})\b")  # RFC 7240


@dataclass(frozen=True)
class Wishes:
    """What a robot asks for by how it connects.

    bare_array: to be answered with nothing but the actions. greeting_within: the handshake after so many seconds at
    most, whether the server is ready or not.
    """

    bare_array: bool
    greeting_within: float


class HttpHandler:
    """Decides about each request that reaches the port.

    api_key: what a client must send, or None. not_ready: None when calls are served, else why not.
    admits_origin: whether a WebSocket with such Origin and Host headers may open, see origin.admits.
    refuses: None when one more WebSocket is welcome, else why not. metrics: Prometheus text. info: for /info.
    """

    def __init__(
        self,
        *,
        api_key: str | None,
        admits_origin: Callable[[Sequence[str], Sequence[str]], bool],
        not_ready: Callable[[], str | None],
        refuses: Callable[[], str | None],
        metrics: Callable[[], bytes],
        info: Callable[[], dict[str, object]],
    ) -> None:
        self._api_key = api_key
        self._admits_origin = admits_origin
        self._not_ready = not_ready
        self._refuses = refuses
        self._metrics = metrics
        self._info = info

    def answer(self, request: Request) -> Response | None:
        """The response to a request, or None for a WebSocket that may open."""
        path = _path(request)
        match request.method:
            case "GET" if any(value.lower() == "websocket" for value in request.headers.get_all("Upgrade")):
                return self._answer_robot(request)
            case "GET":
                return self._answer_get(request, path)
            case "HEAD":
                response = self._answer_get(request, path)
                response.body = b""  # its length stays in the headers
                return response
            case "OPTIONS":
                # What HAProxy's `option httpchk /readyz` sends: it wants to know what GET would say.
                reason = self._not_ready() if path == "/readyz" else None
                return _respond(HTTPStatus.OK, "", Allow=_METHODS) if reason is None else _unavailable(reason)
        return _respond(HTTPStatus.METHOD_NOT_ALLOWED, f"Answered are {_METHODS}.\n", Allow=_METHODS)

    def _answer_robot(self, request: Request) -> Response | None:
        if not self._admits(request):
            return _unauthorized()
        origins = request.headers.get_all("Origin")
        if not self._admits_origin(origins, request.headers.get_all("Host")):
            text = f"A web page of {', '.join(origins)!r:.200} may not connect here. See --allow-origin.\n"
            return _respond(HTTPStatus.FORBIDDEN, text)
        # On any path: a client may come through a proxy, or be written for a server that has one.
        reason = self._refuses()
        return None if reason is None else _unavailable(reason)

    def _answer_get(self, request: Request, path: str) -> Response:
        if path not in _OPEN_PATHS and not self._admits(request):
            return _unauthorized()
        if "Sec-WebSocket-Key" in request.headers:
            text = "This was a WebSocket's handshake until a proxy dropped its Upgrade header. See docs/lab.md.\n"
            return _respond(HTTPStatus.UPGRADE_REQUIRED, text, Upgrade="websocket")
        match path:
            case "/healthz":
                return _respond(HTTPStatus.OK, "OK\n")
            case "/readyz":
                reason = self._not_ready()
                return _respond(HTTPStatus.OK, "ready\n") if reason is None else _unavailable(reason)
            case "/metrics":
                kind = "text/plain; version=0.0.4; charset=utf-8"
                return _respond(HTTPStatus.OK, self._metrics(), Content_Type=kind)
            case "/info":
                text = json.dumps(self._info(), indent=2) + "\n"
                return _respond(HTTPStatus.OK, text, Content_Type="application/json")
        return _respond(HTTPStatus.NOT_FOUND, "Here are /healthz, /readyz, /metrics, /info, and a WebSocket.\n")

    def _admits(self, request: Request) -> bool:
        if self._api_key is None:
            return True
        given = request.headers.get_all("Authorization")
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(" ")
        return scheme.lower() in _KEY_SCHEMES and hmac.compare_digest(key.encode(), self._api_key.encode())


def wishes(request: Request) -> Wishes:
    """What a robot asks for when it opens a WebSocket, by its path and the header `Prefer: wait=SECONDS`."""
    wait = _WAIT.search(", ".join(request.headers.get_all("Prefer")))
    return Wishes(
        bare_array=_path(request).rstrip("/").endswith(_ARRAY_PATH),
        greeting_within=float(wait[1]) if wait else GREETING_SECONDS,
    )


def proxy_fields(request: Request | None) -> dict[str, str]:
    """What tells one robot behind a proxy from another, for the log; nothing vouches for it."""
    if request is None:
        return {}
    fields = {"path": _path(request)}
    if addresses := request.headers.get_all("X-Forwarded-For"):
        fields["forwarded_for"] = ", ".join(addresses)
    return fields


def asking_host(connection: ServerConnection) -> str:
    """The address that a connection comes from, or that a proxy on this machine says it comes from."""
    address = str((connection.remote_address or [""])[0])
    forwarded = connection.request.headers.get_all("X-Forwarded-For") if connection.request is not None else []
    if forwarded and address in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        return forwarded[-1].rpartition(",")[2].strip()
    return address


def _path(request: Request) -> str:
    return _SCHEME_AND_HOST.sub("", request.path).partition("?")[0]


def _unauthorized() -> Response:
    text = 'This server wants the header "Authorization: Api-Key ..." with its key.\n'
    return _respond(HTTPStatus.UNAUTHORIZED, text, WWW_Authenticate="Api-Key")


def _unavailable(reason: str) -> Response:
    return _respond(HTTPStatus.SERVICE_UNAVAILABLE, f"not available: {reason}\n", Retry_After=_RETRY_AFTER_SECONDS)


def _respond(status: HTTPStatus, body: str | bytes, **headers: str) -> Response:
    content = body.encode() if isinstance(body, str) else body
    fields = {"Content_Type": "text/plain; charset=utf-8"} | headers
    fields |= {"Date": formatdate(usegmt=True), "Connection": "close", "Content_Length": str(len(content))}
    return Response(
        status.value, status.phrase, Headers({name.replace("_", "-"): fields[name] for name in fields}), content
    )
