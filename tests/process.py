"""A server process of its own, as a supervisor starts it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.serving import SECONDS

TINY = ("--steps", "1", "--port", "0")
LOADING = 60


class Process:
    """A server process whose log lines are read as they come. open_files: its limits on them, soft and hard."""

    def __init__(
        self, *arguments: str, module: str = "policy_server", open_files: tuple[int, int] | None = None
    ) -> None:
        command = [sys.executable, "-m", module, *arguments]
        if open_files is not None:
            command = ["prlimit", "--nofile={}:{}".format(*open_files), *command]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        self.log: list[str] = []

    def line(self, containing: str) -> str:
        """Read on until a line contains this."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if containing in line:
                return line
        raise AssertionError(f"no line with {containing!r} in {''.join(self.log)}")

    def url(self) -> str:
        return self.line("listening").split("url=")[1].strip()

    def end(self, within: float = SECONDS) -> int:
        """The exit code."""
        _, rest = self.process.communicate(timeout=within)
        self.log += rest.splitlines(keepends=True)
        return self.process.returncode


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@contextmanager
def server(
    *arguments: str, module: str = "policy_server", open_files: tuple[int, int] | None = None
) -> Iterator[Process]:
    running = Process(*arguments, module=module, open_files=open_files)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.communicate()
