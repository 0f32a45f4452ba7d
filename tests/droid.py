"""What requests of DROID and RoboArena robots hold, as the server derives it."""

from engine.robot.embodiment_file import read_embodiment
from policy_server.observations import observation_spec

DROID = observation_spec(read_embodiment("oxe_droid"))
