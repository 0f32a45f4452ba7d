"""A dashboard or robot in JavaScript: node drives calls with the two msgpack libraries that people use there."""

import asyncio
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.robot import HANDSHAKE
from tests.serving import serving

ROBOT = Path(__file__).parent / "javascript" / "robot.mjs"
PACKAGES = ("@msgpack/msgpack@3.1.3", "msgpackr@2.1.4", "ws@8.23.0")
INSTALL_SECONDS = 120
RUN_SECONDS = 120


@pytest.fixture(scope="module")
def packages() -> Path:
    """A directory with the npm packages, kept for the next run."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are needed")
    name = "-".join(package.rpartition("/")[2].replace("@", "-") for package in PACKAGES)
    directory = Path(tempfile.gettempdir()) / f"dreamzero-tests-{name}"
    if not directory.exists():
        fresh = Path(tempfile.mkdtemp(prefix="dreamzero-tests-npm-"))
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--omit=optional", *PACKAGES]
        (fresh / "package.json").write_text("{}")
        try:
            subprocess.run(command, cwd=fresh, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            shutil.rmtree(fresh)
            pytest.skip(f"npm cannot install {', '.join(PACKAGES)}: {error.stderr or error}")
        try:
            fresh.rename(directory)
        except OSError:  # another run was first
            shutil.rmtree(fresh)
    return directory


@pytest.mark.parametrize("library", ["@msgpack/msgpack", "msgpackr"])
async def test_node_drives_calls_an_error_and_a_reset(packages: Path, library: str) -> None:
    def drive(url: str) -> dict[str, Any]:
        command = ["node", str(ROBOT), url, library]
        done = subprocess.run(command, cwd=packages, capture_output=True, text=True, timeout=RUN_SECONDS)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    async with serving() as (server, policy):
        found = await asyncio.to_thread(drive, server.url)
    assert found["handshake"] == HANDSHAKE
    assert {"actions", "server_timing"} <= set(found["keys"])
    assert (found["dtype"], found["shape"]) == ("<f4", [24, 8])
    actions = np.array(found["actions"], np.float32)
    assert actions.size == 24 * 8
    assert np.isfinite(actions).all()
    assert np.ptp(actions) > 0
    assert found["again"] == found["actions"]
    assert found["timing"]["infer_ms"] > 0
    assert found["error"].startswith("prompt: expected text")
    assert found["reset"] == "reset successful"
    assert policy.events == ["infer id dashboard", "infer id dashboard", "end id dashboard", "infer id dashboard"]
