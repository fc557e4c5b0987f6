"""The Triton kernels under Triton's interpreter, at small shapes, against the reference. See `conftest.py` for how.

bfloat16 is left out: its products are wrong in the interpreter.
"""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need the package triton")

from atom_mha.kernels import reference, triton_cache, triton_decode, triton_dequantize, triton_prefill, triton_schedule
from atom_mha.kernels.samples import paged_case, prefill_case, write_kv
from atom_mha.ops import OPS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here; see test_triton_gpu")

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16]
TOLERANCE = {op.name: op.tolerance for op in OPS}
DECODES = {
    "one-token": {"query_lens": [1], "seq_lens": [1]},
    "blocks": {"query_lens": [1] * 5, "seq_lens": [16, 17, 1, 40, 64]},
    "long-among-short": {"query_lens": [1, 1, 1], "seq_lens": [3, 300, 5], "num_kv_heads": 1},
    "window": {"query_lens": [1] * 3, "seq_lens": [5, 34, 90], "window": 20},
    "chunk": {"query_lens": [1] * 3, "seq_lens": [16, 33, 90], "chunk": 16, "num_heads": 4},
    "verify-window-padding": {"query_lens": [4, 4, 1, 0, 3], "seq_lens": [4, 35, 70, 1, 20], "window": 9},
    "verify-chunk": {"query_lens": [3, 3], "seq_lens": [18, 33], "chunk": 16},
    "sinks": {"query_lens": [1, 2, 2], "seq_lens": [50, 51, 18], "sinks": True, "v_head_dim": 8},
    "sinks-in-parts": {"query_lens": [1, 1], "seq_lens": [200, 7], "sinks": True, "window": 150, "num_kv_heads": 1},
    "soft-cap": {"query_lens": [1, 3], "seq_lens": [48, 33], "soft_cap": 5.0, "num_kv_heads": 1},
    "192-128": {"query_lens": [1, 2], "seq_lens": [20, 9], "num_heads": 2, "head_dim": 192, "v_head_dim": 128},
    "96": {"query_lens": [1], "seq_lens": [40], "num_heads": 4, "head_dim": 96, "v_head_dim": 96},
    "256": {"query_lens": [1], "seq_lens": [20], "num_heads": 2, "head_dim": 256, "v_head_dim": 256},
    "many-heads": {"query_lens": [5], "seq_lens": [20], "num_heads": 34, "num_kv_heads": 2, "window": 6},
    "small-blocks": {"query_lens": [1, 1], "seq_lens": [9, 22], "block_size": 4},
    "large-blocks": {"query_lens": [1, 1], "seq_lens": [70, 90], "block_size": 64, "window": 30},
    "float8": {"query_lens": [1, 3, 0], "seq_lens": [48, 33, 9], "float8": True, "v_head_dim": 8},
    "float8-mask": {"query_lens": [2, 1], "seq_lens": [50, 20], "float8": True, "window": 9, "sinks": True},
}
CHUNKS = {
    "one-token": {"query_lens": [1], "seq_lens": [2]},
    "prefixes": {"query_lens": [16, 5, 33, 0], "seq_lens": [32, 21, 60, 4], "num_heads": 2},
    "window": {"query_lens": [30, 3], "seq_lens": [34, 80], "window": 12, "num_heads": 2},
    "chunk": {"query_lens": [30, 40], "seq_lens": [47, 41], "chunk": 16, "num_heads": 2},
    "sinks": {"query_lens": [20, 7], "seq_lens": [40, 8], "sinks": True, "window": 5, "v_head_dim": 8},
    "soft-cap": {"query_lens": [20, 40], "seq_lens": [21, 50], "soft_cap": 5.0, "num_heads": 2},
    "192-128": {"query_lens": [9], "seq_lens": [40], "num_heads": 2, "head_dim": 192, "v_head_dim": 128},
    "float8": {"query_lens": [20, 9], "seq_lens": [70, 9], "float8": True, "window": 30, "num_heads": 2},
    "float8-chunk": {"query_lens": [30, 0, 5], "seq_lens": [150, 3, 45], "float8": True, "chunk": 64, "head_dim": 24},
}
FLAT = {
    "rows": {"query_lens": [1, 7, 0, 64], "num_heads": 2},
    "window": {"query_lens": [30, 70], "window": 12, "num_heads": 2},
    "chunk": {"query_lens": [16, 40, 17], "chunk": 16, "num_heads": 2, "num_kv_heads": 1},
    "sinks": {"query_lens": [20, 33], "sinks": True, "v_head_dim": 8, "num_heads": 2},
    "soft-cap": {"query_lens": [20, 33], "soft_cap": 5.0, "window": 8, "num_heads": 2},
}


def assert_equal(kernel, expected, inputs, op):
    """Compare; unwritten outputs are NaN, and a second layer finds the first one's scratch."""
    wanted = {**inputs, "out": torch.zeros_like(inputs["out"]), "scratch": {}}
    expected(**wanted)
    inputs["out"].fill_(torch.nan)
    kernel(**inputs)
    absolute, relative = TOLERANCE[op][str(inputs["query"].dtype).removeprefix("torch.")]
    torch.testing.assert_close(inputs["out"], wanted["out"], atol=absolute, rtol=relative)
    first = inputs["out"].clone()
    kernel(**inputs)
    assert torch.equal(first, inputs["out"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DECODES)
def test_decode(case, dtype):
    assert_equal(triton_decode.decode, reference.decode, paged_case(1, CPU, dtype, **DECODES[case]), "mha.decode")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CHUNKS)
def test_prefill_paged(case, dtype):
    inputs = paged_case(2, CPU, dtype, **CHUNKS[case])
    assert_equal(triton_prefill.prefill_paged, reference.prefill_paged, inputs, "mha.prefill_paged")


