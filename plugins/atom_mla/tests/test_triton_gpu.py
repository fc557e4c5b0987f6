"""The Triton and cuDNN kernels on a CUDA device, at sizes that the interpreter cannot reach, against float32."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need the package triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

from atom_core.plugin.ops import load_function  # noqa: E402
from atom_mla.kernels import reference, torch_cpu  # noqa: E402
from atom_mla.kernels.float8 import quantize  # noqa: E402
from atom_mla.ops import KERNELS, OPS  # noqa: E402

CUDA = torch.device("cuda")
IN_TRITON = [kernel for kernel in KERNELS if kernel.name == "triton"]
LATENT, ROPE = 512, 64
SCALING = 192**-0.5
RAGGED = [1, 63, 64, 65, 0, 4097, 777, 12000]


def relative_error(found, expected):
    """In the 2-norm; NaN never passes a bound."""
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def paged(query_lens, seq_lens, width=LATENT + ROPE, block_size=64, float8=False, spare_blocks=0):
    """Rows in shuffled blocks, the last ones of a large cache if there are spare ones; NaN where no row has written."""
    counts = [-(-length // block_size) for length in seq_lens]
    order = (torch.randperm(sum(counts), device=CUDA) + spare_blocks).to(torch.int32)
    tables = torch.zeros(len(seq_lens), max(1, *counts), dtype=torch.int32, device=CUDA)
    cache = torch.empty(sum(counts) + spare_blocks, block_size, width, device=CUDA, dtype=torch.bfloat16)
    cache[spare_blocks:].normal_()
    first = 0
    for row, count in enumerate(counts):
        own = order[first : first + count]
        tables[row, :count] = own
        first += count
        if count:
            cache[own[-1].item(), (seq_lens[row] - 1) % block_size + 1 :] = torch.nan
    scale = None
    if float8:
        cache, scale = quantize(cache.flatten(0, 1))
        cache, scale = cache.view(-1, block_size, width), scale.view(-1, block_size)
    starts = np.cumsum([0, *query_lens], dtype=np.int32)
    lens = np.array(seq_lens, dtype=np.int32)
    return {
        "cache": cache,
        "scale": scale,
        "block_tables": tables,
        "query_start_loc": torch.from_numpy(starts).to(CUDA),
        "seq_lens": torch.from_numpy(lens).to(CUDA),
        "query_start_loc_host": starts,
        "seq_lens_host": lens,
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
    }


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=CUDA, dtype=dtype)


def decode_case(query_lens, seq_lens, heads, **options):
    query = random(sum(query_lens), heads, LATENT + ROPE)
    return {"query": query, **paged(query_lens, seq_lens, **options), "scaling": SCALING, "value_dim": LATENT}


def select_case(query_lens, seq_lens, heads=64, top_k=2048, **options):
    tokens = sum(query_lens)
    case = {"query": random(tokens, heads, 128), "head_weights": torch.randn(tokens, heads, device=CUDA)}
    return {**case, **paged(query_lens, seq_lens, width=128, **options), "scaling": 128**-0.5, "top_k": top_k}


def selection_of(query_lens, seq_lens, top_k):
    """[tokens, top_k] ascending random positions that each token may see, then -1."""
    selected = torch.full((sum(query_lens), top_k), -1, dtype=torch.int32, device=CUDA)
    token = 0
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        for visible in range(seq_len - query_len + 1, seq_len + 1):
            chosen = torch.randperm(visible, device=CUDA)[:top_k].sort().values
            selected[token, : chosen.numel()] = chosen.to(torch.int32)
            token += 1
    return selected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", IN_TRITON, ids=lambda kernel: kernel.op)
def test_kernel_equals_reference(kernel, dtype):
    (op,) = [op for op in OPS if op.name == kernel.op]
    absolute, relative = op.tolerance[str(dtype).removeprefix("torch.")]
    for seed in range(3):
        for inputs in load_function(op.sample_inputs)(CUDA, dtype, seed):
            copies = {k: value.clone() if isinstance(value, torch.Tensor) else value for k, value in inputs.items()}
            expected = load_function(op.reference)(**copies)
            found = load_function(kernel.function)(**inputs)
            for name in op.mutates:
                if inputs[name] is not None:
                    pair = inputs[name].float(), copies[name].float()
                    torch.testing.assert_close(*pair, atol=0, rtol=0, equal_nan=True)
            if not op.mutates:
                torch.testing.assert_close(found, expected, atol=absolute, rtol=relative)


def modules(heads, float8):
    """`triton_latent`, and `gluon_latent` where it takes the case."""
    from atom_mla.kernels import gluon_latent, triton_latent

    hopper = torch.cuda.get_device_capability()[0] == 9 and heads > 32 and not float8
    return [triton_latent, gluon_latent] if hopper else [triton_latent]


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", [128, 64, 40, 16, 5])
def test_decode_of_ragged_rows(heads, block_size, float8):
    for query_len in (1, 3):
        query_lens = [min(query_len, length) for length in RAGGED]
        case = decode_case(query_lens, RAGGED, heads, block_size=block_size, float8=float8)
        expected = reference.decode(**case)
        for module in modules(heads, float8):
            assert relative_error(module.decode(**case), expected) < 8e-3


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("heads", [128, 16])
def test_selected_tokens(heads, float8):
    for query_lens, seq_lens in (([1] * 4, [5000, 100, 2048, 3]), ([1], [9000]), ([70, 3], [3000, 50])):
        case = decode_case(query_lens, seq_lens, heads, float8=float8)
        case["selected"] = selection_of(query_lens, seq_lens, 2048)
        expected = reference.attend_selected(**case)
        for module in modules(heads, float8):
            assert relative_error(module.attend_selected(**case), expected) < 8e-3


@pytest.mark.parametrize("query_lens", [[4000, 30, 1, 700], [3072]], ids=len)
def test_chunks_without_a_prefix(query_lens):
    from atom_mla.kernels import torch_cudnn, triton_prefill

    tokens = sum(query_lens)
    starts = np.cumsum([0, *query_lens], dtype=np.int32)
    case = {
        "query": random(tokens, 8, 192),
        "key": random(tokens, 8, 192),
        "value": random(tokens, 8, 128),
        "query_start_loc": torch.from_numpy(starts).to(CUDA),
        "query_start_loc_host": starts,
        "max_query_len": max(query_lens),
        "scaling": SCALING,
    }
    expected = reference.prefill(**case)
    assert relative_error(triton_prefill.prefill(**case), expected) < 8e-3
    assert relative_error(torch_cudnn.prefill(**case), expected) < 8e-3


def test_a_long_row_alone_is_shared_by_cudnn_and_triton():
    from atom_mla.kernels import torch_cudnn

    starts = np.array([0, 2100], dtype=np.int32)
    shared = {"query_start_loc": torch.from_numpy(starts).to(CUDA), "query_start_loc_host": starts}
    query, key, value = random(2100, 4, 192), random(2100, 4, 192), random(2100, 4, 128)
    case = {"query": query, "key": key, "value": value, **shared, "max_query_len": 2100, "scaling": SCALING}
    assert relative_error(torch_cudnn.prefill(**case), reference.prefill(**case)) < 8e-3


@pytest.mark.parametrize("float8", [False, True])
def test_chunks_over_prefixes_in_pieces(monkeypatch, float8):
    from atom_mla.kernels import triton_prefix

    heads = 16
    monkeypatch.setattr(triton_prefix, "LARGEST_PIECE_BYTES", 2048 * heads * 256 * 2)
    query_lens, seq_lens = [300, 5, 700, 0], [5000, 3000, 700, 0]
    case = paged(query_lens, seq_lens, float8=float8)
    case |= {"query": random(sum(query_lens), heads, 192), "scaling": SCALING}
    case["expansion"] = random(heads, 256, LATENT) * LATENT**-0.5
    assert relative_error(triton_prefix.prefill_paged(**case), reference.prefill_paged(**case)) < 1.2e-2


@pytest.mark.parametrize("float8", [False, True])
def test_selection_scores_are_those_of_float32(float8):
    """Where a choice differs from float32's, its score is as good as the last chosen one's but for rounding."""
    from atom_mla.kernels import triton_select

    for query_lens, seq_lens in (([1] * 3, [9000, 2000, 30000]), ([100, 7], [8000, 2500])):
        case = select_case(query_lens, seq_lens, float8=float8)
        found, expected = triton_select.select_tokens(**case), torch_cpu.select_tokens(**case)
        differ = found != expected
        assert (found >= 0).sum(1).eq((expected >= 0).sum(1)).all()
        assert differ.any(1).sum() <= len(found)
        for token in range(len(found)):
            missed = set(expected[token].tolist()) ^ set(found[token].tolist())
            assert len(missed) <= 8
        ordered = found.masked_fill(found < 0, 2**31 - 1)
        assert (ordered.diff(dim=1) >= 0).all()


def test_a_long_context_is_scored_in_bounded_memory():
    from atom_mla.kernels import LARGEST_PIECE_BYTES, triton_select

    case = select_case([2000], [131072])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    triton_select.select_tokens(**case)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= LARGEST_PIECE_BYTES + 2000 * 2048 * 4 + (1 << 20) < 2000 * 131072 * 4


def test_places_beyond_31_bits():
    """Blocks at the end of a cache of more than 2^31 elements."""
    from atom_mla.kernels import triton_cache, triton_prefix, triton_select

    spare = 2**31 // (64 * 576) + 1
    case = decode_case([1, 2], [300, 70], 16, spare_blocks=spare)
    assert case["cache"].numel() > 2**31
    chosen = {"selected": selection_of([1, 2], [300, 70], 128)}
    for heads in (16, 64):
        case["query"] = random(3, heads, LATENT + ROPE)
        for module in modules(heads, False):
            assert relative_error(module.decode(**case), reference.decode(**case)) < 8e-3
            found, expected = module.attend_selected(**case, **chosen), reference.attend_selected(**case, **chosen)
            assert relative_error(found, expected) < 8e-3
    chunk = {name: value for name, value in case.items() if name != "value_dim"}
    chunk |= {"query": random(3, 16, 192), "expansion": random(16, 256, LATENT) * LATENT**-0.5}
    expected = reference.prefill_paged(**chunk)
    assert relative_error(triton_prefix.prefill_paged(**chunk), expected) < 1.2e-2
    found = torch.empty_like(expected)
    names = ("query", "expansion", "cache", "scale", "block_tables", "query_start_loc", "seq_lens", "seq_lens_host")
    triton_prefix._expanded(*(chunk[name] for name in names), 2, SCALING, found)
    assert relative_error(found, expected) < 1.2e-2
    slots = torch.tensor([case["cache"].shape[0] * 64 - 1, -1, spare * 64 + 5], device=CUDA)
    latent = random(3, 576)
    triton_cache.write_latent(latent, case["cache"], None, slots)
    assert torch.equal(case["cache"].view(-1, 576)[slots[[0, 2]]], latent[[0, 2]])
    del case, chunk
    index = select_case([1], [3000], spare_blocks=2**31 // (64 * 128) + 1)
    found, expected = triton_select.select_tokens(**index), torch_cpu.select_tokens(**index)
    assert (found != expected).float().mean() < 0.1


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("heads", [128, 16])
def test_a_graph_replays_what_runs_eagerly(heads, float8):
    """Captured with padding alone at the largest bounds; replayed with rows, and with fewer and shorter ones."""
    from atom_mla.kernels import triton_cache, triton_select

    latent = modules(heads, float8)[-1]
    seq_lens = [9000, 100, 4096, 513]
    case = decode_case([1] * 4, seq_lens, heads, float8=float8)
    index = select_case([1] * 4, seq_lens, top_k=512, float8=float8)
    case["max_seq_len"] = index["max_seq_len"] = 16384
    new, slots = random(4, 576), torch.full((4,), -1, device=CUDA)
    shared = {"query_start_loc": torch.zeros(5, dtype=torch.int32, device=CUDA)}
    shared["seq_lens"] = torch.zeros(4, dtype=torch.int32, device=CUDA)
    captured_case, captured_index = {**case, **shared}, {**index, **shared}

    def run():
        triton_cache.write_latent(new, case["cache"], case["scale"], slots)
        selected = triton_select.select_tokens(**captured_index)
        return (
            latent.decode(**captured_case),
            selected,
            latent.attend_selected(**captured_case, selected=selected),
        )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for rows, lens in ((4, seq_lens), (3, [5, 100, 700, 0])):
        shared["query_start_loc"].copy_(torch.tensor([*range(rows + 1), *[rows] * (4 - rows)], dtype=torch.int32))
        shared["seq_lens"].copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        replayed = [output.clone() for output in outputs]
        for found, expected in zip(replayed, run(), strict=True):
            assert torch.equal(found, expected)
        for output in (replayed[0], replayed[2]):
            assert torch.equal(output[rows:], torch.zeros_like(output[rows:]))
        part = {**case, "seq_lens_host": np.array(lens[:rows]), "query_start_loc_host": np.arange(rows + 1)}
        part |= {"block_tables": case["block_tables"][:rows], "query": case["query"][:rows]}
        assert relative_error(replayed[0][:rows], reference.decode(**part)) < 8e-3


@pytest.mark.parametrize("heads", [128, 16])
def test_nan_in_padding_changes_nothing(heads):
    case = decode_case([1] * 3, [5000, 64, 700], heads)
    decode = modules(heads, False)[-1].decode
    plain = decode(**case)
    padded = {**case, "query": torch.cat((case["query"], torch.full_like(case["query"], torch.nan)))}
    padded["query_start_loc"] = torch.cat((case["query_start_loc"], case["query_start_loc"][-1:].repeat(3)))
    padded["seq_lens"] = torch.cat((case["seq_lens"], torch.zeros_like(case["seq_lens"])))
    padded["block_tables"] = torch.cat((case["block_tables"], torch.zeros_like(case["block_tables"])))
    found = decode(**padded)
    assert torch.equal(found[:3], plain)
    assert torch.equal(found[3:], torch.zeros_like(plain))
