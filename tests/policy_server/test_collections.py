"""Garbage in cycles is found while a server runs, however much is loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

SERVE = """
import gc, sys
from collections import deque
from policy_server.process import freeze_gc

loaded = [[] for _ in range(400_000)]
gc.collect()
if sys.argv[1] == "kept":
    freeze_gc()
full = gc.get_stats()[2]["collections"]
recent = deque(maxlen=5_000)
for _ in range(90_000):
    connection = []
    connection.append(connection)
    recent.append(connection)
print(gc.get_stats()[2]["collections"] - full)
"""


@pytest.mark.parametrize(("how", "least", "most"), [("kept", 4, 100), ("seen", 0, 0)])
def test_full_collections_come_early_once_what_is_loaded_is_out_of_sight(how: str, least: int, most: int) -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", SERVE, how], capture_output=True, text=True, timeout=60, cwd=root)
    assert run.returncode == 0, run.stderr
    assert least <= int(run.stdout) <= most
