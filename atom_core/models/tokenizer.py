"""The tokenizer of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from atom_core.config import EngineConfig
from atom_core.errors import ModelError
from atom_core.models import gguf_cache
from atom_core.models.hub import missing_part
from atom_core.models.quiet import first_line, quiet
from atom_core.models.source import locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["load_tokenizer"]


def load_tokenizer(config: EngineConfig) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that belongs to a model, or the one that `config.tokenizer` names.

    Returns:
        The tokenizer, or `None` where there cannot be one: `skip_tokenizer` is set, or the model is an object or has
        random weights, names no tokenizer and has none at its place.

    Raises:
        ModelError: there is no tokenizer where there must be one, or transformers cannot read it.
    """
    if config.skip_tokenizer:
        return None
    place = _place(config)
    if place is None:
        return None
    if place.suffix == ".gguf":
        folder = gguf_cache.find_converted(place, gguf_cache.weight_dtype(config))
        if folder is None or missing_part(folder, "tokenizer") is not None:
            return gguf_cache.read_tokenizer(place)
        place = folder
    from transformers import AutoTokenizer

    try:
        with quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(place), trust_remote_code=config.trust_remote_code
            )
    except Exception as error:
        raise ModelError(
            f"transformers cannot read the tokenizer in {place}: {first_line(error)}; name another with tokenizer=, "
            "or pass skip_tokenizer=True and use token ids"
        ) from error
    return tokenizer


def _place(config: EngineConfig) -> Path | None:
    if config.tokenizer is not None:
        return locate(config.tokenizer, "tokenizer", revision=config.revision)
    if isinstance(config.model, (str, Path)):
        try:
            return locate(config.model, "tokenizer", revision=config.revision)
        except ModelError:
            if config.random_weights is not None:
                return None
            raise
    name = str(getattr(config.model, "name_or_path", ""))  # transformers' name of where an object was loaded from
    folder = Path(name)
    return folder if name and folder.is_dir() and missing_part(folder, "tokenizer") is None else None
