"""Quality against speed: each preset by name, as the settings it stands for."""

from dataclasses import asdict, dataclass, replace

from engine.settings import EngineSettings


@dataclass(frozen=True)
class Preset:
    """steps, step_cache, fp8: as in EngineSettings. given: which of them were given singly, in the preset's place."""

    name: str
    steps: int
    step_cache: str
    fp8: bool = False
    given: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As it stands on the command line, spelled out."""
        flags = f"--steps {self.steps} --step-cache {self.step_cache} --{'fp8' if self.fp8 else 'no-fp8'}"
        given = f" ({', '.join(self.given).replace('_', '-')} given)" if self.given else ""
        return f"{self.name}: {flags}{given}"

    def info(self) -> dict[str, object]:
        """Ready for JSON."""
        return {**asdict(self), "given": list(self.given)}


PRESETS = {
    preset.name: preset
    for preset in (Preset("release", 16, "mask-8"), Preset("quality", 16, "none"), Preset("fast", 16, "mask-5", True))
}
"""By name; fp8 here means where the device gains by it."""


def resolve(settings: EngineSettings, has_fp8: bool) -> Preset:
    """What the settings' preset stands for on a device, with what they give singly in its place.

    A mask is made for its preset's number of steps: with another number, all are computed unless `step_cache` is given.
    has_fp8: whether the device gains by float8.
    """
    preset = PRESETS[settings.preset]
    own = {"steps": settings.steps, "step_cache": settings.step_cache, "fp8": settings.fp8}
    given = {name: value for name, value in own.items() if value is not None}
    fits = given.get("steps", preset.steps) == preset.steps
    offered = replace(
        preset, step_cache=preset.step_cache if fits else "none", fp8=preset.fp8 and has_fp8, given=tuple(given)
    )
    return replace(offered, **given)  # type: ignore[arg-type]
