"""python -m clients.replay: send an episode to a policy server, call by call, and keep what comes back."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import textwrap
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clients.episode import STEPS_PER_CALL, Episode
from clients.errors import PolicyError
from clients.policy_client import PolicyClient

_EXTRA = ("av", "matplotlib", "tqdm")


@dataclass(frozen=True)
class Replay:
    """actions: (calls, 24, 8) float32. latencies: (calls,) seconds from sending to reply. seconds: of the whole run."""

    actions: np.ndarray
    latencies: np.ndarray
    seconds: float


def observation(frames: dict[str, np.ndarray], prompt: str, session_id: str) -> dict[str, object]:
    """One call's observation. Like DreamZero's own client, a replay has no joint states and sends zeros.

    frames: camera name as in clients.episode.CAMERAS to (T,H,W,3) uint8.
    """
    cameras = {f"observation/{camera}": images for camera, images in frames.items()}
    state = {"joint_position": np.zeros(7), "cartesian_position": np.zeros(6), "gripper_position": np.zeros(1)}
    keyed_state = {f"observation/{name}": value for name, value in state.items()}
    return {**cameras, **keyed_state, "prompt": prompt, "session_id": session_id}


def replay(client: PolicyClient, episode: Episode, prompt: str) -> Replay:
    """Send an episode's calls one after the other, as a session of its own, with a progress bar on stderr.

    Raises what PolicyClient.infer raises, and PolicyError where a reply is not (24, 8) finite actions.
    """
    from tqdm import tqdm

    session_id = f"replay-{uuid.uuid4()}"
    actions, latencies = [], []
    start = time.perf_counter()
    for frames in tqdm(episode.calls, desc=episode.name, unit="call"):
        sent_at = time.perf_counter()
        reply = client.infer(observation(frames, prompt, session_id))
        latencies.append(time.perf_counter() - sent_at)
        actions.append(_checked(reply.get("actions")))
    return Replay(np.stack(actions), np.array(latencies), time.perf_counter() - start)


def summary(result: Replay) -> str:
    """Latency and throughput in two lines."""
    ms = 1e3 * result.latencies
    calls = len(ms)
    return (
        f"latency     min {ms.min():.1f} ms, median {np.median(ms):.1f} ms, p95 {np.percentile(ms, 95):.1f} ms, "
        f"max {ms.max():.1f} ms over {calls} calls\n"
        f"throughput  {calls / result.seconds:.2f} calls/s, {calls * STEPS_PER_CALL / result.seconds:.1f} actions/s"
    )


def write(result: Replay, episode: Episode, prompt: str, directory: Path) -> list[Path]:
    """Write actions.npz (actions, latencies, prompt) and actions.png into a directory, made if need be."""
    from clients.action_plot import plot_actions

    directory.mkdir(parents=True, exist_ok=True)
    archive, picture = directory / "actions.npz", directory / "actions.png"
    np.savez(archive, actions=result.actions, latencies=result.latencies, prompt=prompt)
    plot_actions(result.actions, f"{episode.name}: “{textwrap.shorten(prompt, 90, placeholder=' ...')}”", picture)
    return [archive, picture]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status. Whatever goes wrong is one line on stderr."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("websockets").setLevel(logging.WARNING)
    missing = [module for module in _EXTRA if importlib.util.find_spec(module) is None]
    if missing:
        return _fail(f"the replay needs {', '.join(missing)}: install this project with its `replay` extra")
    try:
        episode = _episode(options.episode, options.calls)
        with PolicyClient(options.url, api_key=options.api_key, connect_timeout=options.wait) as client:
            result = replay(client, episode, options.prompt)
        print(summary(result))
        for path in write(result, episode, options.prompt, options.out):
            print(f"wrote       {path}")
    except PolicyError as error:
        return _fail(f"the server answered: {error}")
    except (OSError, ValueError) as error:  # of the recording, the connection, or a prompt that cannot be sent
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", status=130)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m clients.replay", description="Replay an episode against a server.")
    parser.add_argument(
        "--episode", required=True, help="directory with the three camera recordings, or `synthetic` for a built-in one"
    )
    parser.add_argument("--prompt", required=True, help="the task, in words")
    parser.add_argument("--url", default="ws://127.0.0.1:8000", help="the policy server (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("replay-out"), help="where results go (default: %(default)s)")
    parser.add_argument("--calls", type=_positive, help="stop after so many calls (default: the whole episode)")
    parser.add_argument("--api-key", help="the server's key, if it wants one")
    parser.add_argument(
        "--wait", type=float, default=10.0, help="seconds to wait for a server that is not up (default: %(default)g)"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def _episode(source: str, calls: int | None) -> Episode:
    from clients.recorded_episode import read_episode
    from clients.synthetic_episode import synthetic_episode

    episode = synthetic_episode() if source == "synthetic" else read_episode(Path(source))
    return Episode(episode.name, episode.calls[:calls])


def _checked(actions: object) -> np.ndarray:
    if not isinstance(actions, np.ndarray) or actions.shape != (STEPS_PER_CALL, 8) or actions.dtype.kind != "f":
        raise PolicyError(f"a reply without actions of shape ({STEPS_PER_CALL}, 8): {type(actions).__name__}")
    if not np.isfinite(actions).all():
        raise PolicyError("a reply with actions that are not finite")
    return actions


def _fail(text: str, status: int = 1) -> int:
    print(f"replay: {' '.join(text.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
