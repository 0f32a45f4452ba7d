"""The examples run as they stand, as whoever copies them would run them."""

import asyncio
import subprocess
import sys
from pathlib import Path

from tests.serving import serving

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_policy_in_process_answers_twice() -> None:
    lines = run("policy_in_process.py").splitlines()
    assert [line.split(",")[0] for line in lines[-2:]] == ["call 1: window new", "call 2: window continued"]
    assert "actions (24, 8)" in lines[-1]


async def test_a_robot_loop_executes_part_of_each_chunk() -> None:
    async with serving() as (server, _):
        printed = await asyncio.to_thread(run, "robot_loop.py", "--port", str(server.port), "--calls", "3")
    assert [line.split(",")[0] for line in printed.splitlines() if line.startswith("call")] == [
        "call 1: window new", "call 2: window continued", "call 3: window continued",
    ]  # fmt: skip


def test_another_robot_gets_actions_of_its_own_size(tmp_path: Path) -> None:
    assert run("another_robot.py", str(tmp_path / "arm")).splitlines()[-1].startswith("actions (24, 9)")
