"""A second role drafts: same tokens as without it, and its caches hold what the model's hold."""

from dataclasses import replace

import pytest
import torch

from atom_core import LLM, SamplingParams
from atom_core.errors import ConfigError
from tests.tiny_models import reference_generate, tiny_config, tiny_model

NUM_TOKENS = 14
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
CHUNKS = {"prefill_chunk_tokens": 7, "num_spec_tokens": 3}
CHECKPOINTS = {"block_size": 4, "state_checkpoint_interval": 4, "max_num_seqs": 2, "num_spec_tokens": 2}
SMALL_STEPS = {"max_num_batched_tokens": 9, "num_spec_tokens": 5, "scheduling_policy": "prefill_first"}
CASES = [
    ("llama", "llama", SMALL_STEPS),
    ("llama", "qwen3_next", CHECKPOINTS),
    ("qwen3_next", "llama", CHUNKS),
    ("qwen3_next", "qwen3_next", SMALL_STEPS),
    ("mimo_v2_flash", "mimo_v2_flash", CHECKPOINTS),
    ("deepseek_v3", "mimo_v2_flash", CHUNKS),
    ("gemma3_text", "deepseek_v3", CHUNKS),
]


def prompt_of(length, seed=0):
    return [(index * index * 7 + index * 3 + seed) % 120 for index in range(length)]


