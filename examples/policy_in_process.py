"""The policy without a server or a socket: load it, show it what a robot sees, get the next actions.

    python examples/policy_in_process.py [--checkpoint tiny]

For notebooks, dataset tools and simulators that run beside the model. One thread uses a policy.
"""

import argparse

import numpy as np

from engine.settings import EngineSettings
from engine.startup import PolicyLoadError, load_policy
from protocol.robot import Observation


def main() -> None:
    parser = argparse.ArgumentParser(description="Two calls of a policy in this process.")
    parser.add_argument("--checkpoint", default="tiny", help="built-in name, directory or hub id")
    args = parser.parse_args()

    try:
        policy = load_policy(EngineSettings(checkpoint=args.checkpoint, warm_up="off"), report=print)
    except PolicyLoadError as error:
        parser.error(str(error))
    camera = np.zeros((1, 180, 320, 3), np.uint8)  # frames (T, H, W, 3), RGB; several where there were several
    observation = Observation(
        views={"wrist": camera, "exterior_left": camera, "exterior_right": camera},
        state={"joint_position": np.zeros(7), "gripper_position": np.zeros(1)},
        prompt="put the block on the plate",
    )
    for _ in range(2):
        chunk = policy.infer("episode-1", observation)
        seconds = sum(chunk.seconds.values())
        print(f"call {chunk.call}: window {chunk.window}, actions {chunk.actions.shape}, {seconds:.2f} s")
    policy.end_session("episode-1")  # the model forgets the episode


if __name__ == "__main__":
    main()
