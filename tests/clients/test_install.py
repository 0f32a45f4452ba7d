"""The robot's side installs and runs without torch: a fresh environment, the project without extras."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import Dialect
from tests.clients.wire_server import DISCONNECT, WireServer, spec_answer

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import importlib.metadata, importlib.resources, importlib.util, sys
import protocol.codec, protocol.messages, protocol.robot, clients
assert callable(clients.PolicyClient) and callable(clients.AsyncPolicyClient)
heavy = ("torch", "transformers", "diffusers", "av", "matplotlib")
assert not [name for name in heavy if name in sys.modules or importlib.util.find_spec(name)]
installed = importlib.metadata.distribution("dreamzero-policy-server")
assert installed.metadata["License-Expression"] == "Apache-2.0"
assert "END OF TERMS AND CONDITIONS" in installed.read_text("licenses/LICENSE")
assert all(importlib.resources.files(name).joinpath("py.typed").is_file() for name in ("clients", "protocol"))
print("installed in", clients.__file__)
"""

IMPORT_ALL = """
import importlib, pkgutil, clients, protocol
needs_an_extra = {"clients.action_plot", "clients.recorded_episode"}
for package in (clients, protocol):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if module.name not in needs_an_extra:
            importlib.import_module(module.name)
"""

DRIVE = """
import asyncio, sys
import numpy as np
from clients import AsyncPolicyClient, PolicyClient

port = int(sys.argv[1])

def observation(number):
    image = np.zeros((18, 32, 3), np.uint8)
    return {
        "observation/exterior_image_1_left": image,
        "observation/wrist_image_left": image,
        "observation/joint_position": np.full(7, number, np.float32),
        "observation/gripper_position": np.zeros(1),
        "prompt": "fold the towel",
        "session_id": "episode",
    }

def check(reply, number):
    assert np.array_equal(reply["actions"], np.full((24, 8), number, np.float32))
    reply["actions"] += 1

with PolicyClient("127.0.0.1", port, resend=True) as client:
    assert client.get_server_metadata()["action_space"] == "joint_position"
    check(client.infer(observation(1)), 1)
    client.reset()
    check(client.infer(observation(404)), 404)
    check(client.infer(observation(2)), 2)

async def drive():
    async with AsyncPolicyClient("127.0.0.1", port, resend=True) as client:
        replies = await asyncio.gather(*(client.infer(observation(number)) for number in range(3, 6)))
        for number, reply in zip(range(3, 6), replies):
            check(reply, number)
        await client.reset()
        check(await client.infer(observation(404)), 404)
        check(await client.infer(observation(6)), 6)

asyncio.run(drive())
print("driven by", sys.version.split()[0])
"""


@pytest.mark.slow
def test_the_client_side_installs_and_imports_without_torch(tmp_path: Path) -> None:
    environment = fresh_environment(tmp_path, sys.executable)
    python = environment / "bin" / "python"
    run = subprocess.run([python, "-I", "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert str(environment) in run.stdout
    replay = [python, "-m", "clients.replay", "--episode", "synthetic", "--prompt", "fold"]
    run = subprocess.run(replay, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == (
        "replay: the replay needs av, matplotlib, tqdm: install this project with its `replay` extra\n"
    )


@pytest.mark.slow
def test_python_3_9_installs_and_drives_the_client_side(tmp_path: Path) -> None:
    environment = fresh_environment(tmp_path, python_3_9())
    python = environment / "bin" / "python"
    for program in (PROGRAM, IMPORT_ALL):
        run = subprocess.run([python, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
    broken: list[int] = []  # connections that were cut before the reply: the first time that a client sends number 404

    def answer(message: dict[str, Any], dialect: Dialect) -> Any:
        if message.get("observation/joint_position", [0])[0] == 404 and len(server.headers) > 2 * len(broken):
            broken.append(len(server.headers))
            return DISCONNECT
        return spec_answer(message, dialect)

    with WireServer(answer) as server:
        drive = [python, "-I", "-c", DRIVE, str(server.port)]
        run = subprocess.run(drive, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("driven by 3.9.")
    assert broken == [1, 3]
    assert [message for message in server.messages if "endpoint" in message] == [
        {"endpoint": "reset", "session_id": "episode"}
    ] * 2


def test_a_server_on_python_3_9_says_what_it_needs() -> None:
    run = subprocess.run([python_3_9(), "-m", "policy_server"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert "the server needs Python 3.11, this is 3.9." in run.stderr
    assert "Traceback" not in run.stderr


def python_3_9() -> str:
    """A Python 3.9 that runs (one on the PATH may be an empty shim); skips the test where there is none."""
    for candidate in ("python3.9", *map(str, Path.home().glob(".pyenv/versions/3.9.*/bin/python3.9"))):
        try:
            if subprocess.run([candidate, "--version"], capture_output=True).returncode == 0:
                return candidate
        except OSError:
            continue
    pytest.skip("there is no Python 3.9")


def fresh_environment(directory: Path, base: str) -> Path:
    """A virtual environment of that Python with the project in it, without extras."""
    environment = directory / "venv"
    subprocess.run([base, "-m", "venv", environment], check=True)
    pip_install = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    project = copy_of_the_project(directory / "project")
    subprocess.run([*pip_install, "--constraint", ROOT / "constraints.txt", project], check=True)
    return environment


def copy_of_the_project(target: Path) -> Path:
    """What pip builds from, so that the build leaves nothing behind in the working tree."""
    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (target / name).write_bytes((ROOT / name).read_bytes())
    for package in ("clients", "engine", "kv_cache", "policy_server", "protocol"):
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    return target
