"""Run a tiny model of every causal language model type through Atom and compare it with transformers' own output.

Writes docs/models.md: which types work with the installed plugins, which are refused and with what message, which
are wrong (none may be), and of which no tiny model can be made. Run it from anywhere:

    python scripts/models_table.py [--only mistral,olmo2] [--seconds 60] [--workers 2] [--output docs/models.md]

The exit status is 1 when a type is wrong or fails in a way that is no AtomError.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUM_TOKENS = 16
PROMPT_LENGTHS = (3, 37, 18, 70)
TIE = 1e-3
"""Two logits nearer than this are a tie, which float32 sums in another order may break the other way."""

TOLERANCE = 1e-3
"""Most that a token's logprob may differ: some tiny models repeat one token, so that tokens alone prove little."""

START_SECONDS = 600.0
WALL_FACTOR = 10
"""Wall time allowed per second of CPU time; the machine may be busy with other things."""

HEADINGS = {
    "works": ("Works", f"Greedy tokens and their logprobs (to {TOLERANCE}) equal those of transformers' `generate`."),
    "refused": ("Refused", "Atom says so at startup; the message is what a user sees."),
    "wrong": ("Wrong", "Different tokens or logprobs. This list must be empty."),
    "failed": ("Failed", "An error that is no AtomError, or no answer in time. This list must be empty."),
    "unbuilt": ("Not tried", "No tiny model of the type runs in plain transformers."),
}


@dataclass(frozen=True)
class Result:
    """What came of one model type; `status` is a key of HEADINGS, `reason` one line or empty."""

    model_type: str
    status: str
    reason: str = ""


def one_line(text: object, limit: int = 400) -> str:
    """Return a text as one line that fits into a table cell."""
    line = " ".join(str(text).split()).replace("|", "\\|")
    return line if len(line) <= limit else line[: limit - 3] + "..."


def check(model_type: str) -> Result:
    """Compare one type; runs in a worker process."""
    from atom_core import LLM, SamplingParams
    from atom_core.errors import AtomError
    from tests.tiny_models import reference_outputs, tiny_model

    try:
        model = tiny_model(model_type)
        prompts = make_prompts(model.config.get_text_config().vocab_size)
        expected = reference_outputs(model, prompts, NUM_TOKENS)
    except Exception as error:
        return Result(model_type, "unbuilt", one_line(error))
    try:
        llm = LLM(
            model, device="cpu", dtype="float32", skip_tokenizer=True, cache_memory="1GiB", max_model_len=256,
            max_num_seqs=8, max_num_batched_tokens=48,
        )  # fmt: skip
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
        outputs = llm.generate(prompts, params)
    except AtomError as error:
        return Result(model_type, "refused", one_line(error))
    except Exception as error:
        return Result(model_type, "failed", one_line(f"{type(error).__name__}: {error}"))
    for prompt, output, (tokens, logprobs) in zip(prompts, outputs, expected, strict=True):
        if not output.outputs or output.outputs[0].logprobs is None:
            return Result(model_type, "failed", one_line(f"a request ended with {output.error}"))
        found = list(output.outputs[0].token_ids)
        found_logprobs = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, found, strict=True)]
        if found == tokens:
            apart = max(abs(a - b) for a, b in zip(found_logprobs, logprobs, strict=True))
            if apart > TOLERANCE:
                return Result(model_type, "wrong", f"equal tokens, but logprobs {apart:.2g} apart")
        elif not is_tie(model_type, prompt, found, tokens):
            return Result(model_type, "wrong", f"prompt of {len(prompt)} tokens: {found}, expected {tokens}")
    return Result(model_type, "works")


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Make prompts that fill several blocks, exceed the tiny windows and are cut into chunks."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, min(vocab_size, 100), (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def is_tie(model_type: str, prompt: Sequence[int], found: Sequence[int], expected: Sequence[int]) -> bool:
    """Tell whether the first differing token has the same logit as the expected one in an untouched model."""
    import torch

    from tests.tiny_models import tiny_model

    if len(found) != len(expected):
        return False
    at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *expected[:at]]])
        logits = tiny_model(model_type)(ids, use_cache=False).logits[0, -1]
    return bool((logits[found[at]] - logits[expected[at]]).abs() < TIE)


