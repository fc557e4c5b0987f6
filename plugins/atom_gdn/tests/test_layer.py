"""Models whose every layer is linear, driven by hand: chunks, drafts, slots, against transformers' own modules."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gdn_driver import Driver, Row
from gdn_models import lively_model, tiny_config

from atom_core.errors import LayerError
from atom_gdn.plugin import GdnPlugin

LINEAR = ["linear_attention"] * 2
MODELS = {
    "next": ("qwen3_next", {}),
    "next-dense": ("qwen3_next", {"mlp_only_layers": [0, 1]}),
    "3_5": ("qwen3_5_text", {"linear_num_value_heads": 2}),
    "3_5-moe": ("qwen3_5_moe_text", {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 3}),
}
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module", params=MODELS)
def stock(request):
    model_type, changes = MODELS[request.param]
    return lively_model(tiny_config(model_type, layer_types=LINEAR, **changes))


@pytest.fixture(scope="module")
def small():
    return lively_model(tiny_config("qwen3_5_text", layer_types=LINEAR))


def make_driver(model, **kwargs):
    return Driver(copy.deepcopy(model), GdnPlugin(), **kwargs)


@torch.inference_mode()
def stock_logits(model, tokens):
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def prompt(length, seed=0, vocabulary=97):
    return np.random.default_rng(seed).integers(0, vocabulary, length).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
def test_chunked_prefill_equals_stock(stock, chunk):
    tokens = prompt(70)
    driver = make_driver(stock)
    request = driver.lease(1, tokens)
    found = []
    while request.num_computed < len(tokens):
        found += driver.run([Row(request, min(chunk, len(tokens) - request.num_computed))])
    torch.testing.assert_close(torch.cat(found), stock_logits(stock, tokens), **TOLERANCE)


@pytest.mark.parametrize("kernel", [None, "reference"])
def test_mixed_steps_equal_stock(stock, kernel):
    """Requests of several lengths, arriving one after another, decode beside chunks of others."""
    driver = make_driver(stock, num_groups=5, kernel=kernel)
    targets = [prompt(length, seed) for seed, length in enumerate([1, 16, 17, 3, 70])]
    prompts = [1, 16, 17, 2, 50]
    requests = [driver.lease(4 - index, tokens) for index, tokens in enumerate(targets)]
    found = {id(request): [] for request in requests}
    step = 0
    while any(request.num_computed < len(request.tokens) for request in requests):
        rows = []
        for index, (request, prompt_length) in enumerate(zip(requests, prompts, strict=True)):
            left = len(request.tokens) - request.num_computed
            if left and step >= index:
                decode = request.num_computed >= prompt_length
                rows.append(Row(request, 1 if decode else min(2 + step, prompt_length - request.num_computed), decode))
        ordered = sorted(rows, key=lambda row: not row.decode)
        for row, logits in zip(ordered, driver.run(rows, padding_rows=step % 3), strict=True):
            found[id(row.request)].append(logits)
        step += 1
    for request in requests:
        torch.testing.assert_close(torch.cat(found[id(request)]), stock_logits(stock, request.tokens), **TOLERANCE)


def test_greedy_tokens_are_those_of_stock(stock):
    """One forward of the whole text gives the choice after each token; it equals the text where that is greedy."""
    driver = make_driver(stock)
    request = driver.lease(2, prompt(20))
    request.tokens.append(int(driver.run([Row(request, 20)])[0][-1].argmax()))
    while len(request.tokens) < 84:
        request.tokens.append(int(driver.run([Row(request, 1, decode=True)])[0][-1].argmax()))
    assert request.tokens[20:] == stock_logits(stock, request.tokens)[19:-1].argmax(-1).tolist()


@pytest.mark.parametrize("kernel", [None, "reference"])
def test_verify_with_any_acceptance_equals_sequential(small, kernel):
    """Rejected drafts leave no trace, whatever number was accepted, and a plain step may follow a verify step."""
    tokens = prompt(60, seed=7)
    expected = stock_logits(small, tokens)
    driver = make_driver(small, num_groups=3, num_spec_tokens=3, kernel=kernel)
    assert driver.slots_per_req == 4
    random = np.random.default_rng(1)
    requests = [driver.lease(group, tokens) for group in range(3)]
    drafts_of = {0: [3], 1: [0, 1, 2, 3], 2: [3, 0]}
    for request in requests:
        driver.run([Row(request, 5)])
    step = 0
    while running := [request for request in requests if request.num_computed < 50]:
        rows, before = [], {}
        for request in running:
            drafts = drafts_of[request.group][step % len(drafts_of[request.group])]
            accepted = int(random.integers(0, drafts + 1))
            before[id(request)] = (request.num_computed, accepted)
            position = request.num_computed
            # Accepted drafts are right; the first rejected one and all behind it are not.
            wrong = [(token + 1) % 97 for token in tokens[position + 1 + accepted : position + 1 + drafts]]
            request.tokens = tokens[: position + 1 + accepted] + wrong + [0] * 4
            rows.append(Row(request, 1 + drafts, decode=True))
        for row, logits in zip(rows, driver.run(rows), strict=True):
            position, accepted = before[id(row.request)]
            kept = slice(position, position + 1 + accepted)
            torch.testing.assert_close(logits[: 1 + accepted], expected[kept], **TOLERANCE)
            row.request.num_computed, row.request.offset = position + 1 + accepted, accepted
        step += 1


def test_a_chunk_after_a_verify_step_reads_the_accepted_slot(small):
    tokens = prompt(40, seed=3)
    driver = make_driver(small, num_spec_tokens=2)
    request = driver.lease(1, tokens)
    driver.run([Row(request, 6)])
    driver.run([Row(request, 3, decode=True)])
    request.num_computed, request.offset = 8, 1  # one of two drafts kept
    found = driver.run([Row(request, 32)])[0]
    torch.testing.assert_close(found, stock_logits(small, tokens)[8:], **TOLERANCE)


def test_a_reused_group_and_other_groups_leave_no_trace(small):
    driver = make_driver(small, num_groups=2)
    alone = make_driver(small, num_groups=2)
    first, second, other = prompt(30, 1), prompt(30, 2), prompt(30, 3)
    neighbour = driver.lease(0, other)
    driver.run([Row(neighbour, 10), Row(driver.lease(1, first), 30)])
    found = driver.run([Row(neighbour, 1, decode=True), Row(driver.lease(1, second), 30)])[1]
    torch.testing.assert_close(found, alone.run([Row(alone.lease(1, second), 30)])[0], **TOLERANCE)


def test_only_the_rows_own_slots_are_written(small):
    driver = make_driver(small, num_groups=4, num_spec_tokens=1)
    decoding, chunk = driver.lease(1, prompt(9)), driver.lease(3, prompt(9))
    driver.run([Row(decoding, 3)])
    driver.run([Row(decoding, 2, decode=True), Row(chunk, 4)], padding_rows=0)
    for tensor in driver.state.values():
        written = ~tensor.isnan().flatten(2).any(2).any(0)
        assert written.tolist() == [False, False, True, True, False, False, True, False]


def test_bfloat16_state_stays_close_and_keeps_the_verify_property(small):
    plugin = GdnPlugin(state_dtype="bfloat16")
    driver = Driver(copy.deepcopy(small), plugin, num_spec_tokens=3)
    assert driver.state["gdn.recurrent_state"].dtype == torch.bfloat16
    assert driver.state["gdn.conv_state"].dtype == torch.float32
    tokens = prompt(24)
    together, single = driver.lease(0, tokens), driver.lease(1, tokens)
    driver.run([Row(together, 20), Row(single, 20)])
    at_once = driver.run([Row(together, 4, decode=True)])[0]
    one_by_one = torch.cat([driver.run([Row(single, 1, decode=True)])[0] for _ in range(4)])
    torch.testing.assert_close(at_once, one_by_one, **TOLERANCE)
    torch.testing.assert_close(at_once, stock_logits(small, tokens)[20:], atol=0.3, rtol=0.1)


def test_bfloat16_model_keeps_its_convolution_state_in_bfloat16(small):
    model = copy.deepcopy(small).bfloat16()
    driver = make_driver(model)
    assert driver.state["gdn.recurrent_state"].dtype == torch.float32
    assert driver.state["gdn.conv_state"].dtype == torch.bfloat16
    tokens = prompt(40)
    request = driver.lease(0, tokens)
    found = torch.cat(
        [driver.run([Row(request, count, count == 1)])[0] for count in (30, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)]
    )
    torch.testing.assert_close(found.float(), stock_logits(small, tokens), atol=0.5, rtol=0.2)


@pytest.mark.parametrize("name", ["cache", "cache_params", "attention_mask", "cu_seq_lens_q"])
def test_what_the_layer_does_not_know_stops_the_step(small, name):
    driver = make_driver(small)
    request = driver.lease(0, prompt(3))
    layer = driver.layers[0]
    driver.step.begin(driver._batch([Row(request, 3)], 0), {})
    with pytest.raises(LayerError, match=r"linear_attn .*atom-gdn.* was called with"):
        layer(torch.zeros(1, 3, 64), **{name: object()})
    with pytest.raises(LayerError, match="expected \\[1, 3, hidden_size\\]"):
        layer(torch.zeros(1, 2, 64), cache=None, attention_mask=None, use_cache=True)
    driver.step.end()
