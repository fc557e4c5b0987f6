"""The documentation of the contract: one entry per hook, examples that run, and error texts that are real."""

import ast
import re
from dataclasses import MISSING, fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from atom_core.errors import AtomError
from atom_core.plugin import AttentionBatch, StepBuffers, StepLimits
from atom_core.plugin.manager import HOOKS, hook_arguments
from atom_core.plugin.registry import PluginRegistry
from tests.plugin.sites import REPOSITORY, Site, importable, plugin_source

CONTRACT = (REPOSITORY / "docs" / "contract.md").read_text(encoding="utf-8")
CPU = torch.device("cpu")
TEXT = (REPOSITORY / "docs" / "hooks.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", TEXT, flags=re.MULTILINE | re.DOTALL))
EXAMPLES = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_there_is_one_entry_per_hook_in_the_order_of_the_calls():
    assert re.findall(r"^### `(\w+)`", TEXT, flags=re.MULTILINE) == list(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_an_entry_has_the_signature_and_explains_each_argument(hook):
    entry, arguments = ENTRIES[hook], hook_arguments(hook)
    assert entry.startswith(f"\n`{hook}({', '.join(arguments)})`\n")
    assert tuple(re.findall(r"^- `(\w+)`:", entry, flags=re.MULTILINE)) == arguments
    assert ("\nArguments:\n" if arguments else "\nArguments: none.\n") in entry
    assert "\nReturns " in entry
    assert "Called " in entry


@pytest.mark.parametrize("hook", HOOKS)
def test_an_entry_has_an_example_that_implements_the_hook(hook):
    (example,) = re.findall(r"^```python\n(.*?)^```", ENTRIES[hook], flags=re.MULTILINE | re.DOTALL)
    functions = [node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.FunctionDef)]
    (implementation,) = [function for function in functions if function.name == hook]
    assert [ast.unparse(decorator) for decorator in implementation.decorator_list] == ["hookimpl"]


def batch_of(**rows):
    """A batch of these rows; whatever is not given is zero."""
    num_seqs = len(rows["seq_lens"])
    values = dict.fromkeys((field.name for field in fields(AttentionBatch) if field.default is MISSING), 0)
    values |= {"num_seqs": num_seqs, "state_read": {}, "state_read_host": {}, "state_write": {}, "state_write_host": {}}
    for name, row in rows.items():
        values |= {name: torch.tensor(row, dtype=torch.int32), f"{name}_host": np.array(row, dtype=np.int32)}
    return AttentionBatch(**values)


def test_the_examples_together_are_a_plugin_that_goes_from_discovery_to_a_step():
    namespace = {}
    for example in EXAMPLES:
        exec(compile(example, "hooks.md", "exec"), namespace)
    parts = [
        value
        for name, value in namespace.items()
        if isinstance(value, type) and name != "Tracer" and any(hook in vars(value) for hook in HOOKS)
    ]
    toy, tracer = type("Toy", tuple(parts), {})(), namespace["Tracer"]()
    registry = PluginRegistry.of({"toy": toy, "tracer": tracer})
    assert registry.record("toy").hooks == HOOKS
    assert registry.is_stateful("toy_lm")
    assert registry.proposers() == {"toy-ngram": "my_package.proposers:make_ngram"}
    config = SimpleNamespace(model_type="toy_lm")
    assert set(registry.tensor_parallel_plan(config, 2).values()) == {"colwise", "rowwise"}
    kernels = registry.kernel_table({})
    add = kernels.select("toy.add", device=CPU, dtypes={}, facts={})
    assert (add.name, add(1, 2)) == ("reference", 3)

    mixer = type("ToyMixer", (torch.nn.Module,), {"dim": 3})()
    owner, claim = registry.claim_layer(mixer, "layers.0.mixer", config, 1)
    claim.layer.module_name = "layers.0.mixer"
    hooks = registry.model_hooks([owner])
    assert hooks.plugins == ("toy", "tracer")
    common = {"layers": (claim.layer,), "model_config": config}
    limits = {"num_spec_tokens": 1, "max_num_batched_tokens": 8, "max_model_len": 16}
    requirements = hooks.cache_requirements(**common, cache_dtype=torch.float32, **limits)
    assert requirements["toy"].workspace_bytes == 3 * 4 * 8

    block_bytes = hooks.block_bytes(**common, block_size=4, cache_dtype=torch.float32)
    assert tracer.block_bytes == block_bytes["toy"] == 4 * 3 * 4
    slot_bytes = hooks.per_req_cache_bytes(**common, cache_dtype=torch.float32, num_spec_tokens=1)
    assert registry.check_stateful("toy_lm", slot_bytes) == []
    slots = hooks.slots_per_req(**common, num_spec_tokens=1)
    hooks.check_slots(slot_bytes, slots, requirements, 1)

    paged = hooks.allocate_kv_cache_tensors(**common, num_blocks=5, block_size=4, cache_dtype=torch.float32, device=CPU)
    state = hooks.allocate_per_req_cache(
        **common, num_slots={"toy": 6}, cache_dtype=torch.float32, num_spec_tokens=1, device=CPU
    )
    hooks.check_allocated_bytes(paged, block_bytes, {"toy": 5})
    hooks.check_allocated_bytes(state, slot_bytes, {"toy": 6})
    bound = hooks.build_kv_cache_tensor(
        layer=claim.layer,
        tensors={**paged, **state},
        kernels=kernels,
        block_size=4,
        cache_dtype=torch.float32,
        num_spec_tokens=1,
        **common,
    )
    assert claim.layer.kv_cache is bound
    assert bound.k_cache.isnan().all()

    metadata = hooks.build_metadata(
        (claim.layer,), batch_of(seq_lens=[5, 7], num_computed=[4, 0]), StepBuffers(StepLimits(4, 64, 16, 4), CPU)
    )
    assert metadata["toy"].tolist() == [1, 7]
    hooks.step_finished({})
    assert toy.num_steps == 1