def serve(connection: Connection) -> None:
    """Answer model types with results until the other end closes; the main function of a worker process."""
    sys.path.insert(0, str(ROOT))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # libraries warn about every tiny model
        os.dup2(nowhere, stream)
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    connection.send(None)
    while True:
        try:
            model_type, seconds = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process after that much CPU time
        result = check(model_type)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(result)


class Worker(threading.local):
    """One process per thread; replaced when it dies or takes too long."""

    process: Any = None
    connection: Connection

    def run(self, model_type: str, seconds: float) -> Result:
        """Check one type within `seconds` of CPU time."""
        if self.process is None:
            self.connection, other = multiprocessing.Pipe()
            self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(other,), daemon=True)
            self.process.start()
            other.close()
            if not self.connection.poll(START_SECONDS):
                raise SystemExit("a worker process did not start")
            self.connection.recv()
        try:
            self.connection.send((model_type, seconds))
            if self.connection.poll(WALL_FACTOR * seconds):
                result: Result = self.connection.recv()
                return result
            reason = f"no answer in {WALL_FACTOR * seconds:.0f} s"
        except (EOFError, OSError):
            self.process.join()
            died = f"the process died with {self.process.exitcode}"
            reason = f"no answer in {seconds:.0f} s of CPU time" if self.process.exitcode == -signal.SIGPROF else died
        self.process.kill()
        self.process.join()
        self.process = None
        return Result(model_type, "failed", reason)


def table(results: Sequence[Result]) -> str:
    """Return the page docs/models.md."""
    by_status: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_status[result.status].append(result)
    plugins = sorted({f"{p.dist.name} {p.dist.version}" for p in entry_points(group="atom_core") if p.dist})
    counts = ", ".join(f"{len(by_status[status])} {heading.lower()}" for status, (heading, _) in HEADINGS.items())
    lines = [
        "# Models",
        "",
        "Every causal language model type of transformers, tried with a tiny random model in float32 on a CPU: "
        f"{len(PROMPT_LENGTHS)} prompts at once, {NUM_TOKENS} greedy tokens each, prompts cut into chunks. "
        "Made by `python scripts/models_table.py`; do not edit.",
        "",
        f"transformers {version('transformers')}, torch {version('torch').partition('+')[0]}, Python "
        f"{platform.python_version()}; plugins: {', '.join(plugins) or 'none'}.",
        "",
        f"{len(results)} types: {counts}.",
    ]
    for status, (heading, meaning) in HEADINGS.items():
        found = sorted(by_status[status], key=lambda result: result.model_type)
        lines += ["", f"## {heading} ({len(found)})", "", meaning]
        if status == "works" and found:
            lines += ["", ", ".join(f"`{result.model_type}`" for result in found)]
        elif found:
            lines += ["", "| model type | reason |", "|---|---|"]
            lines += [f"| `{result.model_type}` | {result.reason} |" for result in found]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Check the types, write the page, and return the exit status."""
    parser = argparse.ArgumentParser(description="Which model types work, are refused, or are wrong.")
    parser.add_argument("--only", help="model types, comma-separated; prints instead of writing the page")
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU time limit per type")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "models.md")
    options = parser.parse_args()
    if options.only:
        model_types = options.only.split(",")
    else:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        model_types = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    start, worker = time.monotonic(), Worker()
    results = []
    with ThreadPoolExecutor(options.workers) as pool:
        for result in pool.map(lambda name: worker.run(name, options.seconds), model_types):
            results.append(result)
            print(f"{result.status:8} {result.model_type}  {result.reason}", flush=True)
    print(f"{len(results)} types in {time.monotonic() - start:.0f} s")
    if not any(result.status == "works" for result in results):
        print("nothing works: are the plugins installed? `atom plugins` says", file=sys.stderr)
        return 1
    if not options.only:
        options.output.write_text(table(results), encoding="utf-8")
    return 1 if any(result.status in ("wrong", "failed") for result in results) else 0


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.exit(main())
