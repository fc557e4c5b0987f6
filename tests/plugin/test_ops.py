"""Ops and kernels: who may bring them, which one runs, and how a refusal reads."""

import pytest
import torch

from atom_core.errors import KernelError, PluginError
from tests.plugin.sites import Site, importable, plugin_source

HEAD = "from atom_core.plugin import Kernel, Op\n"
OP = """
@hookimpl
def atom_ops(self):
    return [Op("toy.scale", "toy_kernels:reference", {"float32": (0.0, 0.0)}, "toy_kernels:samples")]
"""
OWN_KERNELS = """
@hookimpl
def atom_kernels(self):
    return [Kernel("toy.scale", "fused", "toy_kernels:fused", only_cuda, priority=10)]
"""
KERNELS = """
def reference(x, factor):
    return x * factor

def fused(x, factor):
    raise RuntimeError("no device")

def samples(device, dtype, seed):
    return []
"""
ONLY_CUDA = """
def only_cuda(device, dtypes, facts):
    return True if device.type == "cuda" else f"needs cuda, not {device.type}"
"""
EXTRA = """
@hookimpl
def atom_kernels(self):
    return [Kernel("toy.scale", "doubling", "extra_kernels:doubling", even_factor, priority=5)]
"""
EVEN_FACTOR = """
def even_factor(device, dtypes, facts):
    return True if facts["factor"] % 2 == 0 else False
"""
EXTRA_KERNELS = """
def doubling(x, factor):
    return (x + x) * (factor // 2)
"""

CASE = {"device": torch.device("cpu"), "dtypes": {"x": torch.float32}}


@pytest.fixture
def site(tmp_path):
    """A plugin with an op and a kernel, and a package with nothing but another kernel for that op."""
    site = Site(tmp_path / "site")
    toy = plugin_source("toy", OP + OWN_KERNELS, head=HEAD + ONLY_CUDA)
    site.install("atom-toy", {"toy": "toy_plugin:plugin"}, {"toy_plugin.py": toy, "toy_kernels.py": KERNELS})
    extra = plugin_source("extra", EXTRA, head=HEAD + EVEN_FACTOR)
    files = {"extra_plugin.py": extra, "extra_kernels.py": EXTRA_KERNELS}
    site.install("toy-extra", {"extra": "extra_plugin:plugin"}, files, version="2.0")
    with importable(site.root):
        yield site


def test_the_highest_priority_that_supports_the_case_runs(site):
    table = site.discover().kernel_table({})
    with importable(site.root):
        even = table.select("toy.scale", facts={"factor": 4}, **CASE)
        odd = table.select("toy.scale", facts={"factor": 3}, **CASE)
        assert (even.name, even.owner) == ("doubling", "plugin 'extra' (toy-extra 2.0)")
        assert (odd.name, odd.owner) == ("reference", "plugin 'toy' (atom-toy 0.1.0)")
        assert (even(torch.ones(1), 4).item(), odd(torch.ones(1), factor=3).item()) == (4, 3)
    assert table.selected == {"toy.scale": {"doubling", "reference"}}


def test_a_forced_kernel_runs_or_refuses_with_its_reason(site):
    registry = site.discover()
    with importable(site.root):
        forced = registry.kernel_table({"toy.scale": "reference"})
        assert forced.select("toy.scale", facts={"factor": 4}, **CASE).name == "reference"
    forced = registry.kernel_table({"toy.scale": "fused"})
    with pytest.raises(KernelError) as caught:
        forced.select("toy.scale", facts={"factor": 4}, **CASE)
    assert str(caught.value) == (
        "forced kernel 'fused' of op 'toy.scale' refuses device cpu, dtypes {'x': torch.float32}, facts "
        "{'factor': 4}: fused (plugin 'toy' (atom-toy 0.1.0)): needs cuda, not cpu"
    )
    forced = registry.kernel_table({"toy.scale": "doubling"})
    with pytest.raises(KernelError, match="refused without a reason"):
        forced.select("toy.scale", facts={"factor": 3}, **CASE)


