"""Greedy tokens and prompt logprobs equal transformers' own, in float32."""

import pytest
import torch

NUM_NEW = 64
MODELS = (
    "v2-one-head-dense-tied v3-many-heads-yarn v3-no-q-lora-one-head v3-half-rotary-bias-tied-dense "
    "v32-one-head-dense-yarn v32-never-sparse glm-dsa glm-dsa-shared-many-heads-tied glm4-lite-no-q-lora-tied "
    "youtu youtu-no-q-lora-many-heads axk1 axk2 mistral4 longcat kimi-linear-full bailing-full"
).split()
"""Without the engine; test_engine.py has the others."""


def test_every_model_of_the_list_is_tested(tools):
    assert set(MODELS) == set(tools.MODELS) - tools.THROUGH_THE_ENGINE


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers_for_mixed_lengths_and_every_chunking(tools, name):
    model = tools.build_model(name)
    prompts = tools.make_prompts([1, tools.BLOCK_SIZE, tools.BLOCK_SIZE + 1, 40])
    confirmed = None
    for chunk in (1, 7, 64):
        driver = tools.Driver(tools.copy(model))
        tokens, logits = driver.generate(prompts, NUM_NEW, chunk)
        confirmed = confirmed or [tools.stock_confirm(model, *pair) for pair in zip(prompts, tokens, strict=True)]
        assert tokens == [wanted for wanted, _ in confirmed], f"chunks of {chunk}"
        for found, (_, wanted) in zip(logits, confirmed, strict=True):
            difference = (found.log_softmax(-1) - wanted.log_softmax(-1)).abs().max()
            assert difference < 1e-4, f"chunks of {chunk}"


@pytest.mark.parametrize("name", ["v3", "glm-dsa-shared"])
def test_reference_kernels_generate_the_same(tools, name):
    model = tools.build_model(name)
    prompts = tools.make_prompts([3, 30])
    fast, _ = tools.Driver(tools.copy(model)).generate(prompts, 12, 16)
    ops = ["decode", "prefill", "prefill_paged"] + ["select_tokens", "attend_selected"] * (name != "v3")
    forced = {f"mla.{op}": "reference" for op in ops}
    plain, _ = tools.Driver(tools.copy(model), forced=forced).generate(prompts, 12, 16)
    assert fast == plain


@pytest.mark.parametrize("name", ["v2", "v3", "v32"])
def test_bfloat16_stays_near_transformers(tools, name):
    model = tools.build_model(name).to(torch.bfloat16)
    (prompt,) = tools.make_prompts([40])
    _, wanted = tools.stock_generate(model, prompt, 1)
    _, (found,) = tools.Driver(tools.copy(model)).generate([prompt], 1, 16)
    difference = (found.float().softmax(-1) - wanted.float().softmax(-1)).abs()
    assert difference.mean() < 2e-3


@pytest.mark.parametrize("name", ["v3", "v32", "glm-dsa-shared"])
def test_state_dict_keeps_its_names(tools, name):
    model = tools.build_model(name)
    names = list(model.state_dict())
    assert list(tools.Driver(model).model.state_dict()) == names


def test_sparse_attention_leaves_tokens_out(tools):
    """The sparse models differ from the same weights with everything selected, so the tests above test something."""
    model = tools.build_model("v32")
    everything = tools.build_model("v32-never-sparse")
    (prompt,) = tools.make_prompts([60])
    _, (sparse,) = tools.Driver(model).generate([prompt], 1, 64)
    _, (dense,) = tools.Driver(everything).generate([prompt], 1, 64)
    difference = (sparse - dense).abs().amax(-1)
    assert difference[: model.config.index_topk].max() < 1e-4
    assert difference[model.config.index_topk :].max() > 1e-2
