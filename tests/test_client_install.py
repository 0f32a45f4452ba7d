"""The robot's side installs and runs without torch: a fresh environment, the project without extras."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import importlib.metadata, importlib.util, sys
import protocol.codec, protocol.messages, protocol.handshake, clients
assert callable(clients.PolicyClient) and callable(clients.AsyncPolicyClient)
heavy = ("torch", "transformers", "diffusers", "av", "matplotlib")
assert not [name for name in heavy if name in sys.modules or importlib.util.find_spec(name)]
installed = importlib.metadata.distribution("dreamzero-policy-server")
assert installed.metadata["License-Expression"] == "Apache-2.0"
assert "END OF TERMS AND CONDITIONS" in installed.read_text("licenses/LICENSE")
print("installed in", clients.__file__)
"""


def test_the_client_side_installs_and_imports_without_torch(tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    python = environment / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip_install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    project = copy_of_the_project(tmp_path / "project")
    subprocess.run([*pip_install, "--constraint", ROOT / "constraints.txt", project], check=True)
    run = subprocess.run([python, "-I", "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert str(environment) in run.stdout
    replay = [python, "-m", "clients.replay", "--episode", "synthetic", "--prompt", "fold"]
    run = subprocess.run(replay, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == (
        "replay: the replay needs av, matplotlib, tqdm: install this project with its `replay` extra\n"
    )


def copy_of_the_project(target: Path) -> Path:
    """What pip builds from, so that the build leaves nothing behind in the working tree."""
    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (target / name).write_bytes((ROOT / name).read_bytes())
    for package in ("clients", "engine", "kv_cache", "policy_server", "protocol"):
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    return target