@pytest.mark.parametrize(("heads_at_a_time", "pieces"), [(0, 0), (1, 9), (2, 6), (3, 3), (6, 2), (9, 1)])
def test_float8_chunks_in_pieces(monkeypatch, heads_at_a_time, pieces):
    """The copy in 16 bit holds some heads of a row, or some rows; no copy where a single head is too much."""
    shape = {"query_lens": [20, 9, 1], "seq_lens": [140, 9, 130], "num_heads": 6, "num_kv_heads": 3, "v_head_dim": 8}
    inputs = paged_case(6, CPU, torch.float16, **shape, float8=True, sinks=True)
    head_bytes = 2 * 128 * (16 + 8) * 2
    monkeypatch.setattr(triton_dequantize, "COPY_BYTES", heads_at_a_time * head_bytes)
    cut = triton_dequantize.pieces(3, 3, 140, 16, 8)
    assert len(cut) == pieces
    covered = sorted((r, h) for p in cut for r in range(3)[p.rows] for h in range(3)[p.heads])
    assert covered == [(row, head) for row in range(3) for head in range(3)][: 9 if pieces else 0]
    assert_equal(triton_prefill.prefill_paged, reference.prefill_paged, inputs, "mha.prefill_paged")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FLAT)
def test_prefill(case, dtype):
    assert_equal(triton_prefill.prefill, reference.prefill, prefill_case(3, CPU, dtype, **FLAT[case]), "mha.prefill")


def test_prefill_from_a_later_token():
    """What cuDNN leaves over: the first tokens of each row stay as somebody else wrote them."""
    inputs = prefill_case(4, CPU, torch.float32, query_lens=[20, 8, 33], num_heads=2)
    wanted = inputs["out"].clone()
    reference.prefill(**{**inputs, "out": wanted})
    inputs["out"].fill_(7.0)
    inputs.pop("scratch")
    triton_prefill.prefill_from(16, **inputs)
    left = torch.cat([torch.arange(start, min(start + 16, end)) for start, end in ((0, 20), (20, 28), (28, 61))])
    done = torch.tensor([token for token in range(61) if token not in left.tolist()])
    assert (inputs["out"][left] == 7.0).all()
    torch.testing.assert_close(inputs["out"][done], wanted[done], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_written_bits_are_the_reference_s(dtype):
    for inputs in write_kv(CPU, dtype, 5):
        names = [name for name in ("k_cache", "v_cache", "k_scale", "v_scale") if inputs[name] is not None]
        wanted = {name: inputs[name].clone() for name in names}
        reference.write_kv(**{**inputs, **wanted})
        triton_cache.write_kv(**inputs)
        for name in names:
            found, expected = inputs[name].float(), wanted[name].float()
            if wanted[name].dtype == torch.float8_e4m3fn:
                # The interpreter loses the carry where rounding reaches the next power of two.
                carried = expected.frexp().mantissa.abs() == 0.5
                assert carried.float().mean() < 0.1
                found, expected = found[~carried], expected[~carried]
            assert torch.equal(found, expected)
            assert expected.any()


@pytest.mark.parametrize(
    ("few", "few_items", "most_items", "longest_row", "window", "longest"),
    [
        (False, 1, 1, 700, 600, 604),  # no row has more keys than are worth cutting
        (False, 1, 3, 9000, None, 3008),  # 571 tiles in 3: 191 at most, and 563 of them in 3 equal parts
        (True, 10, 20, 700, 600, 80),  # 46 tiles, 10 items with 5 each, since these are less than 256 keys
        (True, 10, 20, 9000, None, 544),  # 20 items, of which the short rows take 3: 17 parts of the 563 tiles
    ],
)
def test_a_schedule_covers_every_key_once(few, few_items, most_items, longest_row, window, longest):
    """Also of rows whose first keys no token sees; padding rows get nothing."""
    query_lens, seq_lens, keys = [1, 0, 4, 1, 1], [5, 9, longest_row, 64, 33], 16
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    schedule = triton_schedule.make_schedule(
        {}, starts, torch.tensor(seq_lens, dtype=torch.int32), window, None,
        keys=keys, block_size=8, few=few, few_items=few_items, most_items=most_items, counters=2,
    )  # fmt: skip
    assert schedule.num_items == (most_items if few else most_items + 5)
    found = {row: [] for row in range(len(seq_lens))}
    for item, (row, begin, end, splits, first_item, start, num_tokens, position) in enumerate(
        schedule.items.T.tolist()
    ):
        if splits:
            found[row].append((begin, end))
            assert (start, num_tokens, position) == (starts[row], query_lens[row], seq_lens[row] - query_lens[row])
            assert first_item + len(found[row]) - 1 == item
    for row, stretches in found.items():
        if query_lens[row] == 0:
            assert stretches == []
            continue
        first = max(0, seq_lens[row] - query_lens[row] - (window or 9999) + 1) // 8 * 8
        assert [begin for begin, _ in stretches] == [first, *(end for _, end in stretches[:-1])]
        assert stretches[-1][1] == seq_lens[row]
        assert all((end - begin) % keys == 0 for begin, end in stretches[:-1])
        assert all(
            splits == len(stretches) for splits in schedule.items[3, schedule.items[0] == row].tolist() if splits
        )
    assert not schedule.arrived.any()
    assert max(end - begin for stretches in found.values() for begin, end in stretches) == longest


def test_rows_outside_the_call_stay_untouched():
    inputs = paged_case(1, CPU, torch.float32, query_lens=[2, 3, 1], seq_lens=[20, 33, 9])
    whole = inputs["out"].clone()
    reference.decode(**{**inputs, "out": whole})
    for function in (triton_decode.decode, triton_prefill.prefill_paged):
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
