"""From settings to a policy that is ready to serve: checkpoint, weights, KV cache."""

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from engine.checkpoint.error import CheckpointError
from engine.checkpoint.open import open_checkpoint
from engine.device import choose_device, require_small_for_cpu
from engine.device_faults import DeviceUnavailable, is_lost, is_out_of_memory
from engine.files.one_line import one_line
from engine.graphs import graph_copies_bytes
from engine.model.config import ModelConfig
from engine.model.fp8 import has_fp8, require_fp8
from engine.model.step_cache import step_cache_settings
from engine.model.weights import load_model, weight_bytes
from engine.policy import Policy
from engine.presets import Preset, resolve
from engine.robot.embodiment import EmbodimentError
from engine.robot.embodiment_file import read_embodiment
from engine.robot.normalization import StatisticsError
from engine.robot.transforms import Transforms
from engine.rollout import Rollout, RolloutSettings
from engine.settings import EngineSettings
from engine.warmup import activation_bytes, warm_up
from kv_cache.attention import DEVICE_SIDE, available_backends, choose_backend
from kv_cache.cache import KVCache
from kv_cache.paged_kv import KVGeometry
from kv_cache.self_check import BackendError, check_backend
from kv_cache.sizing import NotEnoughMemory, kv_bytes_available, one_session_bytes, plan_budget
from kv_cache.window import WindowPolicy

logger = logging.getLogger(__name__)


