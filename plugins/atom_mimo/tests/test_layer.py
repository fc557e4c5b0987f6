"""One layer, driven by hand: chunks, drafts, windows, slots, against attention over the whole sequence."""

import numpy as np
import pytest
import torch

from atom_core.errors import LayerError

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
WINDOWS = [None, 1, 2, 8, 31, 1000]


@pytest.mark.parametrize("kernel", [None, "reference"], ids=["torch_cpu", "reference"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_any_chunking_equals_the_whole(tools, window, kernel):
    for chunks in ([75], [1] * 75, [7] * 10 + [5], [64, 11], [3, 40, 1, 1, 30]):
        driver = tools.Driver(window, kernel=kernel)
        sequence = tools.Sequence.random(75, group=2)
        found = torch.cat([driver.run(tools.Row(sequence, count))[0] for count in chunks])
        torch.testing.assert_close(found, driver.expected(sequence), **TOLERANCE)


def test_a_chunk_of_many_tiles(tools):
    driver = tools.Driver(20)
    sequence = tools.Sequence.random(310, group=0)
    found = torch.cat([driver.run(tools.Row(sequence, count))[0] for count in (9, 301)])
    torch.testing.assert_close(found, driver.expected(sequence), **TOLERANCE)


@pytest.mark.parametrize("kernel", [None, "reference"], ids=["torch_cpu", "reference"])
@pytest.mark.parametrize("num_spec_tokens", [1, 3])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_verifying_drafts_with_any_acceptance_equals_one_token_at_a_time(tools, window, num_spec_tokens, kernel):
    """Three requests in one step, with none to all drafts right, and a chunk beside them."""
    driver = tools.Driver(window, num_spec_tokens=num_spec_tokens, kernel=kernel)
    choices = np.random.default_rng(num_spec_tokens)
    sequences = [tools.Sequence.random(90, group=group, seed=group) for group in range(3)]
    outputs = [[driver.run(tools.Row(sequence, 3 + 11 * index))[0]] for index, sequence in enumerate(sequences)]
    beside = tools.Sequence.random(90, group=3, seed=9)
    accepted = set()
    while any(sequence.num_computed < 90 for sequence in sequences):
        rows = []
        for sequence in sequences:
            if sequence.num_computed < 90:
                count = min(int(choices.integers(1, num_spec_tokens + 2)), 90 - sequence.num_computed)
                drafts = 0 if choices.random() < 0.2 else num_spec_tokens + 1 - count
                accepted.add((count - 1, drafts))
                rows.append(tools.Row(sequence, count, drafts, decode=True))
        chunk = [tools.Row(beside, min(5, 90 - beside.num_computed))] if beside.num_computed < 90 else []
        found = driver.run(*rows, *chunk)
        for row, output in zip(rows, found, strict=False):
            outputs[row.sequence.group].append(output)
    assert len(accepted) >= 2 * num_spec_tokens
    for sequence, parts in zip(sequences, outputs, strict=True):
        torch.testing.assert_close(torch.cat(parts), driver.expected(sequence), **TOLERANCE)


def test_rejected_drafts_are_invisible_to_a_following_chunk(tools):
    driver = tools.Driver(8, num_spec_tokens=3)
    sequence = tools.Sequence.random(40, group=1)
    steps = [(12, 0, False), (1, 3, True), (9, 0, False), (1, 3, True), (17, 0, False)]
    found = torch.cat([driver.run(tools.Row(sequence, *step))[0] for step in steps])
    torch.testing.assert_close(found, driver.expected(sequence), **TOLERANCE)


@pytest.mark.parametrize("window", [7, 8, 9])
def test_windows_that_differ_by_one_differ(tools, window):
    driver = tools.Driver(window)
    sequence = tools.Sequence.random(40, group=0)
    found = torch.cat([driver.run(tools.Row(sequence, *step))[0] for step in [(20,), *[(1, 0, True)] * 20]])
    torch.testing.assert_close(found, driver.expected(sequence), **TOLERANCE)
    for other in {7, 8, 9} - {window}:
        difference = (found - driver.expected(sequence, other)).abs().amax((1, 2))
        first = min(window, other)
        assert difference[:first].max() < 1e-5
        assert difference[first:].min() > 1e-3


@pytest.mark.parametrize("window", [None, 8])
def test_a_step_of_decodes_and_chunks_equals_each_alone(tools, window):
    lengths = {0: (20, 1, True), 1: (3, 1, True), 2: (0, 13, False), 3: (9, 9, False)}
    driver = tools.Driver(window)
    sequences = {group: tools.Sequence.random(40, group, seed=group) for group in lengths}
    rows = []
    for group, (before, count, decode) in lengths.items():
        if before:
            driver.run(tools.Row(sequences[group], before))
        rows.append(tools.Row(sequences[group], count, decode=decode))
    for row, found in zip(rows, driver.run(*rows, padding_tokens=3), strict=True):
        end = row.sequence.num_computed
        torch.testing.assert_close(found, driver.expected(row.sequence)[end - row.count : end], **TOLERANCE)


@pytest.mark.parametrize("window", [None, 8])
def test_padding_rows_change_nothing(tools, window):
    driver = tools.Driver(window)
    sequences = [tools.Sequence.random(20, group, seed=group) for group in (0, 2)]
    driver.run(*(tools.Row(sequence, 10) for sequence in sequences), padding_tokens=2)
    before = {name: tensor.clone() for name, tensor in driver.tensors.items()}
    rows = [tools.Row(sequence, 1, decode=True) for sequence in sequences]
    found = driver.run(*rows, padding_rows=2, padding_tokens=2)
    for sequence, output in zip(sequences, found, strict=True):
        torch.testing.assert_close(output, driver.expected(sequence)[10:11], **TOLERANCE)
    changes = [tensor.nan_to_num() != before[name].nan_to_num() for name, tensor in driver.tensors.items()]
    assert sum(int(changed.sum()) for changed in changes) == 2 * tools.HEADS.row_elements


@pytest.mark.parametrize("kernel", [None, "reference"], ids=["torch_cpu", "reference"])
def test_padding_rows_beside_chunks_change_nothing(tools, kernel):
    driver = tools.Driver(8, kernel=kernel)
    sequence = tools.Sequence.random(20, group=1)
    found = torch.cat([driver.run(tools.Row(sequence, 10), padding_rows=2)[0] for _ in range(2)])
    torch.testing.assert_close(found, driver.expected(sequence), **TOLERANCE)


def test_a_reused_slot_shows_nothing_of_the_request_before(tools):
    driver = tools.Driver(8)
    first, second = (tools.Sequence.random(30, group=1, seed=seed) for seed in (1, 2))
    driver.run(tools.Row(first, 30))
    found = torch.cat([driver.run(tools.Row(second, *step))[0] for step in [(4,), *[(1, 0, True)] * 26]])
    torch.testing.assert_close(found, driver.expected(second), **TOLERANCE)


def test_the_ring_has_a_row_per_visible_key_and_per_draft(tools):
    driver = tools.Driver(9, num_groups=5, num_spec_tokens=2)
    assert driver.tensors["mimo.ring_k"].shape == (1, 5, 11, 2, 12)
    assert driver.tensors["mimo.ring_v"].shape == (1, 5, 11, 2, 8)


def test_what_the_module_passes_must_be_what_was_learned(tools):
    layer = tools.Driver(8).layer
    query, key, value = torch.zeros(1, 4, 12), torch.zeros(1, 2, 12), torch.zeros(1, 2, 8)
    with pytest.raises(LayerError, match="sliding_window=9; atom-mimo learned 8"):
        layer.attend(query, key, value, scaling=1.0, sliding_window=9)
    with pytest.raises(LayerError, match=r"value \(1, 2, 12\); atom-mimo learned Heads"):
        layer.attend(query, key, key, scaling=1.0, sliding_window=8)
    with pytest.raises(LayerError, match=r"sinks \(2,\), expected \(4,\)"):
        layer.attend(query, key, value, scaling=1.0, sliding_window=8, s_aux=torch.zeros(2))
