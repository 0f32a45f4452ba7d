"""Compare the engine with golden files: what the public release computed, at small size.

    python -m tests.golden FILE...              prints the largest error of each output, exits 1 beyond tolerance

A file is complete: sizes, inputs and outputs are inside, and the weights follow from the names.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from engine.builtin import BUILTIN_STATISTICS
from engine.checkpoint.opening import Checkpoint, synthetic_checkpoint
from engine.dit import CrossContext, Register
from engine.embodiment_file import read_embodiment
from engine.loading import build_cache
from engine.model import Model, load_model
from engine.rollout import Noise, Prediction, Rollout, RolloutSettings
from engine.rope import Rope
from engine.session import Session
from engine.step_cache import StepCacheSettings
from engine.transforms import Transforms
from kv_cache.cache import KVCache
from kv_cache.sizing import CPU_DEFAULT_BYTES

TOLERANCE = 1e-4
FILES = sorted((Path(__file__).parent / "golden_files").glob("*.safetensors"))
CAMERAS = ("exterior_left", "exterior_right", "wrist")


@dataclass
class Report:
    """Largest absolute error by output, DiT forwards counted and expected, of one file."""

    errors: dict[str, float] = field(default_factory=dict)
    forwards: int = 0
    forwards_expected: int = 0

    def compare(self, name: str, got: Tensor | np.ndarray, expected: Tensor) -> None:
        """Keep the largest error of an output over all calls; another shape counts as infinite."""
        got = torch.as_tensor(got)
        same_shape = got.shape == expected.shape
        error = float((got.double() - expected.double()).abs().max()) if same_shape else float("inf")
        self.errors[name] = max(self.errors.get(name, 0.0), error if error == error else float("inf"))

    def clean(self, tolerance: float) -> bool:
        """Whether every output is within tolerance and the forwards are as many as the release's."""
        return self.forwards == self.forwards_expected and all(e <= tolerance for e in self.errors.values())


class Golden:
    """One golden file."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        metadata = {key: value if key == "kind" else json.loads(value) for key, value in self._file.metadata().items()}
        self.kind: str = metadata["kind"]
        self.calls: list[dict[str, Any]] = metadata["calls"]
        self.config: dict[str, Any] = metadata["config"]
        self.statistics: dict[str, Any] = metadata.get("statistics", BUILTIN_STATISTICS)
        self.runtime: dict[str, Any] = metadata.get("runtime", {})

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file."""
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of that name."""
        return name in self._file.keys()  # noqa: SIM118 - the file is no dict

    def checkpoint(self) -> Checkpoint:
        """The synthetic checkpoint the file was made with."""
        return synthetic_checkpoint("golden", self.config, self.statistics)

    def settings(self) -> RolloutSettings:
        """How the release denoised; the defaults for a file of single forwards."""
        if not self.runtime:
            return RolloutSettings()
        cache = self.runtime["step_cache"]
        return RolloutSettings(
            steps=self.runtime["num_inference_steps"],
            guidance_scale=self.runtime["cfg_scale"],
            sigma_shift=self.runtime["sigma_shift"],
            step_cache=StepCacheSettings(
                mask=tuple(map(bool, cache["mask"])) if cache["kind"] == "mask" else None,
                thresholds=tuple(cache.get("thresholds", ())),
                countdowns=tuple(cache.get("countdowns", ())),
            ),
        )

    def views(self, call: dict[str, Any]) -> dict[str, np.ndarray]:
        """The made-up camera views of a call."""
        missing = call.get("missing_cameras", [])
        return {
            name: np.stack([scene(camera, t) for t in call["frames"]])
            for camera, name in enumerate(CAMERAS)
            if camera not in missing
        }

    def noise(self, index: int) -> Noise:
        """The noise that call `index` started from."""
        return Noise(self.tensor(f"{index:02}.noise_video")[None], self.tensor(f"{index:02}.noise_action")[None])


def scene(camera: int, t: int) -> np.ndarray:
    """What camera 0 (left), 1 (right) or 2 (wrist) sees at time t: (180, 320, 3) uint8."""
    y, x, k = np.mgrid[0:180, 0:320, 0:3]
    v = (3 * x + 2 * y + 7 * t * (camera + 1) + 97 * camera + 61 * k + ((x * y) >> 7)) % 510
    return np.where(v < 256, v, 510 - v).astype(np.uint8)


@dataclass(frozen=True)
class Engine:
    """A golden file's model and what runs it."""

    checkpoint: Checkpoint
    model: Model
    settings: RolloutSettings
    transforms: Transforms
    cache: KVCache
    rollout: Rollout

    def with_cache(self, kv_bytes: int) -> "Engine":
        """The same model over a KV cache of its own."""
        cache = build_cache(self.checkpoint.config, kv_bytes, torch.device("cpu"), torch.float32)
        return replace(self, cache=cache, rollout=Rollout(self.model, cache, self.checkpoint.tokenizer, self.settings))


