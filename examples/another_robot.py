"""Another robot than DROID: its YAML file, the statistics that its checkpoint needs, and a request.

    python examples/another_robot.py DIRECTORY

Writes a small checkpoint with synthetic weights for `two_camera_arm.yaml` into DIRECTORY and asks it once. A trained
checkpoint has such statistics of its own; it is served with `./run_server.sh --checkpoint ... --embodiment FILE`.
"""

import json
import sys
from pathlib import Path

import numpy as np

from engine.checkpoint.synthetic import synthesize
from engine.settings import EngineSettings
from engine.startup import load_policy
from protocol.robot import Observation

EMBODIMENT = Path(__file__).with_name("two_camera_arm.yaml")


def span(size: int) -> dict[str, list[float]]:
    """A vector's 1st and 99th percentile over the training data; made up here."""
    return {"q01": [-1.0] * size, "q99": [1.0] * size}


def main(directory: Path) -> None:
    synthesize("tiny", directory)
    vectors = {"joints": span(6), "fingers": span(3)}  # by the names that the YAML file gives
    statistics = {"two_camera_arm": {"statistics": {"state": vectors, "action": vectors}}}
    (directory / "experiment_cfg" / "metadata.json").write_text(json.dumps(statistics))
    conf = "image_resolution_height: 32\nimage_resolution_width: 64\n"  # nothing of relative actions: as the file says
    (directory / "experiment_cfg" / "conf.yaml").write_text(conf)

    settings = EngineSettings(checkpoint=str(directory), embodiment=str(EMBODIMENT), warm_up="off")
    policy = load_policy(settings, report=print)
    observation = Observation(
        views={"front": np.zeros((1, 240, 320, 3), np.uint8)},  # the camera at its hand may be missing
        state={"joints": np.zeros(6), "fingers": np.zeros(3)},
        prompt="pick up the block",
    )
    actions = policy.infer("episode-1", observation).actions
    print(f"actions {actions.shape}: 24 steps of three fingers, then six joints")


if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        sys.exit("usage: python examples/another_robot.py DIRECTORY, which is made and must not be there")
    main(Path(sys.argv[1]))
