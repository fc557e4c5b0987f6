"""Every kernel equals its op's reference; the reference equals an independent dense softmax."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom_core.plugin.ops import load_function
from atom_mha.kernels import reference, torch_cpu
from atom_mha.kernels.samples import paged_case, prefill_case
from atom_mha.ops import KERNELS, OPS

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def assert_equal_kernels(function, expected_function, inputs, mutates, tolerance):
    def run(kernel):
        own = {name: value.clone() if torch.is_tensor(value) else value for name, value in inputs.items()}
        own["scratch"] = {}
        kernel(**own)
        # float8 as float32: torch compares what has arithmetic
        first = {name: _comparable(own[name]) for name in mutates if own[name] is not None}
        kernel(**own)  # a second layer finds the first one's scratch
        for name in first:
            torch.testing.assert_close(_comparable(own[name]), first[name], rtol=0, atol=0, equal_nan=True)
        return first

    found, expected = run(function), run(expected_function)
    absolute, relative = tolerance
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=absolute, rtol=relative)


def _comparable(tensor):
    return tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor.clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_cpu_kernel_equals_reference(op, dtype):
    kernel = load_function(next(kernel.function for kernel in KERNELS if kernel.op == op.name))
    for seed in range(3):
        for inputs in load_function(op.sample_inputs)(CPU, dtype, seed):
            name = str(dtype).removeprefix("torch.")
            assert_equal_kernels(kernel, load_function(op.reference), inputs, op.mutates, op.tolerance[name])


def test_signatures_agree():
    for op in OPS:
        expected = list(inspect.signature(load_function(op.reference)).parameters)
        for kernel in KERNELS:
            if kernel.op == op.name:
                assert list(inspect.signature(load_function(kernel.function)).parameters) == expected


@st.composite
def rows(draw):
    num_rows = draw(st.integers(1, 6))
    query_lens, seq_lens = [], []
    for _ in range(num_rows):
        seq_len = draw(st.integers(1, 70))
        seq_lens.append(seq_len)
        query_lens.append(draw(st.integers(0, min(seq_len, 40))))
    if sum(query_lens) == 0:
        query_lens[0] = 1
    return query_lens, seq_lens


options = st.fixed_dictionaries(
    {},
    optional={"window": st.integers(1, 40), "soft_cap": st.just(3.0), "sinks": st.just(True)},
) | st.fixed_dictionaries({"chunk": st.integers(1, 40)})
shapes = st.sampled_from([(6, 2, 16, 16), (4, 4, 8, 8), (4, 1, 8, 12), (8, 2, 24, 8)])


@settings(max_examples=150, deadline=None)
@given(rows(), options, shapes, st.sampled_from([1, 4, 16]), st.booleans(), st.integers(0, 1000))
def test_paged_ops_on_random_rows(lens, chosen, shape, block_size, shuffled, seed):
    names = ("num_heads", "num_kv_heads", "head_dim", "v_head_dim")
    query_lens, seq_lens = lens
    inputs = paged_case(
        seed,
        CPU,
        torch.float64,
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_size=block_size,
        shuffled=shuffled,
        **dict(zip(names, shape, strict=True)),
        **chosen,
    )
    for function in (torch_cpu.decode, torch_cpu.prefill_paged):
        assert_equal_kernels(function, reference.decode, inputs, ("out",), (1e-9, 1e-9))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=4).filter(any), options, shapes, st.integers(0, 1000))
def test_prefill_on_random_rows(query_lens, chosen, shape, seed):
    names = ("num_heads", "num_kv_heads", "head_dim", "v_head_dim")
    inputs = prefill_case(
        seed, CPU, torch.float64, query_lens=query_lens, **dict(zip(names, shape, strict=True)), **chosen
    )
    assert_equal_kernels(torch_cpu.prefill, reference.prefill, inputs, ("out",), (1e-9, 1e-9))


@pytest.mark.parametrize("chosen", [{"sinks": True}, {"soft_cap": 2.0}, {"v_head_dim": 8}, {"window": 3}], ids=str)
def test_rows_without_tokens_among_chunks_change_nothing(chosen):
    """Spelt-out attention (sinks, soft-cap, values unlike keys) divides its memory by the number of keys."""
    inputs = prefill_case(2, CPU, torch.float64, query_lens=[0, 9, 0, 0, 20, 0], **chosen)
    assert_equal_kernels(torch_cpu.prefill, reference.prefill, inputs, ("out",), (1e-9, 1e-9))


@pytest.mark.parametrize(
    "chosen", [{}, {"window": 7}, {"window": 300}, {"chunk": 16}, {"soft_cap": 2.0}, {"sinks": True}], ids=str
)
def test_reference_equals_a_loop_over_single_scores(chosen):
    """An oracle that shares no code with the reference: one query and one head at a time, explicit exponentials."""
    inputs = prefill_case(5, CPU, torch.float64, query_lens=[40], num_heads=4, num_kv_heads=2, **chosen)
    reference.prefill(**inputs)
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    for i in range(40):
        seen = [
            j
            for j in range(i + 1)
            if (i - j < chosen.get("window", 1000))
            and (j // chosen.get("chunk", 1000) == i // chosen.get("chunk", 1000))
        ]
        for head in range(4):
            scores = torch.stack([query[i, head] @ key[j, head // 2] * 0.25 for j in seen])
            if "soft_cap" in chosen:
                scores = 2.0 * (scores / 2.0).tanh()
            weights = scores.exp()
            total = weights.sum() + (inputs["sinks"][head].double().exp() if "sinks" in chosen else 0.0)
            expected = (weights.unsqueeze(1) * value[seen, head // 2]).sum(0) / total
            torch.testing.assert_close(inputs["out"][i, head], expected)


def test_rows_outside_the_call_stay_untouched():
    inputs = paged_case(1, CPU, torch.float32, query_lens=[2, 3, 1], seq_lens=[20, 33, 9])
    whole = inputs["out"].clone()
    reference.decode(**{**inputs, "out": whole})
    for function in (reference.decode, torch_cpu.decode, torch_cpu.prefill_paged):
        part = torch.full_like(whole, 7.0)
        function(
            **{
                **inputs,
                "out": part,
                "scratch": {},
                "query_start_loc": inputs["query_start_loc"][1:3],
                "seq_lens": inputs["seq_lens"][1:2],
                "block_tables": inputs["block_tables"][1:2],
            }
        )
        torch.testing.assert_close(part[2:5], whole[2:5])
        assert (part[:2] == 7.0).all()
        assert (part[5:] == 7.0).all()


def test_a_lone_row_in_consecutive_blocks_is_read_in_place():
    inputs = paged_case(3, CPU, torch.float32, query_lens=[1], seq_lens=[70], shuffled=False)
    torch_cpu.decode(**inputs)
    (group,) = inputs["scratch"][None, None]
    assert isinstance(group.slots, slice)
    assert group.visible is None