class PolicyLoadError(ValueError):
    """The policy cannot be loaded as asked: one line that says why."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


class _SettingError(ValueError):
    """A setting that is out of range or cannot be met on this machine."""


def load_policy(settings: EngineSettings, report: Callable[[str], None]) -> Policy:
    """Load the checkpoint, size the KV cache, warm up; `report` is told what is being done.

    Raises PolicyLoadError where a setting or the checkpoint does not allow it, or a first call fails, DeviceUnavailable
    where the device has too little memory free or is not there, and whatever a device that is lost raises.
    """
    try:
        return _load_policy(settings, report)
    except (
        _SettingError,
        BackendError,
        CheckpointError,
        EmbodimentError,
        StatisticsError,
        NotEnoughMemory,
    ) as error:
        raise PolicyLoadError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise _too_little_memory(error) from error


def _load_policy(settings: EngineSettings, report: Callable[[str], None]) -> Policy:
    device = choose_device(settings.device)
    dtype = _dtype(settings.dtype, device)
    preset = resolve(settings, has_fp8(device, dtype))
    rollout_settings = _rollout_settings(settings, preset)
    text_encoder_device = device if settings.text_encoder_device == "auto" else torch.device("cpu")
    if preset.fp8:
        _require_fp8(device, dtype)
    logger.info("preset %s", preset)
    embodiment = read_embodiment(settings.embodiment)
    report("reading the checkpoint")
    checkpoint = open_checkpoint(settings.checkpoint, settings.base_checkpoint, settings.revision, settings.tokenizer)
    if settings.device == "auto" and device.type == "cpu":
        require_small_for_cpu(checkpoint.config, dtype)
    if (relative := checkpoint.training.relative_keys) is not None:
        embodiment = embodiment.with_relative_actions(relative)
    transforms = Transforms(embodiment, checkpoint.config, checkpoint.statistics)
    execution = _execution(settings, device, dtype)
    backends = _backends(settings, device, dtype, captured=execution == "graph")
    geometry = kv_geometry(checkpoint.config, dtype)
    least = one_session_bytes(geometry, _window(checkpoint.config))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # libraries and graphs work on the thread's current one
        sizes = weight_bytes(checkpoint.config, dtype, preset.fp8, text_encoder_device != device)
        with _of_the_device():
            require_memory(torch.cuda.mem_get_info(device)[0], sizes.device, least)
    report("loading weights")
    model = load_model(
        checkpoint.config, checkpoint.weights, device, dtype, preset.fp8, text_encoder_device,
        settings.vae_channels_last,
    )  # fmt: skip
    if unused := checkpoint.entries - model.entry_shapes().keys():
        logger.info("%d of %d checkpoint entries are not used", len(unused), len(checkpoint.entries))

    def check(backend: str) -> None:
        report(f"checking attention by {backend}")
        check_backend(geometry, _window(checkpoint.config), device, backend)

    backend, reason = _first_that_passes(backends, check)
    if reason is not None and execution == "graph" and backend not in DEVICE_SIDE:
        execution = "compile"
        rollout_settings = replace(rollout_settings, execution_reason=reason)
    rollout_settings = replace(rollout_settings, execution=execution)

    def serve_from(kv_bytes: int, rollout_settings: RolloutSettings) -> tuple[Rollout, KVCache]:
        cache = build_cache(checkpoint.config, kv_bytes, device, dtype, backend)
        return Rollout(model, cache, checkpoint.tokenizer, rollout_settings), cache

    report("sizing the KV cache")
    reserved = 0
    if device.type == "cuda" and settings.kv_bytes is None:
        rollout, cache = serve_from(least, replace(rollout_settings, execution="eager"))
        reserved = activation_bytes(rollout, cache.session("profile run"), settings.save_video is not None)
        del rollout, cache
        torch.cuda.empty_cache()  # what the profile run held counts as used until then
        if execution == "graph":
            reserved += reserved + graph_copies_bytes(geometry)  # graphs keep what their work needs for themselves
    available = kv_bytes_available(device, settings.kv_fraction, settings.kv_bytes, reserved)
    is_measured = device.type == "cuda" and settings.kv_bytes is None
    with _of_the_device() if is_measured else nullcontext():
        policy = Policy(checkpoint, *serve_from(available, rollout_settings), transforms, preset)
    if settings.warm_up != "off":
        _warm_up(policy, settings, report)
    return policy


def _too_little_memory(error: Exception) -> DeviceUnavailable:
    return DeviceUnavailable(f"the device has too little memory: {str(error).splitlines()[0]}")


@contextmanager
def _of_the_device() -> Iterator[None]:
    """What is too little memory inside is so as long as others use the device, not because of a setting."""
    try:
        yield
    except NotEnoughMemory as error:
        raise DeviceUnavailable(str(error)) from error


def _first_that_passes(backends: list[str], check: Callable[[str], None]) -> tuple[str, str | None]:
    """The first backend that does what plain attention does, and what is wrong with the one before it, if any.

    Raises what the check of the last one raises; that of any where the device has no memory left or is lost.
    """
    reason = None
    for backend in backends:
        if backend == "sdpa":
            break  # it is what the others are compared with
        try:
            check(backend)
            break
        except Exception as error:
            if backend == backends[-1] or is_out_of_memory(error) or is_lost(error):
                raise
            reason = f"attention by {backend} cannot be used: {type(error).__name__}: {_first_line(error)}"
            logger.error("%s; trying the next", reason)
    return backend, reason


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no reason given"])[0]


def _warm_up(policy: Policy, settings: EngineSettings, report: Callable[[str], None]) -> None:
    """Raises PolicyLoadError where a call fails and none may; DeviceUnavailable where it is for want of memory."""
    try:
        warm_up(policy, report, settings.save_video is not None)
    except Exception as error:
        if is_lost(error):
            raise
        if is_out_of_memory(error) and settings.warm_up == "required":
            raise _too_little_memory(error) from error
        reason = f"{type(error).__name__}: {_first_line(error)}"
        if settings.warm_up == "required":
            raise PolicyLoadError(
                f"the warm-up failed ({reason}); --execution eager runs without compilation and capture, "
                "--warm-up optional starts all the same"
            ) from error
        logger.warning("the warm-up failed (%s), so first calls may be slow or fail", reason, exc_info=error)


def _execution(settings: EngineSettings, device: torch.device, dtype: torch.dtype) -> str:
    name = settings.execution
    if name == "graph" and device.type != "cuda":
        raise _SettingError(f"execution graph needs a CUDA device, not {device}; try compile")
    if name != "auto":
        return name
    if device.type != "cuda":
        return "eager"
    if importlib.util.find_spec("triton") is None:
        return "eager"  # what compiles for CUDA needs it
    capturable = available_backends(device, dtype, device_side=True)
    # In float32 those that there are, are much slower than what reads lengths on the host.
    is_capturable = dtype != torch.float32 and settings.attention_backend in ("auto", *capturable)
    return "graph" if capturable and is_capturable else "compile"


def _rollout_settings(settings: EngineSettings, preset: Preset) -> RolloutSettings:
    step_cache = step_cache_settings(preset.step_cache, settings.velocity_thresholds, settings.velocity_countdowns)
    return RolloutSettings(
        steps=preset.steps,
        guidance_scale=settings.guidance_scale,
        sigma_shift=settings.sigma_shift,
        seed=settings.seed,
        seed_per_session=settings.seed_per == "session",
        step_cache=step_cache,
        guidance=settings.guidance,
    )


def kv_geometry(config: ModelConfig, dtype: torch.dtype) -> KVGeometry:
    """What a model's K/V look like."""
    return KVGeometry(
        layers=config.dit.num_layers,
        heads=config.dit.num_heads,
        head_dim=config.dit.head_dim,
        frame_tokens=config.dit.frame_seqlen,
        frames_per_forward=config.dit.num_frame_per_block,
        register_tokens=config.dit.register_tokens,
        text_tokens=config.dit.text_len,
        image_tokens=config.image.tokens,
        dtype=dtype,
        conditioning_bytes=_conditioning_numbers(config) * dtype.itemsize,
    )