# docs/contract.md.


def message_of(function, *arguments, **keywords):
    with pytest.raises(AtomError) as caught:
        function(*arguments, **keywords)
    return str(caught.value)


def discovery_messages(site):
    """What discovery and the registry say about a directory of good and bad plugins."""
    site.install_plugin("cuda", "import cuda_driver")
    site.install_plugin("typo", plugin_source("typo", "@hookimpl\ndef atom_opps(self): return []"))
    site.install_plugin("bare", plugin_source("bare", "def atom_ops(self): return []"))
    site.install_plugin("late", plugin_source("late").replace("=1)", "=2)"))
    site.install_plugin("alias", plugin_source("other"))
    site.install_plugin("argument", plugin_source("argument", "@hookimpl\ndef atom_kernels(self, device): return []"))
    site.install_plugin(
        "types", plugin_source("types", "@hookimpl\ndef atom_model_types(self): return {'types': 'lm'}")
    )
    site.install_plugin("toy", plugin_source("toy", TOY_HOOKS, head="from atom_core.plugin import Kernel, Op\n"))
    site.install_plugin("twin", plugin_source("twin"))
    registry = site.discover(without=("twin",))
    for name in ("cuda", "typo", "bare", "late", "alias", "argument", "types", "twin"):
        yield message_of(registry.require, name)
    yield message_of(site.discover, only=("tyo",))
    yield registry.advice("atom-gdn")
    yield registry.advice("atom-twin")
    yield registry.advice("atom-toy")
    yield message_of(registry.check_stateful, "toy_moe", {"toy": 4096})
    yield from registry.check_stateful("toy_lm", {})
    table = registry.kernel_table({"toy.add": "triton"})
    case = {"device": CPU, "dtypes": {"x": torch.float32}, "facts": {"dim": 64}}
    yield message_of(table.select, "toy.add", **case)
    yield message_of(registry.kernel_table, {"toy.add": "cutlass"})
    hooks = registry.model_hooks(["toy"])
    yield message_of(hooks.check_allocated_bytes, {"toy.sum": torch.empty(2, 8, 4)}, {"toy": 64}, {"toy": 8})


def conflict_messages(site, other):
    """What discovery says about two distributions that collide."""
    site.install_plugin("toy", version="1.0")
    other.install_plugin("toy", version="2.0")
    with importable(site.root):
        yield message_of(PluginRegistry.discover, path=[str(site.root), str(other.root)])
    site.install("toy-fork", {"toy": "fork:plugin"}, {"fork.py": plugin_source("toy")}, version="1.1")
    yield message_of(site.discover)


def tie_message():
    source = plugin_source("{0}", CLAIM_HOOK, head="from atom_core.plugin import AttentionLayer, Claim\n")
    plugins = {}
    for name in ("one", "two"):
        namespace = {}
        exec(source.replace("{0}", name), namespace)
        plugins[name] = namespace["plugin"]
    module = torch.nn.Linear(2, 2)
    return message_of(PluginRegistry.of(plugins).claim_layer, module, "model.layers.0.self_attn", None, 1)


TOY_HOOKS = """
@hookimpl
def atom_model_types(self):
    return {"toy": ["toy_lm"]}

@hookimpl
def atom_ops(self):
    return [Op("toy.add", "torch:add", {}, "toy.samples:add")]

@hookimpl
def atom_kernels(self):
    return [Kernel("toy.add", "triton", "toy.triton_add:add", lambda *_: "needs a CUDA device", priority=10)]
"""
CLAIM_HOOK = """
@hookimpl
def atom_claim_layer(self, module):
    return Claim(AttentionLayer(), exact=True)
"""


def test_the_error_texts_of_the_contract_are_those_of_real_runs(tmp_path):
    site, first, second = (Site(tmp_path / name) for name in ("site", "first", "second"))
    messages = [*discovery_messages(site), *conflict_messages(first, second), tie_message()]
    real = {message.replace(str(tmp_path), "/venv") for message in messages}
    blocks = re.findall(r"^```text\n(.*?)\n```", CONTRACT, flags=re.MULTILINE | re.DOTALL)
    shown = [line for block in blocks for line in block.split("\n\n")]
    assert sorted(real) == sorted(shown)


def test_the_examples_of_the_contract_run():
    namespace = {}
    for example in re.findall(r"^```python\n(.*?)^```", CONTRACT, flags=re.MULTILINE | re.DOTALL):
        exec(compile(example, "contract.md", "exec"), namespace)
    plugin = namespace["plugin"]
    hooks = PluginRegistry.of({plugin.name: plugin}).model_hooks([plugin.name])
    layer = namespace["SumLayer"](dim=6)
    layer.module_name = "layers.0"
    common = {"layers": (layer,), "model_config": None, "cache_dtype": torch.bfloat16}
    assert hooks.per_req_cache_bytes(**common, num_spec_tokens=0) == {plugin.name: 6 * 4}
    assert hooks.block_bytes(**common, block_size=16) == {plugin.name: 16 * 6 * 2}
