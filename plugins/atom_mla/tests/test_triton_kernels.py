"""The Triton kernels under Triton's interpreter, at small shapes, against the reference. See `conftest.py` for how.

bfloat16 is left out: its products are wrong in the interpreter.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need the package triton")

from atom_core.plugin.ops import load_function
from atom_mla.kernels import reference, samples
from atom_mla.ops import KERNELS, OPS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here; see test_triton_gpu")

CPU = torch.device("cpu")
SLOW = ("mla.select_tokens", "mla.attend_selected")
IN_TRITON = [
    pytest.param(kernel, id=kernel.op, marks=[pytest.mark.slow] * (kernel.op in SLOW))
    for kernel in KERNELS
    if kernel.name == "triton"
]
TOLERANCE = {op.name: op.tolerance for op in OPS}
DTYPES = [torch.float32, torch.float16]


def comparable(tensor):
    """float8 as float32: torch compares what has arithmetic."""
    return tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", IN_TRITON)
def test_kernel_equals_reference(kernel, dtype):
    absolute, relative = TOLERANCE[kernel.op][str(dtype).removeprefix("torch.")]
    (op,) = [op for op in OPS if op.name == kernel.op]
    cases = load_function(op.sample_inputs)(CPU, dtype, 0)
    # The selection is slow to interpret, and the same in both dtypes once there are scores.
    for inputs in cases[:3] if kernel.op == "mla.select_tokens" and dtype == torch.float16 else cases:
        expected_inputs = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
        }
        expected = load_function(op.reference)(**expected_inputs)
        found = load_function(kernel.function)(**inputs)
        for name in op.mutates:
            if inputs[name] is not None:
                pair = comparable(inputs[name]), comparable(expected_inputs[name])
                torch.testing.assert_close(*pair, atol=0, rtol=0, equal_nan=True)
        if not op.mutates:
            torch.testing.assert_close(found, expected, atol=absolute, rtol=relative)


def case(query_lens, seq_lens, seed=0, heads=3, float8=False):
    rows = samples._Rows(CPU, torch.float32, seed, query_lens, seq_lens, float8=float8)
    query = rows.random(rows.num_tokens, heads, 40)
    return rows, {"query": query, **rows.cache(40), **rows.paged(), "scaling": 0.3, "value_dim": 32}


ROWS = {
    "long-among-short": ((1, 1, 0, 1), (1, 300, 0, 65)),
    "verify": ((3, 1), (233, 64)),
    "nothing": ((0, 0), (0, 0)),
}


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("numbers", [(16, 16, 1), (16, 32, 8)], ids=str)
def test_rows_cut_into_stretches(shape, numbers):
    """Few, many and more programs than tiles; stretches of rows of very different lengths."""
    from atom_mla.kernels import triton_latent

    tile_rows, keys, resident = numbers
    rows, inputs = case(*ROWS[shape])
    tiles = triton_latent.LatentTiles(tile_rows, keys, 4, 1, resident)
    hosts = ("query_start_loc_host", "seq_lens_host")
    arguments = {name: value for name, value in inputs.items() if name not in hosts}
    found = triton_latent.attend_all(**arguments, tiles=tiles)
    torch.testing.assert_close(found, reference.decode(**inputs), atol=2e-5, rtol=2e-5)
    arguments |= {"selected": rows.selection(400)}
    for name in ("max_query_len", "max_seq_len"):
        del arguments[name]
    found = triton_latent.attend_some(**arguments, tiles=tiles)
    expected = reference.attend_selected(**inputs, selected=arguments["selected"])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("seq_lens", [(64, 8192, 300), (1, 1), (0, 7, 100000), tuple(range(0, 4000, 131))], ids=len)
@pytest.mark.parametrize("target", [1, 9, 66])
def test_stretches_cover_every_key_once_and_fit_the_parts(seq_lens, target):
    """What the device finds for every item, against the bounds by which `attend_all` sizes launch and parts."""
    gluon_latent = pytest.importorskip("atom_mla.kernels.gluon_latent", reason="lists what `find_work` finds")
    num_rows, keys = len(seq_lens), 64
    work = torch.full((num_rows + target, 8), -1, dtype=torch.int32)
    starts = torch.tensor([3, *[3 + row for row in range(1, num_rows + 1)]], dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    gluon_latent._list_work[(num_rows + target,)](
        work, starts, lens, num_rows, target, 0,
        ROWS=1 << (num_rows - 1).bit_length(), KEYS=keys, SELECTED=False, MAY_SPLIT=True,
    )  # fmt: skip
    ends = dict.fromkeys(range(num_rows), 0)
    parts = []
    for row, token, num_tokens, num_keys, begin, end, splits, part in work.tolist():
        if num_tokens == 0:
            continue
        assert (token, num_keys) == (row, seq_lens[row])
        assert begin == ends[row]
        assert begin < end
        assert begin % keys == 0
        ends[row] = end
        parts += [part] if splits > 1 else []
    assert tuple(ends.values()) == seq_lens
    assert parts == list(range(len(parts)))
    assert len(parts) <= 8 * target // 5 + 1


def test_padding_changes_nothing():
    """Rows without tokens, tokens without rows, NaN in both."""
    from atom_mla.kernels import triton_latent, triton_select

    rows, inputs = case((1, 1), (40, 9))
    padded = {**inputs, "query": torch.cat((inputs["query"], torch.full((2, 3, 40), float("nan"))))}
    padded["query_start_loc"] = torch.cat((inputs["query_start_loc"], inputs["query_start_loc"][-1:].repeat(2)))
    padded["seq_lens"] = torch.cat((inputs["seq_lens"], torch.zeros(2, dtype=torch.int32)))
    padded["block_tables"] = torch.cat((inputs["block_tables"], torch.zeros_like(inputs["block_tables"])))
    padded["max_seq_len"] = 4096
    found = triton_latent.decode(**padded)
    assert torch.equal(found[2:], torch.zeros(2, 3, 32))
    torch.testing.assert_close(found[:2], reference.decode(**inputs), atol=2e-5, rtol=2e-5)
    selected = torch.cat((rows.selection(16), torch.full((2, 16), 3, dtype=torch.int32)))
    found = triton_latent.attend_selected(**padded, selected=selected)
    assert torch.equal(found[2:], torch.zeros(2, 3, 32))
    expected = reference.attend_selected(**inputs, selected=selected[:2])
    torch.testing.assert_close(found[:2], expected, atol=2e-5, rtol=2e-5)
    index = {name: value for name, value in padded.items() if name != "value_dim"}
    chosen = triton_select.select_tokens(**index, head_weights=torch.ones(4, 3), top_k=4)
    assert torch.equal(chosen[2:], torch.full((2, 4), -1, dtype=torch.int32))


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("room", [16, 48, 4096])
def test_prefixes_expanded_in_pieces(monkeypatch, room, float8):
    """Rows whose keys are in several pieces, pieces with keys of several rows, tokens of different pieces."""
    from atom_mla.kernels import triton_prefix

    monkeypatch.setattr(triton_prefix, "_ALIGNMENT", 16)
    monkeypatch.setattr(triton_prefix, "LARGEST_PIECE_BYTES", room * 2 * 24 * 4)
    rows = samples._Rows(CPU, torch.float32, 1, (20, 0, 37, 1), (52, 0, 37, 17), float8=float8)
    inputs = {
        "query": rows.random(rows.num_tokens, 2, 24),
        "expansion": rows.random(2, 16 + 8, 32) * 32**-0.5,
        **rows.cache(40),
        **rows.paged(),
        "scaling": 0.2,
    }
    expected = reference.prefill_paged(**inputs)
    found = torch.full_like(expected, float("nan"))
    names = ("query", "expansion", "cache", "scale", "block_tables", "query_start_loc", "seq_lens")
    active = np.where(np.diff(inputs["query_start_loc_host"]) > 0, inputs["seq_lens_host"], 0)
    triton_prefix._expanded(*(inputs[name] for name in names), active, 37, 0.2, found)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("room", [16, 100, 10000])
def test_pieces_hold_every_key_once(room, monkeypatch):
    from atom_mla.kernels import triton_prefix

    monkeypatch.setattr(triton_prefix, "_ALIGNMENT", 16)
    seq_lens = np.array([0, 1, 15, 16, 17, 250, 0, 3], dtype=np.int32)
    keys = {row: [] for row in range(len(seq_lens))}
    for piece in triton_prefix._pieces(seq_lens, room):
        used = 0
        for row, first, count, place in piece.tolist():
            assert place >= used
            assert place % 16 == first % 16 == 0
            used = place + count
            keys[row] += range(first, first + count)
        assert used <= room
    assert all(own == list(range(seq_lens[row])) for row, own in keys.items())


def test_scores_in_pieces_select_the_same(monkeypatch):
    """One query token's scores at a time, and all at once."""
    from atom_mla.kernels import triton_select

    inputs = samples.select_tokens(CPU, torch.float32, 5)[1]
    whole = triton_select.select_tokens(**inputs)
    monkeypatch.setattr(triton_select, "LARGEST_PIECE_BYTES", 1)
    assert torch.equal(triton_select.select_tokens(**inputs), whole)
    assert torch.equal(reference.select_tokens(**inputs), whole)