def test_forcing_what_does_not_exist_lists_what_does(site):
    registry = site.discover()
    with pytest.raises(KernelError, match=r"toy\.scale=fast: no such kernel; kernels: fused, doubling, reference"):
        registry.kernel_table({"toy.scale": "fast"})
    with pytest.raises(
        KernelError, match=r"toy\.shrink=fast: no such op; ops: core\.expert_rows, core\.linear_row, toy\.scale"
    ):
        registry.kernel_table({"toy.shrink": "fast"})


def test_when_no_kernel_supports_a_case_each_candidate_gives_its_reason():
    from atom_core.plugin import Kernel, KernelTable

    kernels = [(Kernel("a.op", "one", "a:b", lambda *_: "one says no"), "plugin 'a'")]
    table = KernelTable({}, {"a.op": [*kernels, (Kernel("a.op", "two", "a:b", lambda *_: "not here"), "plugin 'b'")]})
    with pytest.raises(
        KernelError, match=r"no kernel of op 'a\.op' supports .*one says no; two \(plugin 'b'\): not here"
    ):
        table.select("a.op", facts={}, **CASE)
    with pytest.raises(KernelError, match=r"op 'b\.op' is not defined by any loaded plugin; .* Ops: a\.op"):
        table.select("b.op", facts={}, **CASE)


def test_kernels_for_the_op_of_a_plugin_that_is_not_there_are_left_aside(site):
    table = site.discover(without=("toy",)).kernel_table({})
    names = {op: [kernel.name for kernel, _ in kernels] for op, kernels in table.kernels.items()}
    assert names == {"core.linear_row": ["reference"], "core.expert_rows": ["reference"]}


def test_a_kernel_for_an_op_that_its_plugin_does_not_define_is_an_error(tmp_path):
    site = Site(tmp_path)
    site.install_plugin("toy", plugin_source("toy", OWN_KERNELS, head=HEAD + ONLY_CUDA))
    with pytest.raises(KernelError, match=r"'fused' of plugin 'toy' .* is for op 'toy\.scale', which no loaded plugin"):
        site.discover().kernel_table({})


def test_an_op_carries_its_plugins_name(tmp_path):
    site = Site(tmp_path)
    site.install_plugin("own", plugin_source("own", OP, head=HEAD))
    with pytest.raises(PluginError, match=r"plugin 'own' .* defines 'toy\.scale'; .* for example 'own\.scale'"):
        site.discover().kernel_table({})


def test_two_kernels_of_one_name_are_refused(site):
    clash = plugin_source("clash", EXTRA.replace("doubling", "fused"), head=HEAD + EVEN_FACTOR)
    site.install("toy-clash", {"clash": "clash_plugin:plugin"}, {"clash_plugin.py": clash})
    with pytest.raises(KernelError, match=r"'fused' of op 'toy\.scale' is brought by plugin '(toy|clash)' .* and by"):
        site.discover().kernel_table({})


def test_a_kernel_with_other_parameters_than_its_op_is_found(site):
    with importable(site.root):
        site.discover().kernel_table({}).check_signatures()
    swapped = EXTRA.replace("extra_kernels:doubling", "swapped_kernels:scale").replace("doubling", "swapped")
    source = plugin_source("swapped", swapped, head=HEAD + EVEN_FACTOR)
    files = {"swapped_plugin.py": source, "swapped_kernels.py": "def scale(factor, x): ..."}
    site.install("toy-swapped", {"swapped": "swapped_plugin:plugin"}, files)
    table = site.discover().kernel_table({})
    with importable(site.root), pytest.raises(KernelError) as caught:
        table.check_signatures()
    assert str(caught.value) == (
        "kernel 'swapped' of op 'toy.scale' (plugin 'swapped' (toy-swapped 0.1.0)) has parameters "
        "['factor', 'x'], expected ['x', 'factor']"
    )


def test_a_kernel_that_cannot_be_imported_says_which(tmp_path):
    site = Site(tmp_path)
    broken = OP.replace("toy_kernels:reference", "no_such_kernels:reference")
    site.install_plugin("toy", plugin_source("toy", broken, head=HEAD))
    table = site.discover().kernel_table({})
    with pytest.raises(KernelError, match="cannot import 'no_such_kernels:reference': No module named"):
        table.select("toy.scale", facts={}, **CASE)