def build_engine(golden: Golden) -> Engine:
    """The engine in float32 on the CPU, as the golden numbers ask for."""
    checkpoint = golden.checkpoint()
    config, device = checkpoint.config, torch.device("cpu")
    model = load_model(config, checkpoint.weights, device, torch.float32)
    cache = build_cache(config, CPU_DEFAULT_BYTES, device, torch.float32)
    return Engine(
        checkpoint=checkpoint,
        model=model,
        settings=golden.settings(),
        transforms=Transforms(read_embodiment("oxe_droid"), config, golden.statistics),
        cache=cache,
        rollout=Rollout(model, cache, checkpoint.tokenizer, golden.settings()),
    )


def run_call(engine: Engine, golden: Golden, session: Session, index: int, report: Report) -> Prediction:
    """One call from the file's images on, with the prompt's tokens and the state that the robot's own values give."""
    call, prefix = golden.calls[index], f"{index:02}."
    tokens, mask = engine.rollout.tokenize(engine.transforms.embodiment.prompt_text(call["prompt"]))
    observed = {name: np.array(call[name]) for name in ("joint_position", "gripper_position")}
    state = engine.transforms.normalize_state(observed)
    report.compare("token_ids", tokens, golden.tensor(prefix + "token_ids"))
    report.compare("state", state, golden.tensor(prefix + "state"))
    prediction = engine.rollout.call(
        session, golden.tensor(prefix + "images"), tokens, mask, golden.tensor(prefix + "state"), golden.noise(index)
    )
    report.compare("video_latents", prediction.video_latents, golden.tensor(prefix + "video_latents"))
    report.compare("action_latents", prediction.action_latents, golden.tensor(prefix + "action_latents"))
    action = engine.transforms.actions(prediction.action_latents, observed)
    report.compare("action", action, golden.tensor(prefix + "action"))
    report.compare("start_frame", torch.tensor(session.start_frame), torch.tensor(call["start_frame_after"]))
    report.forwards += prediction.dit_forwards
    report.forwards_expected += call["dit_forwards"]
    return prediction


def check_rollout(golden: Golden) -> Report:
    """Every call of a `rollout` file."""
    engine, report = build_engine(golden), Report()
    session = raw = Session(engine.cache.session(0))
    for index, call in enumerate(golden.calls):
        if index == 0 or call["new_session"]:
            engine.cache.forget(0)
            session, raw = Session(engine.cache.session(0)), Session(engine.cache.session("raw"))
        seen = torch.stack(raw.see(engine.transforms.stitch(golden.views(call))))
        report.compare("images", seen, golden.tensor(f"{index:02}.images"))
        run_call(engine, golden, session, index, report)
    return report


@torch.inference_mode()
def check_dit(golden: Golden) -> Report:
    """Every forward of a `dit` file: the positive branch alone, past the window's end."""
    engine, report = build_engine(golden), Report()
    dit, cache, config = engine.model.dit, engine.cache, engine.checkpoint.config
    kv = cache.session(0)
    context, clip = (golden.tensor(name)[None] for name in ("context", "clip_feature"))
    cross = CrossContext(dit.text_kv(context), dit.image_kv(clip))
    rope = Rope(config.dit.head_dim, config.latent_height // 2, config.latent_width // 2, 2, 24, 1)
    for index, call in enumerate(golden.calls):
        prefix = f"{index:02}."
        latents, y = golden.tensor(prefix + "latents")[None], golden.tensor(prefix + "y")[None]
        times, register = torch.tensor([call["timestep"]]), None
        if call["timestep_action"] is not None:
            times = torch.tensor([call["timestep"], call["timestep_action"]])
            action, state = golden.tensor(prefix + "action")[None], golden.tensor(prefix + "state")[None, None]
            register = Register(action, times[1:], state)
        frames, time = latents.shape[2], dit.embed_time(times)
        rotation = rope.rotation(call["start_frame"], frames, register is not None, latents.device)
        registers = config.dit.register_tokens if register else 0
        with cache.call(kv), cache.lease(kv, 0, frames, registers, commit=call["commit"]) as plan:
            hidden = dit(dit.embed_tokens(latents, y, register), time, rotation, cross, cache.paged, plan)
        report.compare("video_pred", dit.video_velocity(hidden, time, latents)[0], golden.tensor(prefix + "video_pred"))
        if register:
            report.compare("action_pred", dit.action_velocity(hidden)[0], golden.tensor(prefix + "action_pred"))
        report.compare("cached_frames", torch.tensor(kv.resident_frames), torch.tensor(call["cached_frames_after"]))
        report.forwards += 1
        report.forwards_expected += 1
    return report


def check(path: Path) -> Report:
    """The report of one golden file of either kind."""
    golden = Golden(path)
    return check_dit(golden) if golden.kind == "dit" else check_rollout(golden)


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=FILES, help="default: all that the project has")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="largest absolute error (default 1e-4)")
    args = parser.parse_args()
    clean = True
    for path in args.files:
        report = check(path)
        ok = report.clean(args.tolerance)
        clean &= ok
        print(f"{path.stem}: {'ok' if ok else 'BEYOND TOLERANCE'}")
        for name, error in report.errors.items():
            print(f"    {name:16} largest error {error:.1e}")
        print(f"    DiT forwards     {report.forwards} counted, {report.forwards_expected} expected", flush=True)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
