"""docs/writing-a-plugin.md, followed to the letter: its files make a plugin that passes, and its outputs are real.

A comment above each code block says what it is: `file` (written into the package of section 5), `from` (quoted from the
package that `atom new-plugin banded` makes, or from this repository), `run` (commands), `output` (compared with a run).
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from atom_core import LLM
from atom_core.cli.main import app
from atom_core.cli.new_plugin import render_plugin
from atom_core.errors import AtomError
from tests.plugin.sites import REPOSITORY, Site, importable
from tests.tiny_models import tiny_config

PAGE = (REPOSITORY / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^<!-- (\w+): (\S+) -->\n```\w+\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
FILES = {name: text for kind, name, text in BLOCKS if kind == "file"}
OUTPUTS = {name: text for kind, name, text in BLOCKS if kind == "output"}
QUOTES = [(name, text) for kind, name, text in BLOCKS if kind == "from"]
BIN = Path(sys.executable).parent


def test_every_code_block_is_checked_here():
    assert PAGE.count("\n```") == 2 * len(BLOCKS)
    assert {kind for kind, _, _ in BLOCKS} == {"file", "from", "run", "output"}
    assert [name for kind, name, _ in BLOCKS if kind == "run"] == ["window"]
    source = Path(__file__).read_text(encoding="utf-8")
    assert sorted(OUTPUTS) == sorted(set(re.findall(r'OUTPUTS\["([\w-]+)"\]', source)))


@pytest.mark.parametrize("number", range(len(QUOTES)))
def test_a_quotation_is_what_the_file_says(number):
    name, text = QUOTES[number]
    generated = render_plugin("banded")
    source = generated[name] if name in generated else (REPOSITORY / name).read_text(encoding="utf-8")
    assert text in source


# Sections 1 to 3.


def refusal(registry, folder, **options):
    """What the startup says, before weights: there are none."""
    with pytest.raises(AtomError) as caught:
        LLM(str(folder), registry=registry, skip_tokenizer=True, device="cpu", dtype="float32", memory="1GB", **options)
    return str(caught.value)


def test_a_module_without_an_owner(tmp_path):
    site = Site(tmp_path / "site")
    site.install("atom-mha", {"mha": "atom_mha.plugin:plugin"}, {})
    tiny_config("bloom").save_pretrained(tmp_path / "bloom")
    message = refusal(site.discover(), tmp_path / "bloom", max_model_len=1024)
    assert OUTPUTS["unowned"] == f"$ atom check bloom --max-model-len 1024\natom: {message}\n"


def test_the_new_package_and_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    app(["new-plugin", "banded"], standalone_mode=False)
    assert OUTPUTS["new-plugin"] == f"$ atom new-plugin banded\n{capsys.readouterr().out}"
    root = tmp_path / "atom-banded"
    found = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    assert OUTPUTS["tree"].splitlines() == found


def test_the_number_of_tests_that_pass_as_generated(tmp_path):
    app(["new-plugin", "banded", "--directory", str(tmp_path / "new")], standalone_mode=False)
    done = run(tmp_path / "new", "pytest", "--collect-only", "-q", path=tmp_path / "new" / "src")
    count = int(re.search(r"(\d+) tests collected", done.stdout).group(1))
    assert OUTPUTS["pytest"] == f"{count} passed\n"
    assert sum("test_conformance.py" in line for line in done.stdout.splitlines()) == 30


# Section 5.


def run(directory, *command, path=None, columns=120):
    """Run a command with the tools of this environment."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"COLUMNS": str(columns), "PYTHONPATH": os.pathsep.join([str(path or ""), str(REPOSITORY)])}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package of section 5, made as the section says."""
    directory = tmp_path_factory.mktemp("guide")
    (commands,) = (text for kind, _, text in BLOCKS if kind == "run")
    for command in commands.splitlines():
        words = shlex.split(command.removeprefix("$ "))
        if words[0] == "cd":
            directory /= words[1]
            continue
        done = run(directory, *words)
        assert done.returncode == 0, done.stderr
    for name, text in FILES.items():
        assert (directory / name).parent.is_dir(), f"{name} goes into a directory that is not there"
        (directory / name).write_text(text, encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def site(package, tmp_path_factory):
    """Where the package is installed."""
    site = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    done = run(package, "python", "-m", "pip", "install", *options, "--target", str(site), str(package))
    assert done.returncode == 0, done.stderr
    return site


def test_the_files_are_formatted_and_clean(package):
    for command in (("format", "--check"), ("check", "--no-cache")):
        done = run(package, "ruff", *command, ".")
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_files_pass_mypy_strict(package):
    cache = str(REPOSITORY / ".mypy_cache" / "generated")
    done = run(package, "mypy", "--follow-imports=silent", "--cache-dir", cache, "src", path=package / "src")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_plugin_passes_the_kit_and_the_table_is_its(package, site):
    done = run(package, "atom", "conformance", "window", path=site)
    assert done.returncode == 0, done.stdout + done.stderr
    commands = "$ pip install -e '.[dev]'\n$ atom conformance window\n"
    assert without_times(OUTPUTS["conformance"]) == without_times(commands + done.stdout)


def without_times(table):
    return re.sub(r"profile, \d+ s *", "profile", table)


@pytest.mark.slow
def test_the_test_that_is_added_passes(package):
    done = run(package, "pytest", "-q", "tests/test_generate.py", path=package / "src")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


# Sections 7 to 9.


def changed(package, tmp_path, name, before, after):
    """A copy of the package's source with a change, as a directory to import from."""
    sources = {path.name: path.read_text() for path in (package / "src" / "atom_window").glob("*.py")}
    assert before in sources[name]
    sources[name] = sources[name].replace(before, after)
    return {f"atom_window/{file}": source for file, source in sources.items()}


def test_the_model_type_is_not_registered(package, tmp_path):
    hook = re.search(r"    @hookimpl\n    def atom_model_types.*?\n\n", FILES["src/atom_window/plugin.py"], re.DOTALL)
    files = changed(package, tmp_path, "plugin.py", hook.group(), "")
    site = Site(tmp_path / "site")
    site.install("atom-window", {"window": "atom_window.plugin:plugin"}, files)
    config = tiny_config(
        "mistral",
        num_hidden_layers=2,
        sliding_window=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        hidden_size=16,
    )
    config.save_pretrained(tmp_path / "mistral")
    with importable(site.root):
        assert OUTPUTS["forgotten"] == f"{refusal(site.discover(), tmp_path / 'mistral')}\n"
    assert f"has {2 * 2 * 8 * 1 * 8 * 4} bytes" in OUTPUTS["forgotten"]


@pytest.mark.slow
def test_a_ring_without_room_for_drafts_is_reported(package, tmp_path):
    files = changed(package, tmp_path, "plugin.py", ".window + num_spec_tokens", ".window")
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    done = run(package, "pytest", "-q", "tests/test_conformance.py", "-k", "i09 and small", path=tmp_path)
    assert done.returncode == 1, done.stdout
    report = re.search(r"Violation: (I9 .*)", done.stdout)
    assert report is not None, done.stdout
    assert shape_of(OUTPUTS["violation"]) == shape_of(report.group(1))


def shape_of(report):
    """A report without its numbers and the number of its steps: what the search finds first is up to hypothesis."""
    report = re.sub(r"\d+ of \d+(, \d+ of \d+)*", "STEPS", report.strip())
    return re.sub(r"[\d.]+(e-\d+)?", "N", report)


def test_a_kernel_of_another_package_is_forced(capsys):
    app(["kernels", "--kernel", "mha.prefill=sdpa", "--json"], standalone_mode=False)
    printed = capsys.readouterr().out
    command, *lines = OUTPUTS["forced"].splitlines()
    assert command == "$ atom kernels --kernel mha.prefill=sdpa --json"
    shown = "\n".join(lines).rstrip(",")
    assert shown.startswith("  {")
    assert shown.endswith("}")
    assert shown in printed
