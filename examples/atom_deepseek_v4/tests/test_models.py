"""Whole models through the engine: tokens are transformers' own, in float32."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM
from v4_models import MODELS, Poisoner, build_model, greedy, make_llm, make_prompts, stock_generate, tokens

from atom_core import LLM
from atom_core.plugin.registry import PluginRegistry
from atom_deepseek_v4.plugin import plugin

LENGTHS = [1, 3, 16, 17, 40, 90]


@pytest.fixture(scope="module")
def mixed():
    """A model of all kinds of layers, prompts, and what transformers says."""
    model = build_model("all-kinds")
    prompts = make_prompts(LENGTHS)
    expected = [stock_generate(model, prompt, 20) for prompt in prompts]
    assert min(len(set(found)) for found in expected) > 8, "the weights are too dull to compare tokens"
    return model, prompts, expected


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_tokens": 1},
        {"prefill_chunk_tokens": 5, "max_num_seqs": 2},
        {"prefill_chunk_tokens": 128},
        {"max_num_batched_tokens": 7},
        {"scheduling_policy": "prefill_first", "block_size": 48},
        {"num_spec_tokens": 3},
    ],
    ids=str,
)
def test_no_schedule_changes_tokens(mixed, options):
    model, prompts, expected = mixed
    llm = make_llm(model, plugins={"poisoner": Poisoner()}, **options)
    assert tokens(llm.generate(prompts, greedy(20))) == expected


def test_used_slots_and_blocks_and_cached_prefixes_change_nothing(mixed):
    model, prompts, expected = mixed
    llm = make_llm(model, plugins={"poisoner": Poisoner()}, max_num_seqs=2, state_checkpoint_interval=16)
    for _ in range(2):
        assert tokens(llm.generate(prompts, greedy(20))) == expected
    assert llm.stats()["cache"]["free_groups"] == 2


def test_shared_prefixes_change_nothing(mixed):
    model = mixed[0]
    (stem,) = make_prompts([70], seed=5)
    prompts = [stem, stem[:33], [*stem, 5, 6, 7], stem[:32], [*stem[:64], 9], stem]
    llm = make_llm(model, plugins={"poisoner": Poisoner()}, max_num_seqs=2, state_checkpoint_interval=16)
    expected = [stock_generate(model, prompt, 8) for prompt in prompts]
    for _ in range(2):
        assert tokens(llm.generate(prompts, greedy(8))) == expected
    assert llm.stats()["cache"]["hit_tokens"] > 100


def test_preempted_requests_resume_as_if_nothing_happened(mixed):
    model = mixed[0]
    prompts = make_prompts([45] * 4, seed=2)
    llm = make_llm(model, plugins={"poisoner": Poisoner()}, max_model_len=96, max_blocks=15)
    outputs = llm.generate(prompts, greedy(36))
    assert llm.stats()["num_preemptions"] > 0
    assert tokens(outputs) == [stock_generate(model, prompt, 36) for prompt in prompts]


def test_bfloat16_stays_near_transformers(tmp_path):
    """Saved and loaded, so that transformers keeps in float32 what it keeps for a checkpoint."""
    build_model("select-all").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    (prompt,) = make_prompts([60], seed=4)
    try:
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    except RuntimeError as error:  # 5.17 mixes the dtypes of its own parts; what CI has does not
        if Version(transformers.__version__) >= Version("5.24"):
            raise
        pytest.skip(f"transformers {transformers.__version__} cannot run this model in bfloat16: {error}")
    wanted = logprobs[range(59), prompt[1:]].exp()
    llm = LLM(
        str(tmp_path),
        registry=PluginRegistry.of({"deepseek_v4": plugin}),
        skip_tokenizer=True,
        cache_memory="16MB",
        dtype="bfloat16",
        prefill_chunk_tokens=7,
    )
    output = llm.generate([prompt], greedy(1, prompt_logprobs=0))[0]
    found = torch.tensor([output.prompt_logprobs[index][prompt[index]].logprob for index in range(1, 60)]).exp()
    assert (found - wanted).abs().mean() < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("all-kinds", "released")])
def test_every_pattern_of_layers_equals_transformers(name):
    model, prompts = build_model(name), make_prompts([1, 15, 50])
    expected = [stock_generate(model, prompt, 20) for prompt in prompts]
    for chunk in (1, 5, 128):
        llm = make_llm(model, plugins={"poisoner": Poisoner()}, prefill_chunk_tokens=chunk)
        assert tokens(llm.generate(prompts, greedy(20))) == expected, f"chunks of {chunk}"


@pytest.mark.slow
def test_released_ratios_from_1_to_600_tokens():
    """Prompts end before, at and after windows of 128; outputs run across them."""
    model = build_model("released")
    prompts = make_prompts([1, 2, 5, 120, 127, 128, 129, 250, 256, 383, 500, 600])
    expected = [stock_generate(model, prompt, 16) for prompt in prompts]
    for chunk in (1, 5, 128, None):
        chosen = slice(None) if chunk != 1 else slice(0, 8)
        llm = make_llm(model, plugins={"poisoner": Poisoner()}, prefill_chunk_tokens=chunk)
        assert tokens(llm.generate(prompts[chosen], greedy(16))) == expected[chosen], f"chunks of {chunk}"
