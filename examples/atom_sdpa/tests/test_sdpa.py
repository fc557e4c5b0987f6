"""The kernel equals its op's reference, and is chosen where nothing better is there."""

import copy
import inspect

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from atom_core import LLM, SamplingParams, hookimpl
from atom_core.errors import KernelError
from atom_core.plugin.ops import load_function
from atom_core.plugin.registry import PluginRegistry
from atom_mha.plugin import MhaPlugin
from atom_mha.plugin import plugin as mha
from atom_sdpa.plugin import plugin
from atom_sdpa.prefill import prefill

CPU = torch.device("cpu")
PLAIN = {
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "v_head_dim": 16,
    "block_size": 16,
    "window": None,
    "chunk": None,
}


class MhaWithoutKernels(MhaPlugin):
    """atom-mha on a device for which it brings nothing but its references."""

    @hookimpl
    def atom_kernels(self):
        return []


def choose(registry, device=CPU, forced=None, **facts):
    table = registry.kernel_table(forced)
    return table.select("mha.prefill", device=device, dtypes={"cache": torch.float32}, facts={**PLAIN, **facts})


@pytest.fixture(scope="module")
def installed():
    return PluginRegistry.of({"mha": mha, "sdpa": plugin})


@pytest.fixture(scope="module")
def bare():
    return PluginRegistry.of({"mha": MhaWithoutKernels(), "sdpa": plugin})


def op_of(registry, name="mha.prefill"):
    return registry.kernel_table().ops[name][0]


def test_has_the_signature_of_its_op(installed):
    installed.kernel_table().check_signatures()
    reference = load_function(op_of(installed).reference)
    assert list(inspect.signature(prefill).parameters) == list(inspect.signature(reference).parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_reference_on_every_sample(installed, dtype):
    op = op_of(installed)
    reference = load_function(op.reference)
    absolute, relative = op.tolerance[str(dtype).removeprefix("torch.")]
    for seed in range(3):
        samples = load_function(op.sample_inputs)(CPU, dtype, seed)
        assert len(samples) >= 3
        for sample in samples:
            expected, found = (torch.full_like(sample["out"], float("nan")) for _ in range(2))
            reference(**{**sample, "out": expected, "scratch": {}})
            prefill(**{**sample, "out": found, "scratch": {}})
            assert expected.isfinite().all()
            torch.testing.assert_close(found, expected, atol=absolute, rtol=relative)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_equals_the_reference_with_soft_caps_sinks_and_empty_rows(installed, soft_cap, with_sinks):
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(40, heads, 16, generator=generator) for heads in (6, 2, 2))
    sinks = torch.randn(6, generator=generator) if with_sinks else None
    # A slice of a step's rows: tokens before and after it belong to others.
    starts = torch.tensor([3, 10, 10, 11, 36], dtype=torch.int32)
    found, expected = (torch.full_like(query, 7.0) for _ in range(2))
    for function, out in ((prefill, found), (load_function(op_of(installed).reference), expected)):
        function(query, key, value, out, starts, 25, 0.25, None, None, soft_cap, sinks, {})
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert found[:3].eq(7.0).all()
    assert found[36:].eq(7.0).all()


def test_does_not_displace_the_kernels_of_the_op_owner(installed):
    for device in ("cpu", "cuda"):
        without = choose(PluginRegistry.of({"mha": mha}), torch.device(device)).name
        assert choose(installed, torch.device(device)).name == (without if without != "reference" else "sdpa")
    assert choose(installed).name == "torch_cpu"


def test_is_chosen_on_a_device_for_which_the_op_owner_has_no_kernel(installed, bare):
    assert choose(PluginRegistry.of({"mha": mha}), torch.device("mps")).name == "reference"
    assert choose(installed, torch.device("mps")).name == "sdpa"
    assert choose(bare).name == "sdpa"


def test_is_forced_by_name(installed):
    assert choose(installed, forced={"mha.prefill": "sdpa"}).name == "sdpa"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"window": 8}, "no fused attention within a window or a chunk"),
        ({"chunk": 8}, "no fused attention within a window or a chunk"),
        ({"v_head_dim": 8}, "no fused attention for keys of 16 and values of 8"),
    ],
    ids=["window", "chunk", "value-heads"],
)
def test_refuses_with_a_reason_and_leaves_the_case_to_others(installed, bare, facts, reason):
    assert choose(bare, **facts).name == "reference"
    with pytest.raises(KernelError, match=f"forced kernel 'sdpa' of op 'mha.prefill' refuses.*{reason}"):
        choose(installed, forced={"mha.prefill": "sdpa"}, **facts)


def test_is_left_aside_without_the_op_owner():
    kernels = PluginRegistry.of({"sdpa": plugin}).kernel_table().kernels
    assert not any(kernel.name == "sdpa" for candidates in kernels.values() for kernel, _ in candidates)


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("how", ["forced", "chosen"])
def test_a_model_that_runs_on_it_says_what_transformers_says(model, installed, bare, how, monkeypatch):
    prompts = [[5], list(range(40)), [7, 8, 9] * 6]
    with torch.no_grad():
        expected = [
            model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    num_calls = 0

    def counted(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        prefill(*args, **kwargs)

    monkeypatch.setattr("atom_sdpa.prefill.prefill", counted)
    choice = {"registry": bare} if how == "chosen" else {"registry": installed, "kernels": {"mha.prefill": "sdpa"}}
    llm = LLM(copy.deepcopy(model), skip_tokenizer=True, cache_memory="8MB", **choice)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0))
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert num_calls > 0
