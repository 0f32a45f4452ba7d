"""What a request is, checked once here so that everything behind can rely on it, and how each one is answered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from protocol.codec import Dialect, Limits, decode, encode
from protocol.errors import RequestError, described
from protocol.observation import read_observation
from protocol.robot import Observation, ObservationSpec

__all__ = [
    "RESET_REPLY",
    "InferRequest",
    "RequestError",
    "ResetRequest",
    "infer_reply",
    "parse_request",
    "read_request",
    "session_name",
    "without_numbers",
]

RESET_REPLY = "reset successful"
"""The text frame that answers a reset."""

LONGEST_SESSION_ID = 256
_MOST_NAMES = 10_000  # in an array; lists have their limit in protocol.codec.Limits
_NUMBER = re.compile(r"(?<!_)-?\d[\d.e+-]*")  # but for the number in a key


@dataclass(frozen=True)
class InferRequest:
    """A valid observation, to be answered with actions (see infer_reply).

    session_id: the episode's name, None where the client gave none. dialect: how the client writes arrays.
    warnings: what is wrong with the observation although it is used, a sentence each.
    """

    observation: Observation
    session_id: str | None
    dialect: Dialect
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class ResetRequest:
    """End episodes; to be answered with the text RESET_REPLY.

    session_ids: the episodes meant, by name; None where the client names none, and means the one that it used last.
    """

    session_ids: tuple[str, ...] | None = None


def read_request(frame: bytes, spec: ObservationSpec, limits: Limits) -> InferRequest | ResetRequest:
    """The request in a frame. What it holds under keys that nobody asks for may be anything.

    spec: what an observation of the robots served holds.
    Raises CodecError where the frame cannot be decoded, RequestError where it is no request.
    """
    return parse_request(*decode(frame, limits, spec.wanted), spec)


def parse_request(value: object, dialect: Dialect, spec: ObservationSpec) -> InferRequest | ResetRequest:
    """The request in a decoded message (protocol.codec.decode gives value and dialect). Unknown keys are ignored.

    Requests of the RoboArena family name an endpoint, those of the openpi family never do and are observations.
    Raises RequestError, which names the key at fault and what was expected there.
    """
    if not isinstance(value, dict):
        raise RequestError("message", "a map with an observation", described(value))
    endpoint = value.get("endpoint", "infer")
    if not isinstance(endpoint, str) or endpoint not in ("infer", "reset"):
        raise RequestError("endpoint", "'infer' or 'reset'", described(endpoint))
    if endpoint == "reset":
        return ResetRequest(_named_by_reset(value))
    observation, warnings = read_observation(value, spec)
    return InferRequest(observation, _session_id(value), dialect, warnings)


def infer_reply(
    request: InferRequest, actions: np.ndarray, about: Mapping[str, object], *, as_array: bool = False
) -> bytes:
    """The frame that answers an observation, in its client's array dialect: a map of `actions` and more.

    actions: (horizon, action size) float32. about: the map's further entries.
    as_array: the actions alone, for clients that take nothing else.
    """
    if as_array:
        return encode(actions, request.dialect)
    return encode({"actions": actions, **about}, request.dialect)


def _session_id(value: Mapping[str, object]) -> str | None:
    given = value.get("session_id")
    if given is None or (isinstance(given, str) and not given):
        return None
    session_id = session_name(given)
    if session_id is None:
        raise RequestError("session_id", f"text of 1 to {LONGEST_SESSION_ID} characters", described(given))
    return session_id


def _named_by_reset(value: Mapping[str, object]) -> tuple[str, ...] | None:
    """All names under `session_id` and `session_ids`, each of which may hold one or several.

    A reset carries what its client likes: what can be no name names no episode. Nor does a `session_ids` of nil, which
    vectorised simulators send when an environment without an episode is reset.
    """
    given: list[object] = []
    for key in ("session_id", "session_ids"):
        names = value.get(key)
        if isinstance(names, np.ndarray) and names.size <= _MOST_NAMES:
            names = list(names.reshape(-1))
        given += names if isinstance(names, list) else [names]
    if "session_ids" not in value and all(each is None or (isinstance(each, str) and not each) for each in given):
        return None
    return tuple(dict.fromkeys(name for name in map(session_name, given) if name is not None))


def session_name(value: object) -> str | None:
    """An episode's name, for which a whole number stands by its digits; None where the value can be none.

    JavaScript writes large numbers as floats.
    """
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(())[()]
    if isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and value == value // 1:
        value = str(int(value))
    return value if isinstance(value, str) and 1 <= len(value) <= LONGEST_SESSION_ID else None


def without_numbers(warning: str) -> str:
    """What stays the same of a warning from call to call, by which it is logged once."""
    return _NUMBER.sub("#", warning)
