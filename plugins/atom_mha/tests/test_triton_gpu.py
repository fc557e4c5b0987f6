"""The Triton and cuDNN kernels on a CUDA device, at sizes that the interpreter cannot reach, against float32."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need the package triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

from atom_mha.kernels import reference, torch_cudnn, triton_cache, triton_decode, triton_prefill  # noqa: E402
from atom_mha.kernels.float8 import quantize  # noqa: E402

CUDA = torch.device("cuda")
BLOCK_SIZE = 16
LAYOUTS = (
    ((32, 8), (128, 128)),
    ((16, 8), (128, 128)),
    ((64, 8), (64, 64)),
    ((16, 2), (192, 128)),
    ((64, 4), (192, 128)),
    ((8, 4), (256, 256)),
    ((28, 4), (128, 128)),
    ((32, 32), (96, 96)),
    ((20, 4), (80, 80)),
    ((71, 1), (64, 64)),
)
OPTIONS = ({"window": 128, "sinks": True}, {"window": 1000}, {"chunk": 512}, {"soft_cap": 30.0}, {"window": 4096})


def paged(query_lens, seq_lens, heads=(32, 8), dims=(128, 128), dtype=torch.bfloat16, float8=False, **options):
    """Inputs of `mha.decode`: rows in shuffled blocks; slots that no row has written hold NaN."""
    num_blocks = [-(-length // BLOCK_SIZE) for length in seq_lens]
    blocks = torch.randperm(sum(num_blocks), device=CUDA).to(torch.int32).split(num_blocks)
    tables = torch.zeros(len(seq_lens), max(num_blocks), dtype=torch.int32, device=CUDA)
    caches = [torch.randn(sum(num_blocks), BLOCK_SIZE, heads[1], dim, device=CUDA, dtype=dtype) for dim in dims]
    for row, own in enumerate(blocks):
        tables[row, : len(own)] = own
        for cache in caches:
            cache[own[-1].item(), (seq_lens[row] - 1) % BLOCK_SIZE + 1 :] = torch.nan
    scales = [None, None]
    if float8:
        caches, scales = zip(*(quantize(cache) for cache in caches), strict=True)
        scales = [scale.transpose(1, 2).contiguous() for scale in scales]
    num_tokens = sum(query_lens)
    return {
        "query": torch.randn(num_tokens, heads[0], dims[0], device=CUDA, dtype=dtype),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "k_scale": scales[0],
        "v_scale": scales[1],
        "out": torch.full((num_tokens, heads[0], dims[1]), torch.nan, device=CUDA, dtype=dtype),
        "query_start_loc": starts(query_lens),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device=CUDA),
        "block_tables": tables,
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        **mask_options(heads[0], dims[0], **options),
    }


def flat(query_lens, heads=(32, 8), dims=(128, 128), dtype=torch.bfloat16, **options):
    """Inputs of `mha.prefill`."""
    num_tokens = sum(query_lens)
    return {
        "query": torch.randn(num_tokens, heads[0], dims[0], device=CUDA, dtype=dtype),
        "key": torch.randn(num_tokens, heads[1], dims[0], device=CUDA, dtype=dtype),
        "value": torch.randn(num_tokens, heads[1], dims[1], device=CUDA, dtype=dtype),
        "out": torch.full((num_tokens, heads[0], dims[1]), torch.nan, device=CUDA, dtype=dtype),
        "query_start_loc": starts(query_lens),
        "max_query_len": max(query_lens),
        **mask_options(heads[0], dims[0], **options),
    }


def mask_options(num_heads, head_dim, *, sinks=False, **options):
    chosen = {"window": None, "chunk": None, "soft_cap": None, **options}
    sink_logits = torch.randn(num_heads, device=CUDA) if sinks else None
    return {**chosen, "sinks": sink_logits, "scaling": head_dim**-0.5, "scratch": {}}


def starts(query_lens):
    return torch.tensor([0, *query_lens], device=CUDA).cumsum(0).to(torch.int32)


def assert_right(kernel, expected, inputs):
    """Relative to the norm of a float32 reference; every element of `out`, which starts as NaN, is written."""
    wide = {name: value.float() if name in ("query", "key", "value") else value for name, value in inputs.items()}
    wide["out"] = torch.zeros_like(inputs["out"], dtype=torch.float32)
    if inputs.get("k_cache") is not None and inputs["k_scale"] is None:
        wide |= {name: inputs[name].float() for name in ("k_cache", "v_cache")}
    expected(**{**wide, "scratch": {}})
    kernel(**inputs)
    error = (inputs["out"].float() - wide["out"]).norm() / wide["out"].norm()
    assert error < (5e-6 if inputs["query"].dtype == torch.float32 else 8e-3)
    first = inputs["out"].clone()
    kernel(**inputs)  # another layer of the step, with the first one's scratch
    assert torch.equal(first, inputs["out"])


@pytest.mark.parametrize(("heads", "dims"), LAYOUTS, ids=str)
def test_layouts(heads, dims):
    shape = {"heads": heads, "dims": dims}
    assert_right(triton_decode.decode, reference.decode, paged([1] * 5, [3001, 17, 16, 1, 640], **shape))
    assert_right(triton_decode.decode, reference.decode, paged([4, 4, 1], [1500, 4, 33], **shape))
    assert_right(triton_prefill.prefill_paged, reference.decode, paged([500, 33, 1], [1300, 700, 90], **shape))
    assert_right(triton_prefill.prefill, reference.prefill, flat([700, 1, 64], **shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dtypes(dtype):
    assert_right(triton_decode.decode, reference.decode, paged([1, 3], [3001, 640], dtype=dtype))
    assert_right(triton_prefill.prefill_paged, reference.decode, paged([500, 33], [1300, 700], dtype=dtype))
    assert_right(triton_prefill.prefill, reference.prefill, flat([700, 64], dtype=dtype))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_masks(options):
    for rows in ([1] * 6, [3] * 6):
        assert_right(triton_decode.decode, reference.decode, paged(rows, [3333] * 6, **options))
    assert_right(triton_prefill.prefill_paged, reference.decode, paged([1111] * 2, [3333] * 2, **options))
    assert_right(triton_prefill.prefill, reference.prefill, flat([2000] * 2, **options))


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (64, 64), (256, 256)], ids=str)
def test_float8(dims):
    assert_right(triton_decode.decode, reference.decode, paged([1] * 3, [2777, 90, 5], dims=dims, float8=True))
    assert_right(triton_decode.decode, reference.decode, paged([4, 2], [700, 64], dims=dims, float8=True))
    assert_right(triton_prefill.prefill_paged, reference.decode, paged([300, 9], [1000, 9], dims=dims, float8=True))


def test_float8_with_float16_queries():
    inputs = paged([1, 1], [900, 33], float8=True, dtype=torch.float16, window=300)
    assert_right(triton_decode.decode, reference.decode, inputs)


def test_many_rows_and_a_long_one_among_short_ones():
    lengths = torch.randint(1, 400, (300,)).tolist()
    assert_right(triton_decode.decode, reference.decode, paged([1] * 300, lengths))
    assert_right(triton_decode.decode, reference.decode, paged([1] * 8, [131072, *lengths[:7]]))
    assert_right(triton_decode.decode, reference.decode, paged([1] * 8, [5, 40000, *lengths[:6]], float8=True))


@pytest.mark.parametrize("query_lens", [[8300], [2048, 2048], [700, 700, 700], [2048, 1000], [100]], ids=str)
def test_cudnn(query_lens):
    for dims in ((128, 128), (192, 128)):
        assert_right(torch_cudnn.prefill, reference.prefill, flat(query_lens, dims=dims))


@pytest.mark.parametrize("float8", [False, True], ids=["bfloat16", "float8"])
def test_written_bits_are_the_reference_s_on_the_cpu(float8):
    key, value = torch.randn(500, 8, 128, dtype=torch.bfloat16), torch.randn(500, 8, 64, dtype=torch.bfloat16)
    key[7, 3] = 0
    slots = torch.randperm(1280)[:500]
    slots[::9] = -1
    dtype = torch.float8_e4m3fn if float8 else torch.bfloat16
    caches = [torch.zeros(80, BLOCK_SIZE, 8, dim).to(dtype) for dim in (128, 64)]
    caches += [torch.zeros(80, 8, BLOCK_SIZE) if float8 else None for _ in range(2)]
    on_device = [None if cache is None else cache.to(CUDA) for cache in caches]
    reference.write_kv(key, value, *caches, slots, {})
    triton_cache.write_kv(key.to(CUDA), value.to(CUDA), *on_device, slots.to(CUDA), {})
    for expected, found in zip(caches, on_device, strict=True):
        if expected is not None:
            assert torch.equal(expected.float(), found.cpu().float())


def test_caches_of_more_than_2_to_the_31_elements():
    num_blocks = 2**31 // (BLOCK_SIZE * 8 * 128) + 4096
    caches = [torch.empty(num_blocks, BLOCK_SIZE, 8, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]
    inputs = paged([1] * 4, [4000] * 4)
    small = inputs["k_cache"].shape[0]
    high = torch.arange(num_blocks - small, num_blocks, device=CUDA)
    slots = (high.unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=CUDA)).flatten()
    key, value = (inputs[name].flatten(0, 1).clone() for name in ("k_cache", "v_cache"))
    triton_cache.write_kv(key, value, *caches, None, None, slots, {})
    for cache, name in zip(caches, ("k_cache", "v_cache"), strict=True):
        assert torch.equal(cache[-small:].view(torch.int16), inputs[name].view(torch.int16))
    for kernel, query_len in ((triton_decode.decode, 1), (triton_prefill.prefill_paged, 300)):
        near = paged([query_len] * 4, [4000] * 4) | {"k_cache": inputs["k_cache"], "v_cache": inputs["v_cache"]}
        near["block_tables"] = inputs["block_tables"]
        far = {**near, "k_cache": caches[0], "v_cache": caches[1], "out": near["out"].clone(), "scratch": {}}
        far["block_tables"] = near["block_tables"] + (num_blocks - small)
        kernel(**near)
        kernel(**far)
        assert not near["out"].isnan().any()
        assert torch.equal(near["out"], far["out"])


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("float8", [False, True], ids=["bfloat16", "float8"])
def test_a_replay_reads_new_lengths_and_leaves_padding_alone(query_len, float8):
    """Captured at the largest lengths with padding alone, as the engine does; replayed with real rows among padding."""
    rows = 8
    inputs = paged([query_len] * rows, [4096] * rows, float8=float8)
    num_tokens = rows * query_len
    new = [torch.randn(num_tokens, 8, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]
    slot_mapping = torch.full((num_tokens,), -1, device=CUDA)
    caches = [inputs[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale")]

    def step(scratch):
        triton_cache.write_kv(*new, *caches, slot_mapping, scratch)
        triton_decode.decode(**{**inputs, "scratch": scratch})
        first = inputs["out"].clone()
        triton_decode.decode(**{**inputs, "scratch": scratch})
        return first

    inputs["query_start_loc"].zero_()
    step({})
    torch.cuda.synchronize()
    graph, scratch = torch.cuda.CUDAGraph(), {}
    with torch.cuda.graph(graph):
        first = step(scratch)
    for real in (5, 1, 8, 3):
        lens = torch.randint(query_len, 4097, (rows,), device=CUDA, dtype=torch.int32)
        inputs["seq_lens"].copy_(lens)
        ends = torch.arange(rows + 1, device=CUDA).clamp(max=real) * query_len
        inputs["query_start_loc"].copy_(ends)
        inputs["query"].normal_()
        for tensor in (inputs["query"], *new):
            tensor.normal_()
            tensor[real * query_len :] = torch.nan
        for row in range(real):
            positions = torch.arange(int(lens[row]) - query_len, int(lens[row]), device=CUDA)
            slots = inputs["block_tables"][row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            slot_mapping[row * query_len : (row + 1) * query_len] = slots
        slot_mapping[real * query_len :] = -1
        inputs["out"].fill_(torch.nan)
        graph.replay()
        replayed = inputs["out"].clone()
        inputs["out"].fill_(torch.nan)
        eager = step({})
        assert torch.equal(replayed[: real * query_len], eager[: real * query_len])
        assert torch.equal(replayed[: real * query_len], first[: real * query_len])
        assert not eager[: real * query_len].isnan().any()
        assert replayed[real * query_len :].isnan().all()
