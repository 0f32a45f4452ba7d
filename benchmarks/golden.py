"""Golden files: what the public release computed, at small size, beside what the engine makes of the same inputs.

A file is complete: sizes, inputs and outputs are inside, and the weights follow from the names.
"""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from engine.checkpoint.open import Checkpoint, synthetic_checkpoint
from engine.checkpoint.synthetic import BUILTIN_STATISTICS
from engine.model.dit import CrossContext, ForwardContext, Register
from engine.model.rope import Rope
from engine.model.step_cache import StepCacheSettings
from engine.model.weights import Model, load_model
from engine.robot.embodiment_file import read_embodiment
from engine.robot.transforms import Transforms
from engine.rollout import Noise, Prediction, Rollout, RolloutSettings
from engine.session import Session
from engine.startup import build_cache
from kv_cache.attention import choose_backend
from kv_cache.cache import KVCache
from kv_cache.sizing import CPU_DEFAULT_BYTES

TOLERANCE = 1e-4
FILES = sorted((Path(__file__).parents[1] / "tests" / "golden_files").glob("*.safetensors"))
CAMERAS = ("exterior_left", "exterior_right", "wrist")


@dataclass
class Report:
    """Largest absolute error by output, DiT forwards counted and expected, of one file.

    psnr: of the call whose video latents are furthest off, in dB; the peak is the range of the release's.
    joints, gripper: largest errors of the actions, apart; joints in radians.
    """

    errors: dict[str, float] = field(default_factory=dict)
    forwards: int = 0
    forwards_expected: int = 0
    psnr: float = math.inf
    joints: float = 0.0
    gripper: float = 0.0

    def compare(self, name: str, got: Tensor | np.ndarray, expected: Tensor) -> None:
        """Keep the largest error of an output over all calls; another shape counts as infinite."""
        self.errors[name] = max(self.errors.get(name, 0.0), _largest_error(torch.as_tensor(got).cpu(), expected))

    def measure(self, latents: Tensor, expected_latents: Tensor, action: np.ndarray, expected_action: Tensor) -> None:
        """Keep the deviation of a call: video latents (C, F, H, W), and actions (24, 8), 7 joints and the gripper."""
        if latents.shape != expected_latents.shape:
            self.psnr = -math.inf
            return
        noise = float((latents.cpu().double() - expected_latents.double()).square().mean())
        peak = float(expected_latents.max() - expected_latents.min())
        psnr = 10 * math.log10(peak**2 / noise) if noise else math.inf
        self.psnr = min(self.psnr, psnr if psnr == psnr else -math.inf)
        joints, gripper = torch.as_tensor(action).split([7, 1], dim=-1)
        self.joints = max(self.joints, _largest_error(joints, expected_action[:, :7]))
        self.gripper = max(self.gripper, _largest_error(gripper, expected_action[:, 7:]))

    def clean(self, tolerance: float) -> bool:
        """Whether every output is within tolerance and the forwards are as many as the release's."""
        return self.forwards == self.forwards_expected and all(e <= tolerance for e in self.errors.values())

    @property
    def finite(self) -> bool:
        """Whether the deviation is a number at all."""
        return all(map(math.isfinite, (self.psnr, self.joints, self.gripper)))


def _largest_error(got: Tensor, expected: Tensor) -> float:
    """Infinite where a value is NaN or the shape is another."""
    if got.shape != expected.shape:
        return math.inf
    error = float((got.double() - expected.double()).abs().max())
    return error if error == error else math.inf


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


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How the engine computes. The golden numbers ask for float32; what else there is must not change them."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    execution: str = "eager"
    guidance: str = "batched"

    @property
    def is_exact(self) -> bool:
        """Whether the golden numbers are to be met, and not only come near to."""
        return self.dtype == torch.float32 and not self.fp8


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
        cache = build_cache(self.checkpoint.config, kv_bytes, self.rollout.device, self.rollout.dtype)
        return replace(self, cache=cache, rollout=Rollout(self.model, cache, self.checkpoint.tokenizer, self.settings))


