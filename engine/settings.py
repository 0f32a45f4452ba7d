"""What the engine is told from outside: one typed object, filled by the server's command line or by a test."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Everything that decides how a policy is loaded and run. Defaults do what the public release does unless told
    otherwise (spec section 4).

    checkpoint: "tiny", "mid", "droid-2l" or "wan22-tiny" (built in, synthetic weights), a directory in the release's
    layout, or the hub id of one.
    base_checkpoint: directory or hub id of what a LoRA fine-tune is based on, unless it holds those weights itself.
    revision: branch, tag or commit of the checkpoint on the hub. tokenizer: directory or hub id of the tokenizer, where
    it is not the release's, google/umt5-xxl.
    embodiment: the kind of robot: "oxe_droid", or a YAML file that describes another one (docs/embodiments.md).
    device: a torch device, or "auto" for CUDA where there is one and the CPU elsewhere.
    preset: quality against speed: "release" computes 8 of 16 steps, as the release does (--steps 16 --step-cache
    mask-8), "quality" all of them (--steps 16 --step-cache none), "fast" 5 (--steps 16 --step-cache mask-5), with --fp8
    where the card has it. A setting given singly takes the preset's place.
    steps: denoising steps of a call (default: the preset's). guidance_scale: weight of the conditional video velocity.
    sigma_shift: shift of the noise schedule.
    seed: of the noise. seed_per: "call" for the same noise at every call, as the release does, or "session" for noise
    of its own at every call of every session, which a session of the same id gets again.
    step_cache: which steps the model computes: all ("none"), 5 to 8 of 16 ("mask-5" to "mask-8"), or as the velocity
    turns ("velocity") (default: the preset's, or "none" where steps are given that its mask is not made for).
    velocity_thresholds: cosine similarities above which "velocity" skips steps, falling.
    velocity_countdowns: how many steps it skips above each.
    dtype: "float32", "bfloat16", or "auto" for bfloat16 on CUDA and float32 elsewhere.
    fp8: multiply in 8-bit floating point in the transformer's blocks: half their weights' memory; on CUDA from
    capability 8.9 (Ada, Hopper) on (default: the preset's).
    text_encoder_device: "auto" for where the rest of the model is, or "cpu" to keep the text encoder off the GPU: 9 GB
    less there, and a longer wait for each new prompt.
    execution: how the transformer runs: "eager", "compile" (torch.compile), "graph" (compiled and replayed as CUDA
    graphs), or "auto" for graph on CUDA and eager elsewhere. guidance: both guidance branches "batched" in one
    forward, or "separate" in two. vae_channels_last: convolve with channels innermost, which is faster on CPUs and GPUs
    alike.
    warm_up: calls made at start-up so that the first robot waits for nothing: "required" where their failure ends the
    start, "optional" where it is logged, "off" for none.
    attention_backend: "flash-attn-3", "flash-attn-4", "triton", "sdpa", or "auto" for the best that can run
    here.
    save_video: directory for each finished episode's predicted video and actions.
    kv_fraction: part of the device's free memory, after the weights, that the KV pool takes on CUDA.
    kv_bytes: absolute size of the KV pool in bytes; overrides kv_fraction. On a CPU the default is 512 MiB.
    """

    checkpoint: str = "tiny"
    base_checkpoint: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    embodiment: str = "oxe_droid"
    device: str = "auto"
    preset: str = "release"
    steps: int | None = None
    guidance_scale: float = 5.0
    sigma_shift: float = 5.0
    seed: int = 1140
    seed_per: str = "call"
    step_cache: str | None = None
    velocity_thresholds: str = "0.95,0.93"
    velocity_countdowns: str = "4,2"
    dtype: str = "auto"
    fp8: bool | None = None
    text_encoder_device: str = "auto"
    execution: str = "auto"
    guidance: str = "batched"
    vae_channels_last: bool = True
    warm_up: str = "required"
    attention_backend: str = "auto"
    save_video: str | None = None
    kv_fraction: float = 0.8
    kv_bytes: int | None = None