PROMPTS = [prompt_of(3), prompt_of(17, 1), prompt_of(40, 2), [5, 6, 7] * 9]


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def make_llm(model, draft, **options):
    defaults = {"cache_memory": "512MB", "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return LLM(model, draft_model=draft, skip_tokenizer=True, **{**defaults, **options})


@pytest.fixture(scope="module")
def answers():
    found = {}

    def of(model_type):
        if model_type not in found:
            found[model_type] = reference_generate(tiny_model(model_type), PROMPTS, NUM_TOKENS)
        return found[model_type]

    return of


@pytest.mark.parametrize(("target", "draft", "options"), CASES, ids=str)
def test_a_draft_model_changes_no_token(answers, target, draft, options):
    llm = make_llm(tiny_model(target), tiny_model(draft, seed=1), **options)
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, GREEDY)) == answers(target)
    assert llm.stats()["num_draft_tokens"] > 0


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "mimo_v2_flash", "deepseek_v3"])
@pytest.mark.parametrize(
    "options",
    [{"block_size": 4, "prefill_chunk_tokens": 5}, {"max_model_len": 64, "block_size": 8, "max_blocks": 10}],
    ids=str,
)
def test_a_draft_model_that_is_the_model_is_always_right(answers, model_type, options):
    """Any token or state of the draft's that is missing, stale or another request's would cost acceptance."""
    llm = make_llm(tiny_model(model_type), tiny_model(model_type), num_spec_tokens=4, **options)
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, GREEDY)) == answers(model_type)
    stats = llm.stats()
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"] > 0
    if "max_blocks" in options:
        assert stats["num_preemptions"] > 0


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
def test_the_draft_draws_as_the_model_would(model_type):
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_k=20, seed=7, repetition_penalty=1.2)
    plain = make_llm(tiny_model(model_type), None).generate(PROMPTS, params)
    llm = make_llm(tiny_model(model_type), tiny_model(model_type), num_spec_tokens=3)
    assert tokens(llm.generate(PROMPTS, params)) == tokens(plain)
    assert llm.stats()["num_accepted_tokens"] == llm.stats()["num_draft_tokens"] > 0


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "mimo_v2_flash"])
def test_samples_part_in_both_roles(model_type):
    """A block or a state that the draft model's copy lacks would cost acceptance."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=7, n=3)
    plain = make_llm(tiny_model(model_type), None).generate(PROMPTS[1], params)[0]
    llm = make_llm(tiny_model(model_type), tiny_model(model_type), num_spec_tokens=3)
    output = llm.generate(PROMPTS[1], params)[0]
    found, expected = ([list(each.token_ids) for each in outputs.outputs] for outputs in (output, plain))
    assert found == expected
    assert llm.stats()["num_accepted_tokens"] == llm.stats()["num_draft_tokens"] > 0


def test_a_poor_draft_model_is_still_believed_sometimes_and_never_wrongly():
    """A draft model near the model: some drafts are right, some are not, and the output does not tell which."""
    near = tiny_model("qwen3_next")
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    expected = reference_generate(tiny_model("qwen3_next"), PROMPTS, NUM_TOKENS)
    llm = make_llm(tiny_model("qwen3_next"), near, num_spec_tokens=3, max_blocks=18, block_size=8)
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    stats = llm.stats()
    assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]
    assert stats["cache"]["hit_tokens"] > 0


def test_a_hit_holds_for_both_roles():
    """The draft model starts from the shared blocks and its own checkpoint, and is right from there on."""
    llm = make_llm(tiny_model("qwen3_next"), tiny_model("qwen3_next"), num_spec_tokens=3)
    prompt = prompt_of(50)
    llm.generate(prompt, GREEDY)
    before = llm.stats()
    output = llm.generate(prompt, GREEDY)[0]
    stats = llm.stats()
    assert output.metrics.num_cached_tokens == 48
    accepted, drafted = (stats[name] - before[name] for name in ("num_accepted_tokens", "num_draft_tokens"))
    assert accepted == drafted > 0


def test_planning_adds_both_roles():
    types = ("llama", "qwen3_next")
    options = {"num_spec_tokens": 3, "max_model_len": 128, "block_size": 16}
    alone = [make_llm(tiny_model(one), None, **options).engine.inspection.figures for one in types]
    engine = make_llm(*map(tiny_model, types), **options).engine
    figures = engine.inspection.all_figures
    assert figures.bytes_per_block == sum(one.bytes_per_block for one in alone)
    assert figures.group_bytes == sum(one.group_bytes for one in alone)
    assert figures.slots_per_req["draft/gdn"] == 1 + 3
    plan = engine.plan
    allocated = [
        tensor.numel() * tensor.element_size()
        for runner in (engine.runner, engine.speculator.runner)
        for tensors in (runner.states.caches.paged, runner.states.caches.state)
        for tensor in tensors.values()
    ]
    assert sum(allocated) == plan.total_bytes - plan.workspace_bytes


def test_a_draft_model_of_another_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocabulary has 64 tokens, the model's has 128"):
        make_llm(tiny_model("llama"), tiny_model("llama", vocab_size=64))


def test_a_draft_model_for_fewer_tokens_is_refused():
    with pytest.raises(ConfigError, match=r"does not reach as far as the model.*at most 64"):
        make_llm(tiny_model("llama"), tiny_model("llama", max_position_embeddings=64))


@pytest.mark.parametrize("options", [{"speculation": "draft_model"}, {"draft_model": "x", "speculation": "ngram"}])
def test_a_draft_model_and_the_proposer_go_together(options):
    from atom_core import EngineConfig

    with pytest.raises(ConfigError, match="'draft_model' where a draft_model is named"):
        EngineConfig(model="x", **options)


def test_a_draft_model_from_a_folder(tmp_path, answers):
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "draft")
    llm = make_llm(tiny_model("llama"), str(tmp_path / "draft"))
    assert llm.engine.config.num_spec_tokens == 4
    assert tokens(llm.generate(PROMPTS, GREEDY)) == answers("llama")


def test_a_stopped_and_a_short_request_leave_the_caches_alike(answers):
    llm = make_llm(tiny_model("qwen3_next"), tiny_model("qwen3_next"), num_spec_tokens=4, block_size=4)
    stop = answers("qwen3_next")[2][5]
    for _ in range(2):
        llm.generate(PROMPTS, replace(GREEDY, stop_token_ids=(stop,)))
        llm.generate(PROMPTS, replace(GREEDY, max_tokens=1))
        assert tokens(llm.generate(PROMPTS, GREEDY)) == answers("qwen3_next")
    assert llm.stats()["num_accepted_tokens"] == llm.stats()["num_draft_tokens"]
    assert tiny_config("llama").vocab_size == 128
