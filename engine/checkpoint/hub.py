"""Checkpoints and tokenizers by their hub id: fetched once, then found in the hub's cache.

Cache, token, endpoint and offline mode are those of the `huggingface_hub` library (HF_HOME, HF_TOKEN or a login,
HF_ENDPOINT, HF_HUB_OFFLINE).
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from engine.checkpoint.error import CheckpointError

CHECKPOINT_FILES = ("model*.safetensors", "*.json", "*.yaml")
TOKENIZER_FILES = ("*.json", "spiece.model")
"""All that is ever fetched. Pickles are not."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def locate(name: str, revision: str | None, files: Sequence[str], flag: str) -> Path:
    """The directory that `name` is, or the one its hub id (ORG/NAME) was fetched to; progress is shown on stderr.

    revision: branch, tag or commit of a hub id; None for its main branch. files: patterns of what is fetched.
    flag: the command-line flag the name came from. Raises CheckpointError that says what to do.
    """
    if os.path.isdir(name):  # False also for what can be no path
        if revision is not None:
            raise CheckpointError(f"--revision {revision!r} is of a hub id, but {flag} {name} is a directory")
        return Path(name)
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"{flag} {name!r} is neither a directory nor a hub id (ORG/NAME)")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except RevisionNotFoundError:
        raise CheckpointError(
            f"{flag} {name}: the hub has no revision {revision!r} of it; try another --revision"
        ) from None
    except (GatedRepoError, RepositoryNotFoundError) as error:
        why = "asks for an agreement first" if isinstance(error, GatedRepoError) else "is private or does not exist"
        raise CheckpointError(
            f"{flag} {name} is no directory, and on the hub it {why}: check the name, visit "
            f"{constants.ENDPOINT}/{name}, then log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the hub was not reached ({_reason(error)})"
        download = f"hf download {name}{f' --revision {revision}' if revision else ''}"
        raise CheckpointError(
            f"{flag} {name} is not here, and {why}: run `{download}` where there is a network and give the folder as "
            f"{flag} DIR (looked in {constants.HF_HUB_CACHE})"
        ) from error
    except (HfHubHTTPError, HTTPError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{flag} {name} could not be fetched: {_reason(error)}; start again to go on where it stopped"
        ) from error


def _reason(error: BaseException) -> str:
    """The innermost cause in one line: the outer ones repeat it with advice that does not fit here."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__