def _conditioning_numbers(config: ModelConfig) -> int:
    """Of (1, 4 + z, F, H, W): a mask and the latents of a window's first frame before grey ones."""
    return (4 + config.vae.z_dim) * config.conditioning_frames * config.latent_height * config.latent_width


def build_cache(
    config: ModelConfig, available: int, device: torch.device, dtype: torch.dtype, backend: str = "sdpa"
) -> KVCache:
    """A KV cache for a model, within `available` bytes. Raises NotEnoughMemory where not one session fits."""
    geometry, policy = kv_geometry(config, dtype), _window(config)
    budget = plan_budget(geometry, policy, available)
    logger.info(
        "KV cache: %d blocks of %.1f MiB, %.1f MiB with cross-attention, room for %d sessions, attention by %s",
        budget.blocks,
        geometry.block_bytes / 2**20,
        (budget.blocks * geometry.block_bytes + budget.cross_bytes) / 2**20,
        budget.sessions,
        backend,
    )
    return KVCache(geometry, policy, budget, device, backend)


def _window(config: ModelConfig) -> WindowPolicy:
    return WindowPolicy(config.dit.window_frames)


def require_memory(free: int, weights: int, session: int) -> None:
    """Raises NotEnoughMemory where `free` bytes of a device do not hold the weights and one session's K/V."""
    if weights + session > free:
        gib = 2**30
        raise NotEnoughMemory(
            f"the device has {free / gib:.1f} GiB free; the weights need {weights / gib:.1f} GiB and the K/V of one "
            f"session {session / gib:.1f} GiB"
        )


def _backends(settings: EngineSettings, device: torch.device, dtype: torch.dtype, captured: bool) -> list[str]:
    """The attention backends to try, in order: the one asked for, or all there are, the best first."""
    try:
        chosen = choose_backend(device, dtype, settings.attention_backend, device_side=captured)
    except ValueError as error:
        raise _SettingError(str(error)) from error
    if settings.attention_backend != "auto":
        return [chosen]
    # Without a graph, where that was not asked for, there is always one more.
    last = ["sdpa"] if captured and settings.execution == "auto" else []
    return available_backends(device, dtype, device_side=captured) + last


def _require_fp8(device: torch.device, dtype: torch.dtype) -> None:
    try:
        require_fp8(device, dtype)
    except ValueError as error:
        raise _SettingError(str(error)) from error


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32
