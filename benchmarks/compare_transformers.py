"""Atom against transformers' own `generate` on the demo model, interleaved in one run; prints the ratios.

Both get the same weights, dtype, threads and prompts: random token ids, greedy, no early end. transformers runs its
static batch with sdpa attention and its own cache; Atom runs its engine as a user would. Every repeat times both,
one after the other, and the ratio is the median of the repeats' ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

from atom_core import LLM, SamplingParams


def load_reference(model: str, dtype: str) -> torch.nn.Module:
    """Load the model as transformers itself would run it."""
    from transformers import AutoModelForCausalLM

    from atom_core.config import EngineConfig
    from atom_core.models.loader import load_model, resolve_config, resolve_dtype

    config = EngineConfig(model=model, dtype=dtype)  # type: ignore[arg-type]
    model_config = resolve_config(config)
    loaded = load_model(config, model_config, resolve_dtype(config, model_config), torch.device("cpu"))
    weights = loaded.state_dict()
    model_config._attn_implementation = "sdpa"
    reference = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa", dtype=loaded.dtype).eval()
    reference.load_state_dict(weights, strict=True)
    return reference  # type: ignore[no-any-return]


def run_atom(llm: LLM, prompts: list[list[int]], num_output: int) -> list[list[int]]:
    """Generate as a user would."""
    params = SamplingParams(max_tokens=num_output, temperature=0, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


@torch.inference_mode()
def run_transformers(model: torch.nn.Module, prompts: list[list[int]], num_output: int) -> list[list[int]]:
    """Generate with transformers' static batch."""
    ids = torch.tensor(prompts)
    output = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_output,
        min_new_tokens=num_output,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return tokens


def compare(model: str, dtype: str, batch: int, num_input: int, num_output: int, repeats: int) -> None:
    """Print one line: both rates and their ratio."""
    llm = LLM(
        model,
        dtype=dtype,
        skip_tokenizer=True,
        max_model_len=num_input + num_output,
        cache_memory="1GiB",
        enable_prefix_caching=False,
    )
    reference = load_reference(model, dtype)
    numbers = random.Random(batch)
    vocab_size = llm.engine.inspection.model_config.vocab_size
    ours, theirs, num_equal = [], [], 0
    for repeat in range(repeats + 1):
        prompts = [[numbers.randrange(vocab_size) for _ in range(num_input)] for _ in range(batch)]
        started = time.perf_counter()
        our_tokens = run_atom(llm, prompts, num_output)
        between = time.perf_counter()
        their_tokens = run_transformers(reference, prompts, num_output)
        ended = time.perf_counter()
        if repeat:
            ours.append(between - started)
            theirs.append(ended - between)
            num_equal += sum(one == other for one, other in zip(our_tokens, their_tokens, strict=True))
    ratio = statistics.median(other / one for one, other in zip(ours, theirs, strict=True))
    tokens = batch * num_output
    print(
        f"{dtype:>9} batch {batch:>3}: atom {tokens / statistics.median(ours):7.1f} tokens/s, "
        f"transformers {tokens / statistics.median(theirs):7.1f} tokens/s, ratio {ratio:.2f}, "
        f"equal outputs {num_equal}/{batch * repeats}",
        flush=True,
    )


def main() -> None:
    """Compare for every dtype and batch size asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(f"{options.model}, {options.input_tokens} tokens in, {options.output_tokens} out, {options.threads} threads")
    torch.set_num_threads(options.threads)
    for dtype in options.dtypes:
        for batch in options.batches:
            compare(options.model, dtype, batch, options.input_tokens, options.output_tokens, options.repeats)


if __name__ == "__main__":
    main()
