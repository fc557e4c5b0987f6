"""Where a model comes from: what `EngineConfig.model` and `EngineConfig.tokenizer` can name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from atom_core.errors import ModelError
from atom_core.models.demo import demo_file
from atom_core.models.hub import Part, is_repo_id, missing_part, snapshot

__all__ = ["DEMO", "locate"]

DEMO = "demo"

_EXPECTED = "expected a folder, a .gguf file, a Hugging Face id, `demo`, a transformers config or a loaded model"


def locate(
    name: object,
    part: Part,
    *,
    revision: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Return the local place of `part` of a model: a folder that has it, a `.gguf` file, or a config's `.json`.

    Args:
        name: `demo`, a path, or a Hugging Face id; ids are downloaded as far as `part` needs.
        part: what will be read: `config`, `weights` or `tokenizer`.
        revision: branch, tag or commit of a Hugging Face id.
        progress: told before anything slow.

    Raises:
        ModelError: there is no such thing, or it lacks the part.
    """
    if not isinstance(name, (str, os.PathLike)) or not str(name):
        raise ModelError(f"{name!r} is no model: {_EXPECTED}")
    if name == DEMO:
        return demo_file(progress)
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix == ".gguf" or (path.suffix == ".json" and part == "config"):
            return path.resolve()
        raise ModelError(f"the file {path} has no {part} that can be read: {_EXPECTED}")
    if path.is_dir():
        problem = missing_part(path, part)
        if problem is not None:
            raise ModelError(f"the folder {path} has {problem}; {_advice(path, part)}")
        return path.resolve()
    text = str(name)
    if not is_repo_id(text) or text.startswith((".", "~", os.sep)):
        raise ModelError(f"there is no folder or file {text!r}; {_EXPECTED}")
    return snapshot(text, revision, part, progress)


def _advice(folder: Path, part: Part) -> str:
    gguf_files = sorted(folder.glob("*.gguf"))
    if gguf_files:
        return f"name its GGUF file itself, {gguf_files[0]}"
    if part == "weights":
        return "download them, or pass random_weights=SEED to run without"
    if part == "tokenizer":
        return "name another place with tokenizer=, or pass skip_tokenizer=True and use token ids"
    return "expected a transformers model folder"
