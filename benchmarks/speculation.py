"""Speculation on one request: tokens per second with drafts against without, in one run, rounds alternating.

`right` drafts from the answer that is known from the round without drafts, the most that speculation can give. `ngram`
is measured on a copy task: the prompt shows once how a text is copied, and stops where the copy begins; `copied` is
the share of the output's words that are the text's in order. The outputs of all ways are compared.
"""

from __future__ import annotations

import argparse
import difflib
import statistics
import time
from typing import Any

from atom_core import LLM, SamplingParams

TEXT = (
    "The lighthouse keeper wrote in his log that the storm had passed before dawn. Two fishing boats came back with "
    "torn sails, and a third was towed in by the pilot at noon. He counted eleven men on the quay and sent the boy to "
    "fetch bread, dry blankets and the doctor from the upper village. By evening the sea was calm again, the lamp was "
    "lit at the usual hour, and the keeper noted that the oil would last for nineteen days."
)


class Replay:
    """Drafts what is known to follow."""

    def __init__(self) -> None:
        self.known: list[int] = []

    def propose(self, requests: Any) -> list[list[int]]:
        """The tokens behind those that each request has."""
        return [
            self.known[len(request.token_ids) : len(request.token_ids) + request.max_drafts] for request in requests
        ]

    def release(self, sequence_id: int) -> None:
        """Keep nothing."""


def run(llm: LLM, prompt: list[int], num_tokens: int) -> tuple[float, list[int]]:
    """Seconds from the first token to the last, and the tokens."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    stream = llm.stream(prompt, params)
    next(stream)
    first = time.perf_counter()
    *_, last = stream
    return time.perf_counter() - first, list(last.outputs[0].token_ids)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-spec-tokens", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    options = {"dtype": arguments.dtype, "max_model_len": 1024, "cache_memory": "512MiB", "max_num_seqs": 4}
    replay = Replay()
    engines = {
        "off": LLM(arguments.model, **options),
        "right": LLM(arguments.model, speculation=replay, num_spec_tokens=arguments.num_spec_tokens, **options),
        "ngram": LLM(arguments.model, speculation="ngram", num_spec_tokens=arguments.num_spec_tokens, **options),
    }
    tokenizer = engines["off"].engine.io.tokenizer
    assert tokenizer is not None
    example = f"Text: {TEXT}\nCopy of the text:"
    prompt = list(tokenizer(f"{example} {TEXT}\n{example}")["input_ids"])
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    outputs: dict[str, list[int]] = {}
    for _ in range(arguments.rounds):
        for name, llm in engines.items():
            taken, outputs[name] = run(llm, prompt, arguments.tokens)
            seconds[name].append(taken)
            if name == "off":
                replay.known = [*prompt, *outputs[name]]
    words, wanted = tokenizer.decode(outputs["off"]).split(), TEXT.split()
    matches = difflib.SequenceMatcher(None, words, wanted, autojunk=False).get_matching_blocks()
    copied = sum(match.size for match in matches) / len(words)
    print(f"{len(prompt)} prompt tokens, {len(outputs['off'])} output tokens, copied {copied:.0%} of the words")
    print(f"{'drafts':>7} {'tokens/s':>9} {'ratio':>6} {'per verification':>17} {'same output':>12}")
    base = statistics.median(seconds["off"])
    for name, llm in engines.items():
        median = statistics.median(seconds[name])
        kept = llm.stats()["acceptance_length"]
        print(
            f"{name:>7} {(len(outputs[name]) - 1) / median:>9.1f} {base / median:>6.2f} "
            f"{kept if kept is None else round(kept, 2)!s:>17} {outputs[name] == outputs['off']!s:>12}"
        )


if __name__ == "__main__":
    main()
