"""Discovery: what is found, what is recorded as broken or blocked, and what is refused at once."""

import subprocess
import sys
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import nn

from atom_core import hookimpl
from atom_core.errors import (
    ClaimError,
    DiscoveryError,
    LayerError,
    PluginError,
    StatefulModelTypeError,
)
from atom_core.plugin import AttentionLayer, Claim, Op, PluginInfo
from atom_core.plugin.known_layers import distribution_for
from atom_core.plugin.registry import PluginRegistry, PluginStatus
from tests.plugin.sites import REPOSITORY, Site, importable, plugin_source


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "site")


def broken_reason(site, name="toy"):
    record = site.discover().record(name)
    assert record.status is PluginStatus.BROKEN
    assert record.plugin is None
    return record.reason


class Named:
    """Base of plugins made in a test; `name` is the plugin's."""

    name = "toy"

    @hookimpl
    def atom_plugin_info(self):
        return PluginInfo(name=self.name, summary="A plugin for a test.", contract_version=1)


# What is found.


def test_an_installed_plugin_is_loaded_with_all_that_is_known_of_it(site):
    hooks = "@hookimpl\ndef atom_step_finished(self, stats): ...\n"
    site.install_plugin("toy", plugin_source("toy", hooks), version="1.2.3")
    registry = site.discover()
    (record,) = registry.records
    assert record.status is PluginStatus.LOADED
    assert record.summary == "A plugin for a test."
    assert record.hooks == ("atom_plugin_info", "atom_step_finished")
    assert record.describe() == registry.describe("toy") == "plugin 'toy' (atom-toy 1.2.3)"
    assert registry.describe(record.plugin) == "plugin 'toy' (atom-toy 1.2.3)"
    assert registry.identity() == (("toy", "1.2.3"),)
    assert registry.manager.get_plugin("toy") is record.plugin
    assert registry.require("toy") is record


def test_records_come_in_order_of_names_whatever_the_order_on_disk(site):
    for name in ("c", "a", "b"):
        site.install_plugin(name)
    assert [record.name for record in site.discover().records] == ["a", "b", "c"]


def test_a_module_can_be_the_plugin_although_it_imports_atom_core(site):
    source = (
        "import atom_core\nfrom atom_core.plugin import PluginInfo\n"
        "@atom_core.hookimpl\ndef atom_plugin_info():\n    return PluginInfo('toy', 'A module.', 1)\n"
    )
    site.install("atom-toy", {"toy": "toy_module"}, {"toy_module.py": source})
    assert site.discover().require("toy").hooks == ("atom_plugin_info",)


