"""What requests of DROID and RoboArena robots hold, as the server derives it."""

from engine.robot.embodiment_file import read_embodiment

DROID = read_embodiment("oxe_droid").observation_spec
