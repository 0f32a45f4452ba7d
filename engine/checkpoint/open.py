"""From what a checkpoint is called to all that is known of it before its weights are read."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, ByT5Tokenizer

from engine.checkpoint.error import CheckpointError
from engine.checkpoint.files import CONFIG_FILE, STATISTICS_FILE, read_entries, read_json
from engine.checkpoint.hub import CHECKPOINT_FILES, TOKENIZER_FILES, locate
from engine.checkpoint.lora import split_adapters
from engine.checkpoint.synthetic import BUILTIN_CONFIGS, BUILTIN_STATISTICS, SyntheticWeights
from engine.checkpoint.training import TrainingConfig, read_training
from engine.checkpoint.weights import StoredWeights
from engine.files.regular_file import open_regular
from engine.model.config import ConfigError, ModelConfig, parse_config
from engine.model.text import Tokenizer
from engine.model.weights import Weights

RELEASE_TOKENIZER = "google/umt5-xxl"


@dataclass(frozen=True)
class Checkpoint:
    """All that is read before the weights.

    statistics: `experiment_cfg/metadata.json`, by embodiment. training: `experiment_cfg/conf.yaml`.
    weights: to be streamed; raises CheckpointError. entries: names of the weights on disk; none are listed for
    synthetic ones, which are made when asked for. trained: False for synthetic weights.
    """

    name: str
    config: ModelConfig
    statistics: Mapping[str, Any]
    training: TrainingConfig
    tokenizer: Tokenizer
    weights: Weights
    entries: frozenset[str]
    trained: bool


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint's directory: `config.json` as it is and as sizes, and what lies beside it."""

    raw_config: Mapping[str, Any]
    config: ModelConfig
    statistics: Mapping[str, Any]
    training: TrainingConfig
    weights: StoredWeights


def open_checkpoint(
    name: str, base: str | None = None, revision: str | None = None, tokenizer: str | None = None
) -> Checkpoint:
    """A built-in checkpoint by its name, a directory in the release's layout, or the hub id of one.

    base: directory or hub id of the checkpoint that `name` is a LoRA fine-tune of; not needed where the fine-tune holds
    the base weights too. revision: branch, tag or commit of `name` on the hub. tokenizer: directory or hub id; without
    it, a config with `"tokenizer": "byt5"` uses a byte tokenizer, which needs no file, others the release's.
    Raises CheckpointError.
    """
    if name in BUILTIN_CONFIGS:
        if base or revision or tokenizer:
            raise CheckpointError(f"checkpoint {name!r} is built in: it takes no base, revision or tokenizer")
        return synthetic_checkpoint(name, BUILTIN_CONFIGS[name], BUILTIN_STATISTICS)
    files = read_files(name, base, revision)
    return Checkpoint(
        name=name,
        config=files.config,
        statistics=files.statistics,
        training=files.training,
        tokenizer=_tokenizer(files.raw_config, files.config, tokenizer),
        weights=files.weights,
        entries=frozenset(files.weights.entries),
        trained=not files.raw_config.get("synthetic_weights", False),
    )


def synthetic_checkpoint(name: str, raw: Mapping[str, Any], statistics: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint with synthetic weights made in memory, of the sizes in `raw` (a `config.json`, parsed)."""
    config = parse_config(raw)
    return Checkpoint(
        name=name,
        config=config,
        statistics=statistics,
        training=TrainingConfig(view_height=config.view_height, view_width=config.view_width),
        tokenizer=_tokenizer(raw, config, None),
        weights=SyntheticWeights(),
        entries=frozenset(),
        trained=False,
    )


def read_files(name: str, base: str | None = None, revision: str | None = None) -> CheckpointFiles:
    """What the files of a directory or hub id say, the weights' headers included. Raises CheckpointError."""
    if not os.path.isdir(name) and "/" not in name:
        known = ", ".join(sorted(BUILTIN_CONFIGS))
        raise CheckpointError(
            f"checkpoint {name!r} is neither built in ({known}) nor a directory nor a hub id (ORG/NAME)"
        )
    directory = locate(name, revision, CHECKPOINT_FILES, "--checkpoint")
    training = read_training(directory)
    raw_config, config = _read_config(directory, training)
    entries, adapters = split_adapters(read_entries(directory))
    if base is not None and not adapters:
        raise CheckpointError(
            f"{directory} holds no LoRA adapters: --base-checkpoint is for fine-tunes that do, and goes unused here"
        )
    if base is not None:
        base_directory = locate(base, None, CHECKPOINT_FILES, "--base-checkpoint")
        _check_base(directory, config, base_directory)
        base_entries, base_adapters = split_adapters(read_entries(base_directory))
        if base_adapters:
            raise CheckpointError(
                f"{base_directory} is a LoRA fine-tune itself: --base-checkpoint must name a plain one"
            )
        entries = base_entries | entries
    if adapters and not (config.lora_rank and config.lora_alpha):
        raise CheckpointError(
            f"{directory} holds LoRA adapters: {CONFIG_FILE} must hold 'lora_rank' and 'lora_alpha', numbers above 0"
        )
    statistics = read_json(
        directory / STATISTICS_FILE,
        'the normalisation statistics, {embodiment: {"statistics": {"state": ..., "action": ...}}}',
    )
    weights = StoredWeights(directory, entries, adapters, config.lora_rank, config.lora_alpha)
    return CheckpointFiles(raw_config, config, statistics, training, weights)


def _read_config(directory: Path, training: TrainingConfig) -> tuple[Mapping[str, Any], ModelConfig]:
    path = directory / CONFIG_FILE
    raw = read_json(path, "the sizes of the model, under 'action_head_cfg'")
    view = {"view_height": training.view_height, "view_width": training.view_width}
    try:
        return raw, parse_config(view | raw)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _check_base(directory: Path, config: ModelConfig, base_directory: Path) -> None:
    _, base = _read_config(base_directory, read_training(base_directory))
    for part, key in (
        ("dit", "diffusion_model_cfg"),
        ("text", "text_encoder_cfg"),
        ("image", "image_encoder_cfg"),
        ("vae", "vae_cfg"),
    ):
        if getattr(config, part) != getattr(base, part):
            raise CheckpointError(
                f"{directory / CONFIG_FILE} has other sizes in {key!r} than {base_directory / CONFIG_FILE}, its base"
            )


def _tokenizer(raw: Mapping[str, Any], config: ModelConfig, name: str | None) -> Tokenizer:
    if name is None and raw.get("tokenizer") == "byt5":
        return ByT5Tokenizer()
    name = name or RELEASE_TOKENIZER
    directory = locate(name, None, TOKENIZER_FILES, "--tokenizer")
    try:
        for path in directory.glob("*.json"):
            open_regular(path).close()
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # the library raises whatever it comes upon
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"--tokenizer {name}: {directory} holds no tokenizer that can be read: {reason}"
        ) from error
    if len(tokenizer) > config.text.vocab:
        raise CheckpointError(
            f"--tokenizer {name} has {len(tokenizer)} tokens, more than the text encoder knows: {config.text.vocab}"
        )
    return tokenizer
