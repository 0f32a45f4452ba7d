"""From the frames of one connection to its requests: decoded and validated, and quickly where they repeat."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.codec import Decoder, Limits
from protocol.messages import InferRequest, ResetRequest, Style, parse_request
from protocol.observation import state_vectors
from protocol.observation_spec import ObservationSpec


class RequestReader:
    """Reads the requests of one connection, each as protocol.codec.decode and protocol.messages.parse_request do.

    Where a frame differs from the one before in array data alone and its images are taken as they are, only the
    state's numbers have to be checked anew: nothing else that an observation must be depends on the data.

    spec: what an observation of the robots served holds.
    """

    def __init__(self, spec: ObservationSpec, limits: Limits = Limits()) -> None:  # noqa: B008 (frozen)
        self._spec = spec
        self._decoder = Decoder(limits)
        self._known: _Known | None = None  # of the decoder's layout

    def read(self, frame: bytes) -> InferRequest | ResetRequest:
        """The request in a frame. Raises CodecError where it cannot be decoded, RequestError where it is no request."""
        value, dialect = self._decoder.decode(frame)
        known = self._known if self._decoder.repeated else None
        if known is not None and isinstance(value, dict):
            views = {name: value[key] for name, key in known.image_keys.items()}
            state = state_vectors(value, self._spec)
            return InferRequest(views, state, known.prompt, known.session_id, known.style, dialect)
        self._known = None
        request = parse_request(value, dialect, self._spec)
        if isinstance(request, InferRequest) and isinstance(value, dict):
            self._known = _known_of(request, value)
        return request


@dataclass(frozen=True)
class _Known:
    """What a request has in common with those that differ from it in array data alone.

    image_keys: camera name to the key whose array is the camera's frames as it is.
    """

    image_keys: dict[str, str]
    prompt: str
    session_id: str | None
    style: Style


def _known_of(request: InferRequest, value: dict[str, object]) -> _Known | None:
    """None where images had to be made into frames (T,H,W,3) uint8 first."""
    keys = {id(item): key for key, item in value.items()}
    if not all(id(frames) in keys for frames in request.views.values()):
        return None
    image_keys = {name: keys[id(frames)] for name, frames in request.views.items()}
    return _Known(image_keys, request.prompt, request.session_id, request.style)