def test_a_distribution_installed_by_pip_is_discovered(tmp_path):
    source = tmp_path / "source"
    (source / "src" / "atom_piped").mkdir(parents=True)
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "atom-piped"\nversion = "0.3.0"\n'
        '[project.entry-points.atom_core]\npiped = "atom_piped.plugin:plugin"\n'
        '[tool.setuptools.packages.find]\nwhere = ["src"]\n'
    )
    (source / "src" / "atom_piped" / "__init__.py").write_text("")
    (source / "src" / "atom_piped" / "plugin.py").write_text(plugin_source("piped"))
    site = Site(tmp_path / "site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--disable-pip-version-check", "--target", str(site.root), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = site.run(
        """
        from atom_core.plugin.registry import PluginRegistry
        print(PluginRegistry.discover().require("piped").describe())
        """,
        ATOM_PLUGINS="piped",
    )
    assert printed.strip() == "plugin 'piped' (atom-piped 0.3.0)"


def test_neither_importing_atom_nor_discovery_loads_torch_or_transformers(site):
    site.install_plugin("toy")
    printed = site.run(
        """
        import sys
        import atom_core
        heavy = {"torch", "transformers", "numpy", "triton"}
        print(sorted(heavy & set(sys.modules)))
        from atom_core.plugin.registry import PluginRegistry
        registry = PluginRegistry.discover()
        registry.require("toy"), registry.kernel_table({}), registry.stateful_model_types()
        registry.model_hooks(["toy"])
        print(sorted(heavy & set(sys.modules)))
        """,
        ATOM_PLUGINS="toy",
    )
    assert printed.split("\n")[:2] == ["[]", "[]"]


# What is recorded, and raised when it is needed.


def test_a_broken_import_is_recorded_and_raised_when_the_plugin_is_needed(site):
    site.install_plugin("toy", "import no_such_module\n")
    site.install_plugin("fine")
    registry = site.discover()
    assert registry.require("fine").status is PluginStatus.LOADED
    assert registry.record("toy").reason == (
        "importing 'atom_toy_plugin:plugin' failed: ModuleNotFoundError: No module named 'no_such_module'"
    )
    with pytest.raises(DiscoveryError, match=r"'toy' \(atom-toy 0\.1\.0\) is broken: importing .*no_such_module'"):
        registry.require("toy")
    with pytest.raises(DiscoveryError, match="no_such_module"):
        registry.model_hooks(["toy"])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
        ("", "AttributeError: module 'atom_toy_plugin' has no attribute 'plugin'"),
        ("plugin = 3", "loads an object of type int that implements no hook"),
        (plugin_source("toy").replace("plugin = Plugin()", "plugin = Plugin"), "name an instance, for example"),
        (plugin_source("other"), "its entry point is named 'toy', but atom_plugin_info says 'other'"),
        (plugin_source("toy").replace("=1)", "=2)"), "written for version 2 of the contract, .* upgrade atom-core"),
        (plugin_source("toy").replace("=1)", "=0)"), "written for version 0 of the contract, .* upgrade the plugin"),
        (plugin_source("toy").replace("return PluginInfo", "raise KeyError"), "atom_plugin_info failed: "),
        (plugin_source("toy").replace("return PluginInfo", "PluginInfo"), "returned None, expected a PluginInfo"),
        (plugin_source("toy").replace("return PluginInfo", "return dict"), "returned {.*}, expected a PluginInfo"),
    ],
)
def test_an_entry_point_without_a_proper_plugin_is_broken(site, source, reason):
    site.install_plugin("toy", source)
    with pytest.raises(DiscoveryError, match=reason):
        site.discover().require("toy")


@pytest.mark.parametrize(
    ("hooks", "reason"),
    [
        ("@hookimpl\ndef atom_opps(self): return []", "atom_opps is not a hook; did you mean atom_ops?"),
        ("def atom_kernel(self): return []", "atom_kernel is not a hook; did you mean atom_kernels?"),
        ("atom_model_type = ()", "atom_model_type is not a hook; did you mean atom_model_types?"),
        ("@hookimpl\ndef model_types(self): return {}", "model_types is not a hook; did you mean atom_model_types?"),
        ("@hookimpl(specname='atom_op')\ndef ops(self): return []", "atom_op is not a hook; did you mean atom_ops?"),
        ("def atom_ops(self): return []", "atom_ops is not decorated with @hookimpl, so it would never be called"),
        ("atom_ops = ()", "atom_ops is not decorated with @hookimpl, so it would never be called"),
        (
            "@hookimpl\ndef atom_slots_per_req(self, layer): return {}",
            "atom_slots_per_req takes an argument 'layer' that the hook does not have (did you mean 'layers'?); "
            "arguments of the hook: layers, model_config, num_spec_tokens",
        ),
        (
            "@hookimpl\ndef atom_slots_per_req(self, num_spec_tokens=0): return {}",
            "atom_slots_per_req gives 'num_spec_tokens' a default, so that pluggy may leave it out of the call; "
            "arguments of the hook: layers, model_config, num_spec_tokens",
        ),
        (
            "@hookimpl\ndef atom_slots_per_req(self, *, layers): return {}",
            "atom_slots_per_req takes 'layers' by keyword only, which pluggy does not pass; "
            "arguments of the hook: layers, model_config, num_spec_tokens",
        ),
        (
            "@hookimpl\ndef atom_ops(self, **arguments): return {}",
            "atom_ops takes **arguments, which is never filled: arguments are passed by the names that are declared; "
            "arguments of the hook: none",
        ),
        (
            "@hookimpl\ndef atom_model_types(self): return {'toy': 'toy_lm'}",
            "atom_model_types returned {'toy': 'toy_lm'}, expected a mapping from the plugin's own name, "
            '{"toy": ["model_type", ...]}',
        ),
        (
            "@hookimpl\ndef atom_model_types(self): return {'other': ['toy_lm']}",
            "atom_model_types returned {'other': ['toy_lm']}, expected a mapping from the plugin's own name, "
            '{"toy": ["model_type", ...]}',
        ),
    ],
)
def test_a_hook_that_would_not_work_makes_the_plugin_broken(site, hooks, reason):
    site.install_plugin("toy", plugin_source("toy", hooks))
    assert broken_reason(site) == reason


