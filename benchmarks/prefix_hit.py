"""Time to first token of the same prompt, the first time and the second, on a random hybrid of about 30M parameters.

Three layers of four keep per-request state: the second time starts from a checkpoint of it and from cached blocks.
Each round has a prompt of its own, so that its first time is cold.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from transformers import CONFIG_MAPPING

from atom_core import LLM, SamplingParams


def make_llm(max_model_len: int) -> LLM:
    """An engine on random weights."""
    config = CONFIG_MAPPING["qwen3_5_text"](
        vocab_size=16_384,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return LLM(
        config,
        random_weights=0,
        dtype="float32",
        skip_tokenizer=True,
        max_model_len=max_model_len,
        cache_memory="1GiB",
        max_num_seqs=4,
    )


def first_token_seconds(llm: LLM, prompt: list[int]) -> float:
    """Seconds until a request's first token."""
    begun = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
    return time.perf_counter() - begun


def main() -> None:
    """Print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    llm = make_llm(arguments.prompt_tokens + 64)
    numbers = random.Random(0)
    prompts = [[numbers.randrange(16_384) for _ in range(arguments.prompt_tokens)] for _ in range(arguments.rounds + 1)]
    first_token_seconds(llm, prompts[0])
    cold, hit, shares = [], [], []
    for prompt in prompts[1:]:
        cold.append(first_token_seconds(llm, prompt))
        before = llm.stats()["num_computed_tokens"]
        hit.append(first_token_seconds(llm, prompt))
        shares.append((llm.stats()["num_computed_tokens"] - before) / len(prompt))
    millions = llm.engine.inspection.weight_bytes / 4e6
    print(f"{millions:.0f}M parameters, {arguments.prompt_tokens} prompt tokens, {arguments.rounds} rounds, medians")
    first, second = statistics.median(cold), statistics.median(hit)
    print(f"first time {first * 1e3:.0f} ms, second time {second * 1e3:.1f} ms: {first / second:.1f} times faster")
    print(f"tokens computed the second time: {statistics.median(shares):.1%}")


if __name__ == "__main__":
    main()
