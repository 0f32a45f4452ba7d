"""What the engine is told from outside: one typed object, filled by the server's command line or by a test."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Everything that decides how a policy is loaded and run. Defaults are the public release's (spec section 4).

    checkpoint: "tiny" or "mid" (built in, synthetic weights) or a directory in the release's layout.
    device: a torch device, or "auto" for CUDA where there is one and the CPU elsewhere.
    steps: denoising steps of a call. guidance_scale: weight of the conditional video velocity.
    sigma_shift: shift of the noise schedule. seed: of the noise, the same at every call as the release does.
    step_cache: "none", "mask-5" to "mask-8", or "velocity".
    kv_fraction: part of the device's free memory, after the weights, that the KV pool takes on CUDA.
    kv_bytes: absolute size of the KV pool in bytes; overrides kv_fraction. On a CPU the default is 512 MiB.
    """

    checkpoint: str = "tiny"
    device: str = "auto"
    steps: int = 16
    guidance_scale: float = 5.0
    sigma_shift: float = 5.0
    seed: int = 1140
    step_cache: str = "none"
    kv_fraction: float = 0.8
    kv_bytes: int | None = None
