"""Every kernel equals its op's reference, and temporaries stay bounded."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atom_core.plugin import KernelTable
from atom_core.plugin.ops import load_function
from atom_mla.kernels import reference, torch_cpu
from atom_mla.ops import KERNELS, OPS

CPU = torch.device("cpu")
TABLE = KernelTable.build([(op, "mla") for op in OPS], [(kernel, "mla") for kernel in KERNELS])
IN_TORCH = [kernel for kernel in KERNELS if kernel.name == "torch"]


def test_kernels_have_their_ops_parameters():
    TABLE.check_signatures()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", IN_TORCH, ids=lambda kernel: f"{kernel.op}-{kernel.name}")
def test_kernel_equals_reference(kernel, dtype):
    op = TABLE.ops[kernel.op][0]
    absolute, relative = op.tolerance[str(dtype).removeprefix("torch.")]
    for seed in range(3):
        for inputs in load_function(op.sample_inputs)(CPU, dtype, seed):
            expected = load_function(op.reference)(**inputs)
            found = load_function(kernel.function)(**inputs)
            torch.testing.assert_close(found, expected, atol=absolute, rtol=relative)


def test_write_latent_writes_only_the_named_slots():
    inputs = load_function("atom_mla.kernels.samples:write_latent")(CPU, torch.float32, 0)[0]
    before = inputs["cache"].clone()
    reference.write_latent(**inputs)
    flat, old = inputs["cache"].view(-1, 24), before.view(-1, 24)
    written = set()
    for token, slot in enumerate(inputs["slot_mapping"].tolist()):
        if slot >= 0:
            assert torch.equal(flat[slot], inputs["latent"][token])
            written.add(slot)
    kept = [slot for slot in range(48) if slot not in written]
    assert torch.equal(flat[kept], old[kept])


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_other_cache_dtypes_are_refused_with_a_reason(name, dtype):
    facts = {"latent_dim": 512, "rope_dim": 64}
    for kernel in KERNELS:
        if kernel.name == name:
            reason = kernel.supports(torch.device("cuda"), {"query": torch.bfloat16, "cache": dtype}, facts)
            assert str(dtype) in reason


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed, so there are no such kernels")
@pytest.mark.parametrize(
    ("device", "facts", "word"),
    [("cpu", {"latent_dim": 512, "rope_dim": 64}, "cpu"), ("cuda", {"latent_dim": 1024, "rope_dim": 64}, "1024 + 64")],
)
def test_triton_refuses_what_it_cannot_run_with_a_reason(device, facts, word):
    dtypes = {"query": torch.bfloat16, "cache": torch.bfloat16}
    kernels = [kernel for kernel in KERNELS if kernel.name == "triton"]
    assert len(kernels) == len(OPS)
    assert all(word in kernel.supports(torch.device(device), dtypes, facts) for kernel in kernels)


def test_a_cached_value_is_number_times_scale():
    """By hand: one key of 2 x 0.5 and one of 4 x 0.25 are the same key, and half of each value."""
    cache = torch.tensor([[[2.0, 4.0], [4.0, 16.0]]]).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 0.25]])
    query = torch.tensor([[[3.0, 0.0]]])
    for decode in (reference.decode, torch_cpu.decode):
        found = decode(query, cache, scale, **{**_paged([1], [2])}, scaling=1.0, value_dim=2)
        torch.testing.assert_close(found, torch.tensor([[[1.0, 3.0]]]))


def test_selection_among_equal_scores_is_the_earliest_and_ignores_the_chunking():
    """All scores tie at zero; one chunk of 30 and 30 chunks of one select alike."""
    cache = torch.zeros(4, 8, 4)
    query, weights = torch.ones(30, 2, 4), torch.ones(30, 2)
    whole = torch_cpu.select_tokens(query, weights, cache, None, **_paged([30], [30]), scaling=1.0, top_k=5)
    assert whole[29].tolist() == [0, 1, 2, 3, 4]
    assert whole[2].tolist() == [0, 1, 2, -1, -1]
    for token in range(30):
        one = slice(token, token + 1)
        rows = _paged([1], [token + 1])
        alone = torch_cpu.select_tokens(query[one], weights[one], cache, None, **rows, scaling=1.0, top_k=5)
        assert torch.equal(alone[0], whole[token])


LARGE = {
    "decode": (
        {"query": (14, 8, 160), "cache": 160, "value_dim": 128, "scaling": 0.1},
        [1, 3] + [1] * 10,
        [5000, 6000, 3000, 9000] * 3,
        12 * 9000 * 160,
    ),
    "prefill_paged": (
        {"query": (400, 8, 48), "expansion": (8, 64, 32), "cache": 48, "scaling": 0.2},
        [400],
        [9000],
        8 * 400 * 9000,
    ),
    "prefill_paged-absorbed": (
        {"query": (32, 64, 48), "expansion": (64, 64, 256), "cache": 272, "scaling": 0.2},
        [32],
        [9000],
        64 * 32 * 9000,
    ),
    "select_tokens": (
        {"query": (500, 8, 16), "head_weights": (500, 8), "cache": 16, "scaling": 0.25, "top_k": 64},
        [500],
        [9000],
        8 * 500 * 9000,
    ),
    "attend_selected": (
        {"query": (500, 8, 160), "selected": 256, "cache": 160, "value_dim": 128, "scaling": 0.1},
        [500],
        [4000],
        500 * 256 * 160,
    ),
}
"""Shapes, query tokens and all tokens per row, and the values that the plain way would hold at once."""


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE)
def test_long_contexts_in_bounded_memory(case):
    """Piecewise equals whole, and no temporary exceeds the scratch size, although the plain way would."""
    shapes, query_lens, seq_lens, plain_values = LARGE[case]
    inputs = _large_inputs(shapes, query_lens, seq_lens)
    name = case.split("-")[0]
    with _LargestTensor() as largest:
        found = getattr(torch_cpu, name)(**inputs)
    assert largest.values <= torch_cpu.SCRATCH_BYTES // 4 < plain_values
    expected = getattr(reference, name)(**inputs)
    if name == "select_tokens":
        # Scores that differ by less than float32 resolves may swap at the threshold.
        assert (found != expected).float().mean() < 1e-3
    else:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class _LargestTensor(TorchDispatchMode):
    """Values of the largest tensor that any operation returned."""

    values = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not function.is_view:
                self.values = max(self.values, leaf.numel())
        return result


def _paged(query_lens, seq_lens):
    blocks = [-(-seq_len // 8) for seq_len in seq_lens]
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, count in enumerate(blocks):
        tables[row, :count] = torch.arange(sum(blocks[:row]), sum(blocks[:row]) + count)
    starts = np.cumsum([0, *query_lens], dtype=np.int32)
    lens = np.array(seq_lens, dtype=np.int32)
    return {
        "block_tables": tables,
        "query_start_loc": torch.from_numpy(starts),
        "seq_lens": torch.from_numpy(lens),
        "query_start_loc_host": starts,
        "seq_lens_host": lens,
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
    }


def _large_inputs(shapes, query_lens, seq_lens):
    generator = torch.Generator().manual_seed(0)
    inputs = {"scale": None}
    for name, shape in shapes.items():
        if name == "cache":
            num_blocks = sum(-(-seq_len // 8) for seq_len in seq_lens)
            inputs[name] = torch.randn(num_blocks, 8, shape, generator=generator)
        elif name == "selected":
            inputs[name] = torch.stack([torch.randperm(3000, generator=generator)[:shape] for _ in range(500)]).int()
        elif isinstance(shape, tuple):
            inputs[name] = torch.randn(shape, generator=generator) * (0.1 if name == "expansion" else 1.0)
        else:
            inputs[name] = shape
    return {**inputs, **_paged(query_lens, seq_lens)}
