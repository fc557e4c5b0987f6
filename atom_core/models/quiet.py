"""Keeping the libraries' own logging and progress bars off the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

__all__ = ["first_line", "quiet"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and huggingface_hub inside the block, then restore their settings.

    What matters of their messages (missing weights, unknown model types) is checked by us and raised as an error.
    """
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    names = ("transformers", "huggingface_hub", "torch", "accelerate", "gguf")
    levels = {name: logging.getLogger(name).level for name in names}
    bars = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for name in names:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        transformers_logging.disable_progress_bar()
        disable_progress_bars()
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            if bars[0]:
                transformers_logging.enable_progress_bar()
            if bars[1]:
                enable_progress_bars()


def first_line(error: Exception) -> str:
    """Return an exception's class and the first line of its text, for quoting it in our own message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
