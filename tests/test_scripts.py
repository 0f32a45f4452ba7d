"""run_server.sh and scripts/ensure_venv.sh obey an order to stop from their first moment on, a first process too."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMESPACES = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
SECONDS = 60


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What run_server.sh needs, without an environment."""
    for name in ("run_server.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    return tmp_path


@pytest.fixture
def installed(checkout: Path) -> Path:
    """With an environment that is this test run's own."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    wanted = subprocess.check_output("cat pyproject.toml constraints.txt | cksum", shell=True, cwd=checkout)
    (checkout / ".venv" / "installed-server-replay").write_bytes(wanted)
    return checkout


def obeys(pid: int, number: int) -> bool:
    """Whether a process has a handler for the signal, by what the system says of it."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, ...]]:
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACES, "true"]).returncode != 0:
        pytest.skip("no process namespaces here")
    return NAMESPACES


@pytest.mark.parametrize("after", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8])
def test_a_containers_first_process_obeys_whenever_it_is_told(
    installed: Path, namespaces: tuple[str, ...], after: float
) -> None:
    """From bash's first line through Python's own start, where a first process is deaf, to the server's loading."""
    command = [*namespaces, "bash", installed / "run_server.sh", "--checkpoint", "tiny", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + SECONDS
        first = None
        while first is None or not obeys(first, signal.SIGTERM):
            assert time.monotonic() < deadline
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            first = int(children[0]) if children else None
        time.sleep(after)
        os.kill(first, signal.SIGTERM)
        _, log = process.communicate(timeout=SECONDS)
    assert process.returncode in (0, 128 + signal.SIGTERM), log
    assert " ready" not in log


@pytest.mark.slow
def test_a_first_process_drains_and_tells_the_servers_exit_code(installed: Path, namespaces: tuple[str, ...]) -> None:
    command = [*namespaces, "bash", installed / "run_server.sh", "--checkpoint", "tiny"]
    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        assert any(" ready" in line for line in lines)
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert any(line.endswith(" stopped\n") for line in lines)
        assert process.wait(SECONDS) == 0
    bad = subprocess.run([*command, "--port", "many"], capture_output=True, text=True, timeout=SECONDS)
    assert bad.returncode == 2
    assert "port" in bad.stderr


@pytest.mark.slow
def test_an_environment_that_is_being_made_is_left_at_once_and_finished_by_the_next_start(checkout: Path) -> None:
    """The next start has pip again: what it says is about the packages, which this test lets it not have."""
    command = ["bash", checkout / "run_server.sh"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "Creating .venv" in process.stderr.readline()
        deadline = time.monotonic() + SECONDS
        while not (checkout / ".venv" / "bin" / "python").exists():
            assert time.monotonic() < deadline
        process.terminate()
        rest = process.stderr.read()
        assert process.wait(SECONDS) == 128 + signal.SIGTERM
    assert "Installing" not in rest
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    again = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **nothing})
    assert again.returncode != 0
    assert "No module named pip" not in again.stderr
    assert "No matching distribution" in again.stderr