def test_a_wrapper_that_does_not_yield_is_broken(site):
    hooks = "@hookimpl(wrapper=True)\ndef atom_ops(self): return []"
    site.install_plugin("toy", plugin_source("toy", hooks))
    assert "not a generator function" in broken_reason(site)


def test_a_plugin_without_atom_plugin_info_is_broken(site):
    source = "from atom_core import hookimpl\n@hookimpl\ndef atom_ops(): return []\n"
    site.install("atom-toy", {"toy": "toy_module"}, {"toy_module.py": source})
    assert broken_reason(site) == "atom_plugin_info is missing; every plugin must implement it"


def test_a_name_that_could_not_prefix_a_tensor_is_broken(site):
    site.install("atom-toy", {"to.y": "toy_module:plugin"}, {"toy_module.py": plugin_source("to.y")})
    assert broken_reason(site, "to.y") == "the name 'to.y' may hold only letters, digits, '_' and '-'"


def test_a_hook_of_a_later_contract_may_be_marked_optional(site):
    hooks = "@hookimpl(optionalhook=True)\ndef atom_hook_of_tomorrow(self): ..."
    site.install_plugin("toy", plugin_source("toy", hooks))
    assert site.discover().require("toy").hooks == ("atom_plugin_info",)


def test_plugin_objects_pass_the_same_checks():
    class Misspelt(Named):
        @hookimpl
        def atom_opps(self):
            return []

    with pytest.raises(DiscoveryError, match=r"'toy' \(not installed\) is broken: atom_opps is not a hook"):
        PluginRegistry.of({"toy": Misspelt()})
    registry = PluginRegistry.of({"toy": Named()})
    assert registry.describe("toy") == "plugin 'toy' (not installed)"
    assert registry.identity() == (("toy", "not installed"),)


# What is refused at once.


def test_two_distributions_with_one_plugin_name_are_refused(site):
    site.install("atom-toy", {"toy": "a:plugin"}, {"a.py": plugin_source("toy")}, version="1.0")
    site.install("toy-fork", {"toy": "b:plugin"}, {"b.py": plugin_source("toy")}, version="2.0")
    with pytest.raises(DiscoveryError) as caught:
        site.discover()
    assert "plugin name 'toy' is used twice" in str(caught.value)
    assert f"atom-toy 1.0 at {site.root}" in str(caught.value)
    assert f"toy-fork 2.0 at {site.root}" in str(caught.value)


@pytest.mark.parametrize("second_name", ["atom-toy", "Atom_Toy"])
@pytest.mark.parametrize("second_version", ["1.0", "2.0"])
def test_two_copies_of_a_distribution_at_different_places_are_refused(tmp_path, second_name, second_version):
    first, second = Site(tmp_path / "first"), Site(tmp_path / "second")
    source = {"toy_module.py": plugin_source("toy")}
    first.install("atom-toy", {"toy": "toy_module:plugin"}, source, version="1.0")
    second.install(second_name, {"toy": "toy_module:plugin"}, source, version=second_version)
    with importable(first.root, second.root), pytest.raises(DiscoveryError) as caught:
        PluginRegistry.discover(path=[str(first.root), str(second.root)])
    assert "distribution 'atom-toy' is installed twice" in str(caught.value)
    assert f"version 1.0 at {first.root}" in str(caught.value)
    assert f"version {second_version} at {second.root}" in str(caught.value)


