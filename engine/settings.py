"""What the engine is told from outside: one typed object, checked as it is made, before torch is imported.

How a field's text is read, its range and its help stand with the field; the command line is made from them.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ByteSize, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from engine.files.expectation import expectation

STEPS_OF_MASKS = 16
"""The release's step masks are made for so many denoising steps."""

if TYPE_CHECKING:
    Bytes = int
else:
    Bytes = ByteSize  # reads "8GiB"

PresetName = Literal["release", "quality", "fast"]
StepCacheName = Literal["none", "mask-5", "mask-6", "mask-7", "mask-8", "velocity"]


def setting(default: Any, description: str, metavar: str | None = None, **constraints: Any) -> Any:
    """A field. description: its help. metavar: what stands for its value there. constraints: as pydantic has them."""
    return Field(default, description=description, json_schema_extra={"metavar": metavar}, **constraints)


def explain(error: ValidationError, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """What is wrong with settings, in one line: the first of them at fault, what is expected there, what was found.

    names: of fields that are to be called something else than their flag.
    """
    first = error.errors()[0]
    if first["type"] == "value_error":
        flag, colon, rest = str(first["ctx"]["error"]).partition(":")
        return names.get(flag.replace("-", "_"), flag) + colon + rest
    field = str(first["loc"][0])
    expected = "auto, cpu, cuda or cuda:N" if field == "device" else expectation(first)
    return f"{names.get(field, field.replace('_', '-'))}: expected {expected}, found {first['input']!r}"


def _between_commas(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Everything that decides how a policy is loaded and run.

    Defaults do what the public release does unless told otherwise (model.md section 4). Raises ValidationError,
    a ValueError that `explain` puts into one line.
    """

    checkpoint: str = setting(
        "tiny",
        "a directory in the release's layout, the hub id of one, or a built-in one with synthetic weights: tiny, mid, "
        "droid-2l, wan22-tiny",
    )
    base_checkpoint: str | None = setting(
        None, "directory or hub id of what a LoRA fine-tune is based on, unless it holds those weights itself"
    )
    revision: str | None = setting(None, "branch, tag or commit of the checkpoint on the hub")
    tokenizer: str | None = setting(
        None, "directory or hub id of the tokenizer, where it is not the release's, google/umt5-xxl"
    )
    embodiment: str = setting(
        "oxe_droid", "the kind of robot: oxe_droid, or a YAML file that describes another one (docs/embodiments.md)"
    )
    device: str = setting(
        "auto",
        "auto for CUDA where there is one and the CPU elsewhere, cpu, cuda, or cuda:N",
        pattern=r"^(auto|cpu|cuda|cuda:[0-9]{1,3})$",
    )
    preset: PresetName = setting(
        "release",
        "quality against speed: release computes 8 of 16 steps, as the release does (--steps 16 --step-cache mask-8), "
        "quality all of them (--steps 16 --step-cache none), fast 5 (--steps 16 --step-cache mask-5), with --fp8 where "
        "the card has it. A setting given singly takes the preset's place",
    )
    steps: int | None = setting(None, "denoising steps of a call (default: the preset's)", ge=1, le=1000)
    guidance_scale: float = setting(5.0, "weight of the conditional video velocity", ge=0, le=100)
    sigma_shift: float = setting(5.0, "shift of the noise schedule", ge=0.01, le=100)
    seed: int = setting(1140, "seed of the noise", ge=0, le=2**63 - 1)
    seed_per: Literal["call", "session"] = setting(
        "call",
        "call for the same noise at every call, as the release does, or session for noise of its own at every call of "
        "every session, which a session of the same id gets again",
    )
    step_cache: StepCacheName | None = setting(
        None,
        "which steps the model computes: all (none), 5 to 8 of 16 (mask-5 to mask-8), or as the velocity turns "
        "(velocity) (default: the preset's, or none where steps are given that its mask is not made for)",
    )
    velocity_thresholds: Annotated[tuple[float, ...], BeforeValidator(_between_commas)] = setting(
        (0.95, 0.93), "cosine similarities above which velocity skips steps, falling", metavar="X,X"
    )
    velocity_countdowns: Annotated[tuple[int, ...], BeforeValidator(_between_commas)] = setting(
        (4, 2), "how many steps velocity skips above each threshold", metavar="N,N"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", "auto for bfloat16 on CUDA and float32 elsewhere")
    fp8: bool | None = setting(
        None,
        "multiply in 8-bit floating point in the transformer's blocks: half their weights' memory; on CUDA from "
        "capability 8.9 (Ada, Hopper) on (default: the preset's)",
    )
    text_encoder_device: Literal["auto", "cpu"] = setting(
        "auto",
        "auto for where the rest of the model is, or cpu to keep the text encoder off the GPU: 9 GB less there, and a "
        "longer wait for each new prompt",
    )
    execution: Literal["auto", "eager", "compile", "graph"] = setting(
        "auto",
        "how the transformer runs: eager, compile (torch.compile), graph (compiled and replayed as CUDA graphs), or "
        "auto for graph on CUDA and eager elsewhere",
    )
    guidance: Literal["batched", "separate"] = setting(
        "batched", "both guidance branches batched in one forward, or separate in two"
    )
    vae_channels_last: bool = setting(True, "convolve with channels innermost, which is faster on CPUs and GPUs alike")
    warm_up: Literal["required", "optional", "off"] = setting(
        "required",
        "calls made at start-up so that the first robot waits for nothing: required where their failure ends the "
        "start, optional where it is logged, off for none",
    )
    attention_backend: Literal["auto", "flash-attn-3", "flash-attn-4", "triton", "sdpa"] = setting(
        "auto", "auto for the best that can run here, or one by its name"
    )
    save_video: Path | None = setting(
        None, "directory for each finished episode's predicted video and actions", metavar="DIR"
    )
    kv_fraction: float = setting(
        0.8, "part of the device's free memory, after the weights, that the KV pool takes on CUDA", gt=0, le=1
    )
    kv_bytes: Bytes | None = setting(
        None,
        "absolute size of the KV pool, in bytes or such as 8GiB; overrides kv-fraction. On a CPU the default is 512MiB",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        thresholds, countdowns = self.velocity_thresholds, self.velocity_countdowns
        if not thresholds or not all(high > low for high, low in pairwise((1.0, *thresholds, -1.0))):
            raise ValueError(
                f"velocity-thresholds: expected falling numbers between 1 and -1 such as 0.95,0.93, found {thresholds}"
            )
        if len(countdowns) != len(thresholds) or min(countdowns) < 1:
            raise ValueError(
                f"velocity-countdowns: expected {len(thresholds)} whole numbers of at least 1, one for each "
                f"threshold, found {countdowns}"
            )
        is_mask = self.step_cache is not None and self.step_cache.startswith("mask-")
        if is_mask and self.steps not in (None, STEPS_OF_MASKS):
            raise ValueError(f"step-cache: {self.step_cache} is made for {STEPS_OF_MASKS} steps, not for {self.steps}")
        return self
