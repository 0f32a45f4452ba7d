"""What a request is, checked once here so that everything behind can rely on it, and how each one is answered."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from protocol.codec import Dialect, encode
from protocol.errors import RequestError, described
from protocol.observation import camera_views, state_vectors
from protocol.observation_spec import ObservationSpec

if TYPE_CHECKING:
    from typing import TypeGuard  # not in Python 3.9

__all__ = [
    "RESET_REPLY",
    "InferRequest",
    "RequestError",
    "ResetRequest",
    "Style",
    "infer_reply",
    "parse_request",
    "size_warnings",
]

RESET_REPLY = "reset successful"
"""The text frame that answers a reset."""

LONGEST_SESSION_ID = 256


class Style(enum.Enum):
    """Whose conversation it is. RoboArena clients name an endpoint in every request, openpi clients never do."""

    ROBOARENA = "roboarena"
    OPENPI = "openpi"


@dataclass(frozen=True)
class InferRequest:
    """A valid observation, to be answered with actions (see infer_reply).

    views: camera name to frames (T,H,W,3) uint8 RGB, T the same for all; a camera that may be missing and is has no
        entry.
    state: state vector name to (size,) float64, finite.
    prompt: the task, may be empty. session_id: the episode's name, None where the client gave none.
    """

    views: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    prompt: str
    session_id: str | None
    style: Style
    dialect: Dialect


@dataclass(frozen=True)
class ResetRequest:
    """Drop the connection's current episode; to be answered with the text RESET_REPLY.

    session_id: the episode meant, where the client says so: after a reconnect the connection alone does not tell.
    """

    style: Style
    dialect: Dialect
    session_id: str | None = None


def parse_request(value: object, dialect: Dialect, spec: ObservationSpec) -> InferRequest | ResetRequest:
    """The request in a decoded message (protocol.codec.decode gives value and dialect). Unknown keys are ignored.

    spec: what an observation of the robots served holds.
    Raises RequestError, which names the key at fault and what was expected there.
    """
    if not isinstance(value, dict):
        raise RequestError("message", "a map with an observation", described(value))
    style = Style.ROBOARENA if "endpoint" in value else Style.OPENPI
    endpoint = value.get("endpoint", "infer")
    if not isinstance(endpoint, str) or endpoint not in ("infer", "reset"):
        raise RequestError("endpoint", "'infer' or 'reset'", described(endpoint))
    if endpoint == "reset":
        return ResetRequest(style, dialect, session_id=_reset_session_id(value))
    return InferRequest(
        views=camera_views(value, spec),
        state=state_vectors(value, spec),
        prompt=_prompt(value),
        session_id=_session_id(value),
        style=style,
        dialect=dialect,
    )


def infer_reply(request: InferRequest, actions: np.ndarray, server_timing: Mapping[str, float]) -> bytes:
    """The frame that answers an observation, in its client's style and array dialect.

    actions: (horizon, action size) float32. server_timing: milliseconds by name; RoboArena replies have no place for
    it.
    """
    if request.style is Style.ROBOARENA:
        return encode(actions, request.dialect)
    return encode({"actions": actions, "server_timing": dict(server_timing)}, request.dialect)


def size_warnings(request: InferRequest, resolution: Sequence[int]) -> list[str]:
    """One sentence for each camera whose images are not of the size (height, width) that the handshake asks for."""
    height, width = resolution
    warnings = []
    for name, frames in request.views.items():
        h, w = frames.shape[1:3]
        if (h, w) != (height, width):
            effect = "resized" if h * width == w * height else "another aspect ratio, distorted when resized"
            warnings.append(f"{name} images are {h}x{w}, the handshake asks for {height}x{width}: {effect}")
    return warnings


def _prompt(value: Mapping[str, object]) -> str:
    prompt = value.get("prompt")
    if not isinstance(prompt, str):
        raise RequestError("prompt", "text", described(prompt) if "prompt" in value else "nothing")
    return prompt


def _session_id(value: Mapping[str, object]) -> str | None:
    if "session_id" not in value:
        return None
    session_id = value["session_id"]
    if not _is_session_id(session_id):
        raise RequestError("session_id", f"text of 1 to {LONGEST_SESSION_ID} characters", described(session_id))
    return session_id


def _reset_session_id(value: Mapping[str, object]) -> str | None:
    """A reset carries what its client likes; only what can be a session id is taken for one."""
    session_id = value.get("session_id")
    return session_id if _is_session_id(session_id) else None


def _is_session_id(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 1 <= len(value) <= LONGEST_SESSION_ID