def test_two_versions_left_in_one_directory_are_refused(site):
    site.install_plugin("toy", version="1.0")
    site.install_plugin("toy", version="2.0")
    with pytest.raises(DiscoveryError, match="is installed twice"):
        site.discover()


@pytest.mark.parametrize("egg_info_first", [True, False])
def test_an_editable_installation_and_the_metadata_beside_its_source_are_one_distribution(tmp_path, egg_info_first):
    project, environment = tmp_path / "project", Site(tmp_path / "environment")
    source = Site(project / "src")
    points = {"toy": "toy_module:plugin"}
    source.install("atom-toy", points, {"toy_module.py": plugin_source("toy")}, metadata="egg-info")
    environment.install("atom-toy", points, {}, editable_source=project)
    roots = (source.root, environment.root) if egg_info_first else (environment.root, source.root)
    with importable(*roots):
        registry = PluginRegistry.discover(path=[str(root) for root in roots])
    assert registry.describe("toy") == "plugin 'toy' (atom-toy 0.1.0)"


def test_an_editable_installation_does_not_excuse_a_copy_elsewhere_or_stale_metadata(tmp_path):
    project, environment = tmp_path / "project", Site(tmp_path / "environment")
    points = {"toy": "toy_module:plugin"}
    environment.install("atom-toy", points, {}, editable_source=project)
    elsewhere, stale = Site(tmp_path / "elsewhere"), Site(project / "src")
    elsewhere.install("atom-toy", points, {}, metadata="egg-info")
    stale.install("atom-toy", points, {}, metadata="egg-info", version="0.0.9")
    for other in (elsewhere, stale):
        with pytest.raises(DiscoveryError, match="is installed twice"):
            PluginRegistry.discover(path=[str(environment.root), str(other.root)])


def test_a_directory_that_is_on_the_path_twice_is_read_once(site, tmp_path):
    site.install_plugin("toy")
    link = tmp_path / "link"
    link.symlink_to(site.root)
    with importable(site.root):
        registry = PluginRegistry.discover(path=[str(site.root), str(site.root), str(link)])
    assert registry.identity() == (("toy", "0.1.0"),)


# Selection.


@pytest.fixture
def two_plugins(site):
    site.install_plugin("one")
    site.install_plugin("two", "raise RuntimeError('two was imported')")
    return site


def test_a_plugin_left_out_is_blocked_and_not_imported(two_plugins):
    registry = two_plugins.discover(without=("two",))
    record = registry.record("two")
    assert (record.status, record.reason) == (PluginStatus.BLOCKED, "left out by --no-plugin two")
    with pytest.raises(DiscoveryError, match=r"'two' \(atom-two 0.1.0\) is blocked: left out by --no-plugin two"):
        registry.require("two")


def test_only_the_selected_plugins_are_imported(two_plugins):
    record = two_plugins.discover(only=("one",)).record("two")
    assert (record.status, record.reason) == (PluginStatus.BLOCKED, "not in plugins=one")


def test_the_environment_selects_unless_the_caller_does(two_plugins, monkeypatch):
    monkeypatch.setenv("ATOM_PLUGINS", " one, ")
    assert two_plugins.discover().record("two").reason == "not in ATOM_PLUGINS=one"
    assert two_plugins.discover(only=("two",)).record("one").reason == "not in plugins=two"
    monkeypatch.setenv("ATOM_PLUGINS", "")
    assert two_plugins.discover().record("two").status is PluginStatus.BROKEN


