"""The ops' references against plainer formulas, one token at a time, and every kernel against the reference."""

import copy
import inspect

import pytest
import torch

from atom_core.plugin.registry import PluginRegistry
from atom_deepseek_v4.kernels import samples
from atom_deepseek_v4.kernels.reference import attend, compress, select, write_ring
from atom_deepseek_v4.plugin import plugin

OPS = {op.name: op for op in plugin.atom_ops()}
CPU = torch.device("cpu")
TABLE = PluginRegistry.of({"deepseek_v4": plugin}).kernel_table()
KERNELS = [(op, kernel) for op in OPS.values() for kernel, _ in TABLE.kernels[op.name]]
REFERENCES = {"attend": attend, "compress": compress, "select": select, "write_ring": write_ring}


def load(path):
    module, _, name = path.partition(":")
    return getattr(__import__(module, fromlist=[name]), name)


def outcome(function, inputs):
    """What a function returns, and what it left in its arguments."""
    inputs = copy.deepcopy(inputs)
    returned = function(**inputs)
    return {"returned": returned, **inputs}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("op", "kernel"), KERNELS, ids=lambda value: value.name)
def test_equals_the_reference(op, kernel, dtype):
    reference, function = load(op.reference), load(kernel.function)
    assert list(inspect.signature(function).parameters) == list(inspect.signature(reference).parameters)
    atol, rtol = op.tolerance[dtype]
    for sample in load(op.sample_inputs)(CPU, getattr(torch, dtype), 3):
        expected, found = outcome(reference, sample), outcome(function, sample)
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found[name], value, atol=atol, rtol=rtol)
                if name in sample and name not in op.mutates:
                    assert torch.equal(value, sample[name]), f"{name} is written, but not declared so"


@pytest.mark.parametrize("name", REFERENCES)
def test_what_was_never_written_may_be_nan(name):
    for sample in getattr(samples, name)(CPU, torch.float32, 5):
        poisoned = copy.deepcopy(sample)
        for value in poisoned.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value[value == samples.GARBAGE] = torch.nan
        plain, found = outcome(REFERENCES[name], sample), outcome(REFERENCES[name], poisoned)
        for key in ("returned", "out"):
            if isinstance(plain.get(key), torch.Tensor):
                assert torch.equal(plain[key], found[key])


def test_compress_is_a_weighted_mean_of_the_windows_tokens():
    """Every position of every row by itself: take it from the step or from the ring, then pool in float64."""
    for sample in samples.compress(CPU, torch.float64, 1):
        ratio, dim = sample["position_bias"].shape
        dim = dim // 2 if sample["overlaps"] else dim
        pooled = compress(**sample)
        for index in range(len(pooled)):
            window, offset = int(sample["windows"][index]), int(sample["token_offsets"][index])
            slot, first = int(sample["slots"][index]), int(sample["num_computed"][index])
            values, gates = [], []
            for back in (1, 0) if sample["overlaps"] else (0,):
                for place in range(ratio):
                    position = (window - back) * ratio + place
                    if position < 0:
                        continue
                    ring = sample["ring"][slot]
                    both = sample["values"][position + offset] if position >= first else ring[position % len(ring)]
                    part = slice(0, dim) if back else slice(both.shape[1] - dim, None)
                    values.append(both[0, part])
                    gates.append(both[1, part] + sample["position_bias"][place, part])
            weights = torch.stack(gates).softmax(0)
            torch.testing.assert_close(pooled[index], (weights * torch.stack(values)).sum(0))


def test_select_takes_the_best_visible_entries():
    for sample in samples.select(CPU, torch.float64, 2):
        selection, starts = select(**sample), sample["query_start_loc_host"]
        per_block = sample["index_keys"].shape[1]
        for row, first in enumerate(sample["num_computed_host"]):
            for token in range(starts[row], starts[row + 1]):
                num_visible = int(first + token - starts[row] + 1) // sample["ratio"]
                scores = []
                for entry in range(num_visible):
                    block = sample["block_tables"][row, entry // per_block]
                    dots = (sample["index_query"][token] @ sample["index_keys"][block, entry % per_block]).relu()
                    scores.append(float(dots * sample["scaling"] @ sample["head_weights"][token]))
                best = sorted(range(num_visible), key=lambda entry: -scores[entry])[: sample["top_k"]]
                found = selection[token].tolist()
                assert sorted(number for number in found if number >= 0) == sorted(best)
                assert len(found) == sample["top_k"]
        assert (selection[starts[-1] :] == -1).all()


def test_attend_is_a_softmax_over_window_entries_and_sink():
    for sample in samples.attend(CPU, torch.float64, 3):
        found, starts = outcome(attend, sample)["out"], sample["query_start_loc_host"]
        for row, first in enumerate(sample["num_computed_host"]):
            for token in range(starts[row], starts[row + 1]):
                position = int(first + token - starts[row])
                ring = sample["ring"][sample["slots_host"][row]]
                keys = [
                    sample["key"][starts[row] + other - first] if other >= first else ring[other % len(ring)]
                    for other in range(max(0, position - sample["window"] + 1), position + 1)
                ]
                entries = range((position + 1) // sample["ratio"] if sample["ratio"] else 0)
                if sample["selection"] is not None:
                    entries = [entry for entry in sample["selection"][token].tolist() if entry >= 0]
                for entry in entries:
                    per_block = sample["entries"].shape[1]
                    keys.append(sample["entries"][sample["block_tables"][row, entry // per_block], entry % per_block])
                keys = torch.stack(keys)
                scores = sample["query"][token] @ keys.T * sample["scaling"]
                weights = torch.cat((scores, sample["sinks"][:, None]), 1).softmax(1)[:, :-1]
                torch.testing.assert_close(found[token], weights @ keys)
        assert torch.equal(found[starts[-1] :], sample["out"][starts[-1] :])


def test_small_tiles_change_nothing(monkeypatch):
    for name in ("select", "attend"):
        for sample in getattr(samples, name)(CPU, torch.float64, 4):
            whole = outcome(REFERENCES[name], sample)
            with monkeypatch.context() as patch:
                patch.setattr("atom_deepseek_v4.kernels.reference.SCRATCH_BYTES", 1)
                tiled = outcome(REFERENCES[name], sample)
            key = "returned" if name == "select" else "out"
            torch.testing.assert_close(tiled[key], whole[key])


def test_a_long_chunk_leaves_its_last_tokens_in_the_ring():
    sample = samples.write_ring(CPU, torch.float32, 0)[2]
    write_ring(**sample)
    ring_rows = sample["ring"].shape[1]
    for token, position in enumerate(sample["positions"].tolist()):
        if position >= sample["token_ends"][token] - ring_rows:
            written = sample["ring"][sample["token_slots"][token], position % ring_rows]
            assert torch.equal(written, sample["values"][token])


def test_tokens_that_do_not_fit_are_not_written_at_all():
    """Not just overwritten by later ones: in which order a device writes is its own affair."""
    for sample in samples.write_ring(CPU, torch.float32, 0):
        tokens = {name: value for name, value in sample.items() if name != "ring"}
        backwards = {name: value.flip(0) for name, value in tokens.items()}
        expected, found = sample["ring"].clone(), sample["ring"].clone()
        write_ring(ring=expected, **tokens)
        write_ring(ring=found, **backwards)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_samples_are_seeded(op):
    make = load(op.sample_inputs)
    first, again, other = (make(CPU, torch.float32, seed)[0] for seed in (0, 0, 100))
    name = next(name for name, value in first.items() if isinstance(value, torch.Tensor))
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert set(first) == set(inspect.signature(load(op.reference)).parameters)
