"""Steps of unusual shape: verify rows, empty rows, shared blocks, other company, sharded heads."""

import pytest
import torch

NAMES = ["v2-lite", "v3", "v32", "glm-dsa-shared"]


@pytest.mark.parametrize("name", NAMES)
def test_verify_rows_equal_sequential_decodes(tools, name):
    model = tools.build_model(name)
    prompt, follow = tools.make_prompts([30, 5])
    one = tools.Driver(tools.copy(model))
    request = one.request(64)
    one.run([], [(request, prompt)])
    sequential = torch.cat([one.run([(request, [token])], []) for token in follow])
    other = tools.Driver(tools.copy(model))
    request, neighbour = other.request(64), other.request(64)
    other.run([], [(request, prompt), (neighbour, prompt[:9])])
    verified = other.run([(request, follow), (neighbour, [5])], [])[: len(follow)]
    torch.testing.assert_close(verified, sequential, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_rejected_drafts_are_overwritten(tools, name):
    model = tools.build_model(name)
    prompt, follow, drafts = tools.make_prompts([30, 4, 4])
    plain = tools.Driver(tools.copy(model))
    request = plain.request(64)
    plain.run([], [(request, prompt)])
    wanted = [plain.run([(request, [token])], []) for token in follow]
    driver = tools.Driver(tools.copy(model))
    request = driver.request(64)
    driver.run([], [(request, prompt)])
    for token, logits in zip(follow, wanted, strict=True):
        found = driver.run([(request, [token, *drafts])], [])[:1]
        request.num_computed -= len(drafts)
        torch.testing.assert_close(found, logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_output_depends_neither_on_company_nor_on_place(tools, name):
    model = tools.build_model(name)
    first, second, third = tools.make_prompts([33, 9, 17])
    alone, _ = tools.Driver(tools.copy(model)).generate([second], 10, 5)
    together, _ = tools.Driver(tools.copy(model)).generate([first, second, third], 10, 5)
    reversed_, _ = tools.Driver(tools.copy(model)).generate([third, second, first], 10, 5)
    assert together[1] == alone[0]
    assert reversed_ == together[::-1]


@pytest.mark.parametrize("name", NAMES)
def test_shared_prefix_blocks_equal_a_cold_start(tools, name):
    model = tools.build_model(name)
    (prompt,) = tools.make_prompts([40])
    cold = tools.Driver(tools.copy(model))
    wanted = cold.run([], [(cold.request(48), prompt)])
    for shared in (1, 4):
        driver = tools.Driver(tools.copy(model))
        owner, borrower = driver.request(48), driver.request(48)
        driver.run([], [(owner, prompt)])
        borrower.blocks[:shared] = owner.blocks[:shared]
        borrower.num_computed = shared * tools.BLOCK_SIZE
        found = driver.run([], [(borrower, prompt[borrower.num_computed :])])
        start = shared * tools.BLOCK_SIZE
        torch.testing.assert_close(found, wanted[start:], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_tokens_change_nothing(tools, name):
    model = tools.build_model(name)
    prompt, other = tools.make_prompts([30, 30])
    results = []
    for padded in (False, True):
        driver = tools.Driver(tools.copy(model))
        request, chunk, empty = driver.request(64), driver.request(64), driver.request(8)
        padding = [(empty, [])] if padded else []
        driver.run([], [(request, prompt)])
        results.append(driver.run([(request, [3]), *padding], [(chunk, other), *padding]))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["v3", "v32", "axk2"])
def test_ranks_that_share_the_heads_add_up(tools, name):
    """Each rank's attention output, before the sum over ranks, adds up to the whole layer's."""
    model = tools.build_model(name)
    prompt, follow = tools.make_prompts([30, 3])
    layer_name = "model.layers.0.self_attn"
    whole = _attention_outputs(tools.Driver(tools.copy(model)), layer_name, prompt, follow)
    parts = []
    for rank in range(2):
        sharded = tools.copy(model)
        for module in (layer.self_attn for layer in sharded.model.layers):
            _shard(module, rank)
        parts.append(_attention_outputs(tools.Driver(sharded, tp_size=2), layer_name, prompt, follow))
    for total, first, second in zip(whole, *parts, strict=True):
        torch.testing.assert_close(first + second, total, atol=1e-4, rtol=1e-4)


def _shard(module, rank):
    for name in ("q_b_proj", "q_gate_proj", "kv_b_proj"):
        if hasattr(module, name):
            linear = getattr(module, name)
            linear.weight = torch.nn.Parameter(linear.weight.chunk(2)[rank].contiguous())
    module.o_proj.weight = torch.nn.Parameter(module.o_proj.weight.chunk(2, 1)[rank].contiguous())


def _attention_outputs(driver, layer_name, prompt, follow):
    found = []
    driver.model.get_submodule(layer_name).register_forward_hook(lambda *call: found.append(call[2][0]))
    request = driver.request(64)
    driver.run([], [(request, prompt[:20])])
    driver.run([], [(request, prompt[20:])])
    for token in follow:
        driver.run([(request, [token])], [])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_float8_cache_serves_chunks_and_decodes_alike(tools, name):
    """One chunk, chunks of 7 and decodes give the same; the cache is coarser than the model's own, and not by much."""
    model = tools.build_model(name)
    (prompt,) = tools.make_prompts([40])
    results = []
    for chunk in (40, 7, 1):
        driver = tools.Driver(tools.copy(model), cache_dtype=torch.float8_e4m3fn)
        results.append(driver.generate([prompt], 6, chunk))
    for tokens, logits in results[1:]:
        assert tokens == results[0][0]
        torch.testing.assert_close(logits[0], results[0][1][0], atol=2e-4, rtol=1e-4)
    exact = tools.Driver(tools.copy(model)).run([], [(driver.request(48), prompt)])
    difference = (results[0][1][0] - exact).norm() / exact.norm()
    # Coarser index keys choose other tokens, too.
    assert 1e-4 < difference < (0.5 if "index_cache" in driver.layers[0].cache_widths() else 0.2)