def test_naming_an_unknown_plugin_lists_the_known(two_plugins, monkeypatch):
    with pytest.raises(DiscoveryError, match=r"'tow', named in plugins=tow, is not installed; installed: one, two"):
        two_plugins.discover(only=("tow",))
    with pytest.raises(DiscoveryError, match=r"'tow', named by --no-plugin tow, is not installed; installed: one, two"):
        two_plugins.discover(without=("tow",))
    with pytest.raises(DiscoveryError, match="plugin 'tow' is not installed; installed: one, two"):
        two_plugins.discover(without=("two",)).record("tow")
    monkeypatch.setenv("ATOM_PLUGINS", "one,tow")
    with pytest.raises(DiscoveryError, match=r"'tow', named in ATOM_PLUGINS=one,tow, is not installed"):
        two_plugins.discover()


def test_advice_tells_missing_blocked_broken_and_outdated_apart(two_plugins):
    registry = two_plugins.discover()
    assert registry.unavailable("one") is None
    assert registry.unavailable("Atom_Two") == registry.unavailable("two")
    assert registry.advice("atom-three") == "atom-three is known to claim this class; run `pip install atom-three`."
    assert registry.advice("atom-two") == (
        "atom-two is known to claim this class, but plugin 'two' (atom-two 0.1.0) is broken: importing "
        "'atom_two_plugin:plugin' failed: RuntimeError: two was imported."
    )
    assert registry.advice("atom-one") == (
        "atom-one is known to claim this class, but the installed version does not; upgrade it."
    )
    blocked = two_plugins.discover(without=("two",))
    assert blocked.advice("atom-two") == (
        "atom-two is known to claim this class, but plugin 'two' (atom-two 0.1.0) is blocked: "
        "left out by --no-plugin two."
    )
    assert blocked.asked() == (
        "none (not asked: plugin 'two' (atom-two 0.1.0) is blocked: left out by --no-plugin two)"
    )


# Stateful model types.


class Stateful(Named):
    @hookimpl
    def atom_model_types(self):
        return {"toy": ["toy_lm", "toy_moe"]}


def test_registered_model_types_are_stateful():
    registry = PluginRegistry.of({"toy": Stateful()})
    assert registry.stateful_model_types() == {"toy": frozenset({"toy_lm", "toy_moe"})}
    assert registry.is_stateful("toy_moe")
    assert not registry.is_stateful("toy")


def test_state_for_an_unregistered_model_type_is_refused_with_the_line_to_add():
    registry = PluginRegistry.of({"toy": Stateful()})
    assert registry.check_stateful("toy_lm", {"toy": 64}) == []
    with pytest.raises(StatefulModelTypeError) as caught:
        registry.check_stateful("toy_vl", {"toy": 64})
    assert str(caught.value) == (
        "plugin 'toy' (not installed) has 64 bytes of per-request state for model type 'toy_vl', which it did not "
        "register; registered: toy_lm, toy_moe. Requests are marked stateful from the registered model types alone: "
        "these would get no slot and read another request's state. Add 'toy_vl' to what its atom_model_types "
        'returns: {"toy": ["toy_lm", "toy_moe", "toy_vl"]}'
    )


def test_a_registered_type_without_state_is_a_warning():
    (warning,) = PluginRegistry.of({"toy": Stateful()}).check_stateful("toy_lm", {"toy": 0})
    assert warning.startswith("plugin 'toy' (not installed) registered model type 'toy_lm' as stateful, but has no")


# Answers that are asked once.


