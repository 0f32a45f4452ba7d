"""What the server's port answers to plain HTTP, and whom it lets open a WebSocket."""

import hmac
import json
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus

from websockets.datastructures import Headers
from websockets.http11 import Request, Response

_OPEN_PATHS = ("/healthz", "/readyz")
_RETRY_AFTER_SECONDS = "5"


class Door:
    """Decides about each request that reaches the port.

    api_key: what a client must send, or None. not_ready: None when calls are served, else why not.
    refuses: None when one more WebSocket is welcome, else why not. metrics: Prometheus text. info: for /info.
    """

    def __init__(
        self,
        *,
        api_key: str | None,
        not_ready: Callable[[], str | None],
        refuses: Callable[[], str | None],
        metrics: Callable[[], bytes],
        info: Callable[[], dict[str, object]],
    ) -> None:
        self._api_key = api_key
        self._not_ready = not_ready
        self._refuses = refuses
        self._metrics = metrics
        self._info = info

    def answer(self, request: Request) -> Response | None:
        """The response to a request, or None for a WebSocket that may open."""
        path = request.path.partition("?")[0]
        wants_websocket = any(value.lower() == "websocket" for value in request.headers.get_all("Upgrade"))
        if not wants_websocket and request.method != "GET":
            return _respond(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET is answered here.\n", Allow="GET")
        if not self._admits(request) and (wants_websocket or path not in _OPEN_PATHS):
            text = 'This server wants the header "Authorization: Api-Key ..." with its key.\n'
            return _respond(HTTPStatus.UNAUTHORIZED, text, WWW_Authenticate="Api-Key")
        if wants_websocket:
            # On any path: a client may come through a proxy, or be written for a server that has one.
            reason = self._refuses()
            return None if reason is None else _unavailable(reason)
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
        expected = f"Api-Key {self._api_key}"
        return len(given) == 1 and hmac.compare_digest(given[0].encode(), expected.encode())


def _unavailable(reason: str) -> Response:
    return _respond(HTTPStatus.SERVICE_UNAVAILABLE, f"not available: {reason}\n", Retry_After=_RETRY_AFTER_SECONDS)


def _respond(status: HTTPStatus, body: str | bytes, **headers: str) -> Response:
    content = body.encode() if isinstance(body, str) else body
    fields = {"Content_Type": "text/plain; charset=utf-8"} | headers
    fields |= {"Date": formatdate(usegmt=True), "Connection": "close", "Content_Length": str(len(content))}
    return Response(
        status.value, status.phrase, Headers({name.replace("_", "-"): fields[name] for name in fields}), content
    )
