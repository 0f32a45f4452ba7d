"""`python -m policy_server`: obeys orders to stop from its first moment on, and serves."""

import os
import signal
import sys
from types import FrameType


def leave(number: int, frame: FrameType | None) -> None:
    """Nothing has begun that would have to be ended."""
    os._exit(0)


def main() -> int:
    """The command; returns its exit code, see `policy_server.process.main`."""
    # What follows takes seconds to import, and a container's first process obeys no signal that it does not handle.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, leave)
    from policy_server import process

    return process.main()


if __name__ == "__main__":
    sys.exit(main())
