"""The directory for files that Atom makes or fetches once, and how they get there whole."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from atom_core.errors import ModelError

__all__ = ["cache_dir", "sha256_of", "staging_dir"]

_STAGING_PREFIX = ".staging-"
_ABANDONED_SECONDS = 24 * 3600


def cache_dir(kind: str) -> Path:
    """Return the cache folder for one kind of file, made if need be: `$ATOM_CACHE/kind` or `~/.cache/atom/kind`.

    Raises:
        ModelError: the folder cannot be made or written to.
    """
    path = Path(os.environ.get("ATOM_CACHE") or Path.home() / ".cache" / "atom").expanduser() / kind
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"the cache folder {path} cannot be made: {error.strerror}; set ATOM_CACHE to a writable folder"
        ) from error
    return path


@contextmanager
def staging_dir(parent: Path) -> Iterator[Path]:
    """Give a new folder in `parent` to prepare files in; move them out with one rename, the rest is deleted.

    Being in the same folder, and so on the same file system, makes that rename atomic. Folders of processes that
    were killed are removed after a day.

    Raises:
        ModelError: the folder cannot be made.
    """
    for left in parent.glob(f"{_STAGING_PREFIX}*"):
        _remove_if_abandoned(left)
    try:
        path = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=parent))
    except OSError as error:
        raise ModelError(f"cannot write to {parent}: {error.strerror}; set ATOM_CACHE to a writable folder") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """Return the hex sha256 of a file; computed once per process unless the file changes.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        stat = path.stat()
        return _sha256(path, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


@lru_cache(maxsize=16)
def _sha256(path: Path, size_bytes: int, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_if_abandoned(path: Path) -> None:
    try:
        newest = max(entry.stat().st_mtime for entry in (path, *path.rglob("*")))
    except OSError:  # its owner is removing it at this moment
        return
    if time.time() - newest > _ABANDONED_SECONDS:
        shutil.rmtree(path, ignore_errors=True)
