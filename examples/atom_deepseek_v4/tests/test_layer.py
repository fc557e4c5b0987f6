"""Single layers driven by hand against transformers' own module: chunks, drafts, slots, blocks, padding."""

import numpy as np
import pytest
import torch
from v4_driver import Driver, Row
from v4_models import HEAVY, SLIDING, SPARSE, build_model

from atom_core.errors import LayerError

KINDS = {SLIDING: 0, SPARSE: 1, HEAVY: 2}


@pytest.fixture(scope="module")
def model():
    return build_model("all-kinds")


@pytest.fixture(scope="module")
def released():
    return build_model("released")


def finish(driver, request, chunk):
    while request.num_computed < len(request.hidden):
        driver.run(Row(request, min(chunk, len(request.hidden) - request.num_computed)))


@pytest.mark.parametrize("chunk", [1, 3, 16, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_equal_the_whole_sequence(model, kind, chunk):
    driver = Driver(model, KINDS[kind])
    finish(driver, driver.request(70, slot=2), chunk)


@pytest.mark.parametrize("kind", KINDS)
def test_released_ratios_and_window_over_600_tokens(released, kind):
    driver = Driver(released, KINDS[kind], block_size=128)
    request = driver.request(600, slot=1)
    for count in (1, 126, 1, 1, 128, 5, 250, 88):
        driver.run(Row(request, count))
    assert request.num_computed == 600


@pytest.mark.parametrize("num_spec_tokens", [1, 3, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_any_acceptance_equals_no_drafts(model, kind, num_spec_tokens):
    """Every number of right and of wrong tokens, at every place in a window; then plain steps and chunks again."""
    generator = np.random.default_rng(num_spec_tokens)
    driver = Driver(model, KINDS[kind], num_spec_tokens)
    request = driver.request(150, slot=3)
    driver.run(Row(request, 17))
    while (left := 150 - request.num_computed) > 0:
        size = int(generator.integers(1, num_spec_tokens + 2))
        accepted = min(left, int(generator.integers(1, size + 1)))
        driver.run(Row(request, accepted, drafts=size - accepted, decode=True))
        if left > 12 and generator.random() < 0.2:
            driver.run(Row(request, int(generator.integers(1, 6))))


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_batches_with_reused_slots_and_padding(model, kind):
    """Decodes, verify rows and chunks of different requests together; finished requests leave slot and blocks."""
    generator = np.random.default_rng(7)
    driver = Driver(model, KINDS[kind], num_spec_tokens=2)
    lengths, running, seed = [40, 7, 65, 16, 1, 33, 50], {}, 0
    while lengths or running:
        for slot in set(range(driver.num_slots)) - set(running):
            if lengths:
                seed += 1
                running[slot] = driver.request(lengths.pop(), slot, seed)
        rows = []
        for request in running.values():
            left = len(request.hidden) - request.num_computed
            if request.num_computed and generator.random() < 0.6:
                drafts = int(generator.integers(0, 3))
                rows.append(Row(request, 1, drafts, decode=True))
            elif generator.random() < 0.8:
                rows.append(Row(request, min(left, int(generator.integers(1, 20)))))
        if rows:
            driver.run(*rows, padding_rows=int(generator.integers(0, 3)), padding_tokens=int(generator.integers(0, 4)))
        for slot, request in list(running.items()):
            if request.num_computed == len(request.hidden):
                driver.free_blocks[:0] = request.blocks
                del running[slot]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_slot_and_shared_blocks_restore_a_prefix(model, kind):
    """What the core does for a prefix hit: the state after a block's last token is in the slot and in the blocks."""
    driver = Driver(model, KINDS[kind], num_spec_tokens=2)
    request = driver.request(60, slot=0)
    driver.run(Row(request, 30))
    driver.run(Row(request, 2, drafts=1, decode=True))  # the copy is made with a stale draft behind the boundary
    again = driver.request(60, slot=2)
    for tensor in driver.state.values():
        tensor[:, 2] = tensor[:, 0]
        tensor[:, 0] = torch.nan
    again.blocks[:2] = request.blocks[:2]
    again.num_computed = 32
    finish(driver, again, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_and_padding_leave_no_trace_in_blocks(model, kind):
    """Blocks that no token of the step lies in stay NaN."""
    driver = Driver(model, KINDS[kind])
    request = driver.request(48, slot=1)
    driver.run(Row(request, 31), padding_rows=2, padding_tokens=5)
    foreign = [block for block in range(driver.num_blocks) if block not in request.blocks[:2]]
    for tensor in driver.paged.values():
        assert tensor[:, foreign].isnan().all()
    for tensor in driver.state.values():
        assert tensor[:, [0, 2, 3]].isnan().all()


def test_a_row_without_a_slot_is_refused(model):
    driver = Driver(model, KINDS[SPARSE])
    with pytest.raises(LayerError, match=r"rows \[0\] have tokens but no state slot"):
        driver.run(Row(driver.request(5, slot=-1), 5))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"attention_mask": torch.zeros(1)}, "got attention_mask"),
        ({"cache": "a cache"}, "got cache"),
        ({"past_key_values": "a cache"}, "got past_key_values"),
        ({"shiny": 1}, "got shiny"),
    ],
    ids=str,
)
def test_calls_that_the_layer_cannot_express_are_refused(model, keywords, message):
    driver = Driver(model, KINDS[HEAVY])
    batch = driver.batch([Row(driver.request(3, slot=0), 3)])
    driver.layer.step.begin(batch, {})
    angles = driver.angles(batch.positions)
    with pytest.raises(LayerError, match=message):
        driver.layer(torch.zeros(1, 3, 32), position_embeddings=angles, **keywords)
    with pytest.raises(LayerError, match=r"\[1, 3, hidden_size\]"):
        driver.layer(torch.zeros(1, 4, 32), position_embeddings=angles)
