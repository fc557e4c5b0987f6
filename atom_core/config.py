"""EngineConfig: everything a user can set, checked where it is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from atom_core.errors import ConfigError

__all__ = ["DEFAULT_BLOCK_SIZE", "DEFAULT_SPEC_TOKENS", "DRAFT_MODEL", "MTP", "NGRAM", "EngineConfig", "parse_bytes"]

DEFAULT_BLOCK_SIZE = 16
DEFAULT_SPEC_TOKENS = 4
NGRAM, DRAFT_MODEL, MTP = "ngram", "draft_model", "mtp"
"""Values of `EngineConfig.speculation` that the core knows; for the last two a second role of the model drafts."""

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[_letter] = 1024**_power


def parse_bytes(text: str | int) -> int:
    """Read a size such as `80GiB`, `1.5GB`, `512M` or a plain number of bytes.

    Raises:
        ConfigError: the text is not a size, or the size is not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a size; write for example 80GiB, 512MB or a number of bytes")
    size = int(float(match.group(1)) * unit)
    if size <= 0:
        raise ConfigError(f"a size must be positive, found {text!r}")
    return size


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is made from; `LLM(model, **fields)` and the CLI build it.

    Attributes:
        model: a local directory, a Hugging Face id, a `.gguf` file, `demo`, a transformers config
            (with `random_weights`), or a loaded transformers model.
        tokenizer: where the tokenizer comes from; the model's place when `None`.
        skip_tokenizer: serve token ids only; results carry no text.
        revision: a branch, tag or commit of a Hugging Face repository.
        trust_remote_code: let transformers run code that comes with the model.
        dtype: dtype of weights and activations; `auto` takes the checkpoint's.
        cache_dtype: dtype of paged caches; `auto` takes `dtype`. In `float8_e4m3fn` plugins keep scales beside it.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        random_weights: make random weights from this seed instead of loading any.
        max_model_len: most tokens of a request, prompt and output together; the model's own limit when `None`.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens of one step.
        prefill_chunk_tokens: most prompt tokens that one request computes in a step; no bound when `None`.
        block_size: tokens per block; the least size that all plugins accept when `None`.
        max_blocks: most blocks, however much memory there is; enough for all requests at full length when `None`.
        memory: bytes for weights, workspace and caches together (a number or `80GiB`); measured when `None`.
        cache_memory: bytes for the caches alone; overrides `memory`.
        memory_fraction: share of the free memory to use when neither of the two is given.
        enable_prefix_caching: share blocks between requests with equal prefixes.
        state_checkpoint_share: share of the memory left after the running requests' state that checkpoints of state
            get; without any, requests of a model with state never start from cached blocks.
        state_checkpoint_interval: tokens between regular checkpoints, rounded up to whole blocks; prompts are cut
            there, so a small one costs steps and memory. `None` keeps the ends of prompts only.
        scheduling_policy: `mixed` runs decodes and prefill chunks in one step, `prefill_first` never does.
        speculation: how to guess tokens that a step then verifies: `ngram`, `draft_model`, `mtp` (the model's own
            layers for it), the name of a plugin's proposer, or a `Proposer`; `None` for not at all, or for
            `draft_model` where one is named. The tokens are the same either way.
        draft_model: a smaller model of the same vocabulary that drafts; whatever `model` may be, with the same
            `dtype`, `random_weights` and `trust_remote_code`.
        num_spec_tokens: most draft tokens per request and step; 4 where speculation is on and nothing else was said.
        per_req_cache_equiv_blocks: blocks charged per stateful request; 0 because the pool reserves state bytes.
        eager: run every step eagerly: no captured decode graphs, nothing compiled.
        compile: compile what lies between the attention layers of captured steps.
        kernels: forced kernels, op name to kernel name.
        plugins: the only plugins to use, or `None` for all that are installed.
        no_plugins: plugins to leave out.
        tensor_parallel_size: ranks that share one model.
        seed: seed of requests that bring none.
    """

    model: Any
    tokenizer: str | None = None
    skip_tokenizer: bool = False
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn"] = "auto"
    device: str = "auto"
    random_weights: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    prefill_chunk_tokens: int | None = None
    block_size: int | None = None
    max_blocks: int | None = None
    memory: str | int | None = None
    cache_memory: str | int | None = None
    memory_fraction: float | None = None
    enable_prefix_caching: bool = True
    state_checkpoint_share: float = 0.75
    state_checkpoint_interval: int | None = 2048
    scheduling_policy: Literal["mixed", "prefill_first"] = "mixed"
    speculation: Any = None
    draft_model: Any = None
    num_spec_tokens: int = 0
    per_req_cache_equiv_blocks: int = 0
    eager: bool = False
    compile: bool = True
    kernels: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] | None = None
    no_plugins: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("max_model_len", "prefill_chunk_tokens", "block_size", "max_blocks", "state_checkpoint_interval"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "at least 1")
        for name in ("num_spec_tokens", "per_req_cache_equiv_blocks"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        if self.draft_model is not None and self.speculation is None:
            object.__setattr__(self, "speculation", DRAFT_MODEL)
        drafts = "draft_model" if self.draft_model is not None else "no draft_model"
        _require(
            (self.draft_model is not None) == (self.speculation == DRAFT_MODEL),
            "speculation",
            f"{self.speculation!r} and {drafts}",
            "'draft_model' where a draft_model is named, and only there",
        )
        if self.speculation is not None and self.num_spec_tokens == 0:
            object.__setattr__(self, "num_spec_tokens", DEFAULT_SPEC_TOKENS)
        share = self.state_checkpoint_share
        _require(0 <= share <= 1, "state_checkpoint_share", share, "from 0 to 1")
        fraction = self.memory_fraction
        _require(fraction is None or 0 < fraction <= 1, "memory_fraction", fraction, "above 0 and at most 1")
        _require(
            self.dtype in ("auto", "float32", "bfloat16", "float16"),
            "dtype",
            self.dtype,
            "auto, float32, bfloat16 or float16",
        )
        _require(
            self.cache_dtype in ("auto", "float32", "bfloat16", "float16", "float8_e4m3fn"),
            "cache_dtype",
            self.cache_dtype,
            "auto, float32, bfloat16, float16 or float8_e4m3fn",
        )
        _require(
            self.scheduling_policy in ("mixed", "prefill_first"),
            "scheduling_policy",
            self.scheduling_policy,
            "mixed or prefill_first",
        )
        _require(
            re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None,
            "device",
            self.device,
            "auto, cpu, cuda or cuda:N",
        )
        for name in ("memory", "cache_memory"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_bytes(value))


def _require(holds: bool, name: str, found: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {expected}, found {found!r}")
