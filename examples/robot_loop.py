"""A robot's loop: send what it sees, execute the first actions of the answer, ask again.

    ./run_server.sh                                     # in one terminal
    python examples/robot_loop.py --prompt "..."        # in another; needs `pip install .` alone, no torch

Replace `Robot` by yours. The model wants frames that are 8 control steps apart, so a loop either executes 8 of the 24
actions between two calls, as here, or sends four frames at a time (docs/clients.md).
"""

import argparse
import uuid

import numpy as np

from clients import ConnectFailed, PolicyClient, PolicyError

STEPS_PER_CALL = 8


class Robot:
    """Seven joints, a gripper and three cameras that see nothing; stands in for an arm."""

    def __init__(self) -> None:
        self.joints = np.zeros(7)
        self.gripper = np.zeros(1)

    def look(self) -> dict[str, np.ndarray]:
        black = np.zeros((180, 320, 3), np.uint8)
        return {
            "observation/exterior_image_0_left": black,
            "observation/exterior_image_1_left": black,
            "observation/wrist_image_left": black,
            "observation/joint_position": self.joints,
            "observation/gripper_position": self.gripper,
        }

    def execute(self, action: np.ndarray) -> None:
        """One control step, a fifteenth of a second: absolute joint positions in radians, and the gripper."""
        self.joints, self.gripper = action[:7], action[7:]


def main() -> None:
    parser = argparse.ArgumentParser(description="A robot's loop against a policy server.")
    parser.add_argument("--host", default="127.0.0.1", help="host, or a whole URL")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prompt", default="put the block on the plate")
    parser.add_argument("--calls", type=int, default=5)
    args = parser.parse_args()

    robot = Robot()
    print("connecting; a server that loads answers when it is ready")
    try:
        client = PolicyClient(args.host, args.port, connect_timeout=60.0)
    except ConnectFailed as error:
        parser.error(str(error))
    episode = {"prompt": args.prompt, "session_id": str(uuid.uuid4())}  # a new id for each episode
    try:
        for _ in range(args.calls):
            reply = client.infer(robot.look() | episode, timeout=30.0)
            for action in reply["actions"][:STEPS_PER_CALL]:
                robot.execute(action)
            episode_so_far, milliseconds = reply["episode"], reply["server_timing"]["infer_ms"]
            print("call {call}: window {window}".format(**episode_so_far), f"{milliseconds:.0f} ms", sep=", ")
    except PolicyError as refused:
        print(f"the server did not take the observation: {refused}")
    finally:
        client.reset(session_id=episode["session_id"])
        client.close()


if __name__ == "__main__":
    main()