def build_engine(golden: Golden, mode: Mode = Mode()) -> Engine:
    """The engine that a golden file needs, on the CPU in float32 unless `mode` says otherwise."""
    checkpoint, device = golden.checkpoint(), torch.device(mode.device)
    config, captured = checkpoint.config, mode.execution == "graph"
    model = load_model(config, checkpoint.weights, device, mode.dtype, mode.fp8)
    backend = choose_backend(device, mode.dtype, device_side=captured)
    cache = build_cache(config, CPU_DEFAULT_BYTES, device, mode.dtype, backend)
    settings = replace(golden.settings(), execution=mode.execution, guidance=mode.guidance)
    return Engine(
        checkpoint=checkpoint,
        model=model,
        settings=settings,
        transforms=Transforms(read_embodiment("oxe_droid"), config, golden.statistics),
        cache=cache,
        rollout=Rollout(model, cache, checkpoint.tokenizer, settings),
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
    video_latents, expected_action = golden.tensor(prefix + "video_latents"), golden.tensor(prefix + "action")
    report.compare("video_latents", prediction.video_latents, video_latents)
    report.compare("action_latents", prediction.action_latents, golden.tensor(prefix + "action_latents"))
    action = engine.transforms.actions(prediction.action_latents, observed)
    report.compare("action", action, expected_action)
    report.measure(prediction.video_latents, video_latents, action, expected_action)
    report.compare(
        "start_frame",
        torch.tensor(session.kv.resident_frames + engine.rollout.config.dit.num_frame_per_block),
        torch.tensor(call["start_frame_after"]),
    )
    report.forwards += prediction.dit_forwards
    report.forwards_expected += call["dit_forwards"]
    return prediction


def check_rollout(golden: Golden, engine: Engine) -> Report:
    """Every call of a `rollout` file."""
    report = Report()
    session = raw = Session(engine.cache.session(0))
    for index, call in enumerate(golden.calls):
        if index == 0 or call["new_session"]:
            engine.cache.forget(0)
            session, raw = Session(engine.cache.session(0)), Session(engine.cache.session("raw"))
        seen = torch.stack(raw.push_frames(engine.transforms.stitch(golden.views(call))))
        report.compare("images", seen, golden.tensor(f"{index:02}.images"))
        run_call(engine, golden, session, index, report)
    return report


@torch.inference_mode()
def check_dit(golden: Golden, engine: Engine) -> Report:
    """Every forward of a `dit` file, past the window's end: one branch in the file, the same in both here."""
    report = Report()
    dit, cache, config = engine.model.dit, engine.cache, engine.checkpoint.config
    kv, device = cache.session(0), engine.rollout.device

    def given(name: str) -> Tensor:
        return golden.tensor(name)[None].to(device)

    context, clip = given("context"), given("clip_feature")
    cross = CrossContext((dit.text_kv(context),) * 2, dit.image_kv(clip))
    rope = Rope(config.dit.head_dim, config.latent_height // 2, config.latent_width // 2, 2, 24, 1)
    for index, call in enumerate(golden.calls):
        prefix = f"{index:02}."
        latents, y = given(prefix + "latents"), given(prefix + "y")
        times, register = torch.tensor([call["timestep"]], device=device), None
        if call["timestep_action"] is not None:
            times = torch.tensor([call["timestep"], call["timestep_action"]], device=device)
            action, state = given(prefix + "action"), given(prefix + "state")[None]
            register = Register(action, dit.embed_action_time(times[1:])[0], state)
        frames, time = latents.shape[2], dit.embed_time(times)
        rotation = rope.rotation(call["start_frame"], frames, register is not None, device)
        with cache.call(kv), cache.lease(kv, frames, commit=call["commit"]) as plan:
            forward = ForwardContext(rotation, plan, cross)
            hidden = dit(dit.embed_tokens(latents, y, register), time, forward, cache.paged)
        report.compare("video_pred", dit.video_velocity(hidden, time, latents)[0], golden.tensor(prefix + "video_pred"))
        if register:
            report.compare("action_pred", dit.action_velocity(hidden)[0], golden.tensor(prefix + "action_pred"))
        report.compare("cached_frames", torch.tensor(kv.resident_frames), torch.tensor(call["cached_frames_after"]))
        report.forwards += 1
        report.forwards_expected += 1
    return report


def check(path: Path, mode: Mode = Mode()) -> Report:
    """The report of one golden file of either kind."""
    golden = Golden(path)
    engine = build_engine(golden, mode)
    return check_dit(golden, engine) if golden.kind == "dit" else check_rollout(golden, engine)
