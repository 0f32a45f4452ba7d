"""What the wire is told of a robot: the embodiment's cameras and numbers, and what differs in the handshake."""

from typing import cast

from engine.robot.embodiment import Embodiment
from protocol.handshake import HANDSHAKE
from protocol.observation_spec import Camera, ObservationSpec, StateVector


def observation_spec(embodiment: Embodiment) -> ObservationSpec:
    """What a request of such a robot must hold."""
    height, width = cast(list[int], handshake(embodiment)["image_resolution"])
    return ObservationSpec(
        cameras=tuple(
            Camera(name=view.name, keys=view.keys, required=view.required, one_of=view.one_of)
            for view in embodiment.views
        ),
        state=tuple(
            StateVector(name=vector.name, key=vector.key, size=vector.size, meaning=vector.meaning)
            for vector in embodiment.state
        ),
        resolution=(height, width),
    )


def handshake(embodiment: Embodiment) -> dict[str, object]:
    """What such a robot is told first; always the same six keys."""
    return HANDSHAKE | dict(embodiment.handshake)