@pytest.mark.parametrize(
    ("hook", "answer", "expected"),
    [
        ("atom_ops", {"toy.op": 1}, "a sequence of Op"),
        ("atom_kernels", ["toy.op"], "a sequence of Kernel"),
        ("atom_proposers", ["ngram"], "a mapping by proposer"),
        ("atom_proposers", {"ngram": 3}, "a proposer and its value"),
        ("atom_tensor_parallel_plan", "colwise", "a mapping by pattern"),
    ],
)
def test_an_answer_of_a_wrong_type_names_the_plugin(hook, answer, expected):
    plugin = type("Answering", (Named,), {hook: hookimpl(lambda self: answer)})()
    registry = PluginRegistry.of({"toy": plugin})
    ask = {
        "atom_ops": lambda: registry.kernel_table({}),
        "atom_kernels": lambda: registry.kernel_table({}),
        "atom_proposers": registry.proposers,
        "atom_tensor_parallel_plan": lambda: registry.tensor_parallel_plan(None, 2),
    }[hook]
    with pytest.raises(PluginError, match=rf"plugin 'toy' \(not installed\): {hook} returned .*, expected {expected}"):
        ask()


def test_a_hook_that_fails_names_the_plugin():
    class Failing(Named):
        @hookimpl
        def atom_proposers(self):
            raise ValueError("no proposers today")

    with pytest.raises(PluginError, match=r"plugin 'toy' .*: atom_proposers failed: ValueError: no proposers today"):
        PluginRegistry.of({"toy": Failing()}).proposers()


def test_two_plugins_may_not_disagree_on_a_proposer():
    class One(Named):
        @hookimpl
        def atom_proposers(self):
            return {"ngram": "one:make"}

    class Two(Named):
        name = "two"

        @hookimpl
        def atom_proposers(self):
            return {"ngram": "two:make", "draft": "two:draft"}

    assert PluginRegistry.of({"two": Two()}).proposers() == {"ngram": "two:make", "draft": "two:draft"}
    with pytest.raises(PluginError, match=r"'ngram' .* plugin 'toy' .* plugin 'two'"):
        PluginRegistry.of({"toy": One(), "two": Two()}).proposers()


def test_a_wrapper_sees_the_answers_of_every_plugin_that_is_asked_once():
    class Brings(Named):
        @hookimpl
        def atom_ops(self):
            return [Op("toy.op", "torch:add", {}, "torch:add")]

    class Renames(Named):
        name = "wrapping"

        @hookimpl(wrapper=True)
        def atom_ops(self):
            answers = yield
            return [[Op("toy.renamed", op.reference, {}, "") for op in answer] for answer in answers]

    table = PluginRegistry.of({"toy": Brings(), "wrapping": Renames()}).kernel_table({})
    owners = {name: owner for name, (_, owner) in table.ops.items()}
    assert owners == {
        "toy.renamed": "plugin 'toy' (not installed)",
        "core.linear_row": "the core",
        "core.expert_rows": "the core",
    }


# Claims.


class ToyLayer(AttentionLayer):
    pass


class Claiming(Named):
    def __init__(self, name, answer):
        self.name = name
        self.answer = answer

    @hookimpl
    def atom_claim_layer(self, module, module_name):
        if not isinstance(module, nn.Linear):
            return None
        return self.answer(module_name) if callable(self.answer) else self.answer


EXACT, GENERIC = Claim(ToyLayer(), exact=True), Claim(ToyLayer(), exact=False)


def claim(*plugins, module=None):
    registry = PluginRegistry.of({plugin.name: plugin for plugin in plugins})
    return registry.claim_layer(module or nn.Linear(2, 2), "model.layers.0.proj", None, 1)


@pytest.mark.parametrize("exact_first", [True, False])
def test_an_exact_claim_beats_a_generic_one(exact_first):
    plugins = [Claiming("exact", EXACT), Claiming("generic", GENERIC)]
    assert claim(*(plugins if exact_first else plugins[::-1])) == ("exact", EXACT)


def test_a_foreign_module_has_no_owner():
    assert claim(Claiming("one", EXACT), module=nn.ReLU()) is None
    assert claim() is None


@pytest.mark.parametrize(("kind", "word"), [(EXACT, "exactly"), (GENERIC, "generically")])
def test_two_claims_of_one_kind_name_both_plugins_the_module_and_its_class(kind, word):
    with pytest.raises(ClaimError) as caught:
        claim(Claiming("one", kind), Claiming("two", kind))
    assert str(caught.value) == (
        f"module 'model.layers.0.proj' of class Linear is claimed {word} by plugin 'one' (not installed) and plugin "
        f"'two' (not installed); a layer has one owner, leave one plugin out with --no-plugin NAME"
    )


