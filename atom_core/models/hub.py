"""Models of the Hugging Face hub: the local cache first, the network only for what is missing there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from atom_core.errors import ModelError
from atom_core.models.quiet import first_line, quiet

__all__ = ["Part", "is_repo_id", "missing_part", "snapshot"]

Part = Literal["config", "weights", "tokenizer"]

_ETAG_TIMEOUT_SECONDS = 10.0
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_WEIGHT_FORMATS = (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "*.bin"))


def is_repo_id(text: str) -> bool:
    """Tell whether a text can be the name of a hub repository: `name` or `owner/name`."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", text) is not None and not text.endswith(".gguf")


def missing_part(folder: Path, part: Part) -> str | None:
    """Return what a model folder lacks for `part`, as words for a message, or `None` when it is complete."""
    if part == "config":
        return None if (folder / "config.json").is_file() else "no config.json"
    if part == "tokenizer":
        found = any((folder / name).is_file() for name in _TOKENIZER_FILES) or any(folder.glob("*.tiktoken"))
        return None if found else "no tokenizer files"
    for name, pattern in _WEIGHT_FORMATS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _missing_shards(folder, index)
        if (folder / name).is_file():
            return None
        if pattern == "*.safetensors" and any(folder.glob(pattern)):
            return None  # other names; transformers decides by the config
    return "no model.safetensors, no model.safetensors.index.json and no pytorch_model.bin"


def snapshot(repo_id: str, revision: str | None, part: Part, progress: Callable[[str], None] | None = None) -> Path:
    """Return the local folder of a hub repository, complete for `part`; downloads only what is not there.

    Raises:
        ModelError: there is no such repository or revision, no access, no network, or the repository lacks the part.
    """
    folder = _cached(repo_id, revision)
    if folder is not None and missing_part(folder, part) is None:
        return folder
    if progress is not None:
        progress(f"downloading {part} of {repo_id}")
    if part != "weights":
        folder = _download(repo_id, revision, _SMALL_FILES)
    else:
        for _, pattern in _WEIGHT_FORMATS:
            folder = _download(repo_id, revision, (*_SMALL_FILES, pattern))
            if missing_part(folder, part) is None:
                break
    assert folder is not None, "a download returns a folder or raises"
    problem = missing_part(folder, part)
    if problem is not None:
        raise ModelError(f"the hub repository {repo_id} has {problem}, so its {part} cannot be used")
    return folder


def _cached(repo_id: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with quiet():
            return Path(str(snapshot_download(repo_id, revision=revision, local_files_only=True)))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None


def _download(repo_id: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import errors, snapshot_download

    at = f"{repo_id} at revision {revision}" if revision else repo_id
    try:
        with quiet():
            return Path(
                str(
                    snapshot_download(
                        repo_id,
                        revision=revision,
                        allow_patterns=list(patterns),
                        ignore_patterns=["*/*"],  # other formats live in subfolders
                        etag_timeout=_ETAG_TIMEOUT_SECONDS,
                    )
                )
            )
    except errors.GatedRepoError as error:
        raise ModelError(f"{repo_id} is gated: ask for access on its page and log in with `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{repo_id} has no revision {revision}; expected a branch, a tag or a commit") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no local folder or file {repo_id!r} and no such repository on the hub (or it is private); "
            "check the name"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelError(
            f"there is no local folder or file {repo_id!r}, {at} is not complete in the hub's local cache, and the hub "
            "cannot be reached; check the name, the network and HF_HUB_OFFLINE"
        ) from error
    except Exception as error:
        raise ModelError(f"{at} cannot be downloaded from the hub: {first_line(error)}") from error


def _missing_shards(folder: Path, index: Path) -> str | None:
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return f"an unreadable {index.name}"
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    return f"no {missing[0]} ({len(missing)} of {len(shards)} weight files missing)" if missing else None
