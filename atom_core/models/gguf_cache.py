"""GGUF files, converted once into safetensors in the cache.

transformers dequantizes a GGUF file on every load, which takes many times longer than reading safetensors. Layout:
`$ATOM_CACHE/gguf/<sha256 of the file>-<dtype>/` holds config, weights, tokenizer and `manifest.json`, which lists
every file's size and hash. A folder whose files differ from its manifest is converted again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from atom_core.config import EngineConfig
from atom_core.errors import ModelError
from atom_core.models.cache_dir import cache_dir, sha256_of, staging_dir
from atom_core.models.quiet import first_line, quiet

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

__all__ = ["converted", "find_converted", "read_config", "read_tokenizer", "weight_dtype"]

_MANIFEST = "manifest.json"
_FORMAT = 1
_SHARD_SIZE = "4GB"


def converted(gguf: Path, dtype: torch.dtype, progress: Callable[[str], None] | None = None) -> Path:
    """Return the folder with the converted model; converts when it is not there or is damaged.

    Raises:
        ModelError: the file cannot be read, its architecture is unknown to transformers, or the cache not written.
    """
    target = _target(gguf, dtype)
    if _is_intact(target, weights=True):
        return target
    if progress is not None:
        progress(f"converting {gguf.name} to {target.name.rpartition('-')[2]} safetensors, once")
    with staging_dir(target.parent) as staging:
        fresh = staging / "new"
        fresh.mkdir()
        try:
            _convert(gguf, dtype, fresh)
            _write_manifest(fresh, gguf)
            _install(fresh, target, staging / "old")
        except OSError as error:
            raise ModelError(f"the converted {gguf.name} cannot be written to {target.parent}: {error}") from error
    return target


def find_converted(gguf: Path, dtype: torch.dtype) -> Path | None:
    """Return the folder of an earlier conversion if its config and tokenizer are intact; weights are not read."""
    target = _target(gguf, dtype)
    return target if _is_intact(target, weights=False) else None


def read_config(gguf: Path) -> PreTrainedConfig:
    """Read the model's config from the header of a GGUF file.

    Raises:
        ModelError: the file is no GGUF file, is damaged, or is of an architecture that transformers cannot convert.
    """
    from transformers import AutoConfig

    with _reading(gguf):
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    return config


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer from the header of a GGUF file, with its chat template.

    Raises:
        ModelError: as `read_config`, or transformers cannot convert the tokenizer.
    """
    from transformers import AutoTokenizer

    with _reading(gguf):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    return tokenizer


def weight_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype to convert to: the one asked for, and float32, which holds any dequantized value, for `auto`."""
    import torch

    dtype: torch.dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    return dtype


def _target(gguf: Path, dtype: torch.dtype) -> Path:
    return cache_dir("gguf") / f"{sha256_of(gguf)}-{str(dtype).removeprefix('torch.')}"


def _convert(gguf: Path, dtype: torch.dtype, folder: Path) -> None:
    import torch
    import transformers

    kwargs: dict[str, Any] = {"gguf_file": gguf.name, "dtype": dtype}
    if hasattr(transformers, "GgufConfig"):  # 5.24 keeps weights packed where it has a kernel, unless told otherwise
        kwargs["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _reading(gguf):
        config = read_config(gguf)
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), config=config, output_loading_info=True, **kwargs
        )
        if info["missing_keys"]:
            raise ModelError(
                f"{gguf} lacks {len(info['missing_keys'])} weights that {type(loaded).__name__} needs, "
                f"for example {min(info['missing_keys'])}"
            )
        with contextlib.suppress(ModelError):  # without one, load_tokenizer says what to do
            read_tokenizer(gguf).save_pretrained(folder)
    with quiet():
        # A model loaded from GGUF counts as quantized and refuses to be saved; a fresh one that takes its tensors not.
        config.dtype = dtype
        with torch.device("meta"):
            fresh = type(loaded)(config)
        fresh.load_state_dict(loaded.state_dict(), assign=True)
        fresh.tie_weights()
        fresh.save_pretrained(folder, max_shard_size=_SHARD_SIZE)


@contextlib.contextmanager
def _reading(gguf: Path) -> Iterator[None]:
    """Inside the block transformers reads this file quietly and fast; its failures become ModelErrors."""
    try:
        with gguf.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{gguf} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelError(f"{gguf} is not a GGUF file: it starts with {magic!r}, expected b'GGUF'")
    try:
        with quiet(), _parsing_once():
            yield
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError(f"{gguf}: reading GGUF needs the packages gguf and accelerate: {error}") from error
    except Exception as error:
        raise ModelError(
            f"transformers cannot read {gguf}: {first_line(error)}; the file is damaged, or of an unknown architecture"
        ) from error


@contextlib.contextmanager
def _parsing_once() -> Iterator[None]:
    """Memoize two pure functions of the gguf package, which transformers calls over and over.

    For a model of 30 layers the name table was built 397 times (12 s), and each header read took 7 s, most of it in
    numpy's memmap subclass (transformers 5.24, gguf 0.19). Results are unchanged.
    """
    import gguf
    import numpy as np

    if hasattr(gguf.GGUFReader, "cache_info"):  # nested: share the outer block's results
        yield
        return

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    originals = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader = functools.lru_cache(maxsize=1)(Reader)
    gguf.get_tensor_name_map = functools.lru_cache(maxsize=1)(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = originals


def _write_manifest(folder: Path, gguf: Path) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "xxh3_128": _xxh3(path)} for path in sorted(folder.iterdir())}
    manifest = {"format": _FORMAT, "source": gguf.name, "source_sha256": sha256_of(gguf), "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _is_intact(folder: Path, *, weights: bool) -> bool:
    """Compare a folder with its manifest: every size, and every hash (those of weights only if asked)."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT or manifest["source_sha256"] != folder.name.partition("-")[0]:
            return False
        for name, expected in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != expected["bytes"]:
                return False
            if (weights or path.suffix != ".safetensors") and _xxh3(path) != expected["xxh3_128"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _xxh3(path: Path) -> str:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return xxhash.xxh3_128_hexdigest(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return xxhash.xxh3_128_hexdigest(view)


def _install(fresh: Path, target: Path, old: Path) -> None:
    """Put the new folder in its place; whoever else converted the same file meanwhile made the same one."""
    if target.exists() and not _is_intact(target, weights=True):
        target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        if not _is_intact(target, weights=True):
            raise
    shutil.rmtree(old, ignore_errors=True)