def test_two_generic_claims_do_not_matter_beside_an_exact_one():
    assert claim(Claiming("one", GENERIC), Claiming("two", GENERIC), Claiming("three", EXACT)) == ("three", EXACT)


def test_a_refusal_stops_the_model_unless_another_plugin_claims_exactly():
    def refuse(module_name):
        raise LayerError(f"{module_name} has a window that cannot be expressed")

    with pytest.raises(LayerError, match=r"model\.layers\.0\.proj has a window"):
        claim(Claiming("one", refuse), Claiming("two", GENERIC))
    assert claim(Claiming("one", refuse), Claiming("two", EXACT)) == ("two", EXACT)


@pytest.mark.parametrize("answer", [ToyLayer(), Claim(nn.Linear(1, 1), exact=True)])
def test_a_claim_of_a_wrong_type_names_the_plugin(answer):
    with pytest.raises(PluginError, match=r"plugin 'one' .*: atom_claim_layer returned .*, expected a Claim"):
        claim(Claiming("one", lambda _: answer))


def test_a_failing_claim_names_plugin_module_and_class():
    def fail(module_name):
        raise ZeroDivisionError("division by zero")

    with pytest.raises(PluginError, match=r"plugin 'one' .* failed on module 'model.layers.0.proj' of class Linear: Z"):
        claim(Claiming("one", fail))


def test_claims_can_be_wrapped():
    seen = []

    class Watching(Named):
        name = "watching"

        @hookimpl(wrapper=True)
        def atom_claim_layer(self, module_name):
            answers = yield
            seen.append((module_name, len(answers)))
            return answers

    assert claim(Claiming("one", EXACT), Watching()) == ("one", EXACT)
    assert seen == [("model.layers.0.proj", 1)]


# The data file of known classes.


@pytest.mark.parametrize(
    ("class_name", "children", "distribution"),
    [
        ("DeepseekV3Attention", None, "atom-mla"),
        ("Qwen3NextGatedDeltaNet", None, "atom-gdn"),
        ("MiMoV2FlashAttention", ("q_proj", "k_proj", "v_proj"), "atom-mimo"),
        ("DeepseekV4Attention", None, "atom-deepseek-v4"),
        ("LlamaAttention", None, "atom-mha"),
        ("LlamaAttention", ("q_proj", "k_proj", "v_proj", "o_proj"), "atom-mha"),
        ("GPT2Attention", ("c_attn", "c_proj"), None),
        ("KimiLinearDeltaAttention", ("q_proj", "k_proj", "v_proj"), None),
        ("MambaMixer", None, None),
    ],
)
def test_known_classes_name_their_distribution(class_name, children, distribution):
    assert distribution_for(class_name, children) == distribution


def test_every_class_named_in_full_exists_in_transformers():
    models = Path(find_spec("transformers").origin).parent / "models"
    text = (REPOSITORY / "atom_core/plugin/known_layers.toml").read_text()
    named = {name for entry in tomllib.loads(text)["layers"] for name in entry["classes"] if "*" not in name}
    missing = set(named)
    for file in models.glob("*/modeling_*.py"):
        source = file.read_text(encoding="utf-8")
        missing -= {name for name in missing if f"class {name}(" in source}
    assert named
    assert not missing


def test_claims_of_a_large_model_are_cheap():
    """Thousands of modules and several plugins: a bound loose enough for a busy machine."""
    registry = PluginRegistry.of({name: Claiming(name, GENERIC) for name in ("a", "b", "c", "d")})
    module = nn.ReLU()
    registry.claim_layer(module, "warm", None, 1)
    start = time.perf_counter()
    for _ in range(1000):
        registry.claim_layer(module, "m", None, 1)
    assert time.perf_counter() - start < 1.0
