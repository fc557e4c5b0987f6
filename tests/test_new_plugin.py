"""`atom new-plugin`: what it makes works as made, and bad names say what is wrong."""

import os
import re
import subprocess
import sys

import pytest

from atom_core.cli.main import app
from atom_core.cli.new_plugin import render_plugin
from atom_core.errors import ConfigError
from tests.plugin.sites import REPOSITORY, Site

LONGEST = "abcdefghij_klmnopqrst_uv"


def make(name, directory):
    """Run the command in this process."""
    app(["new-plugin", name, "--directory", str(directory)], standalone_mode=False)
    return directory


def tool(directory, *command):
    """Run a tool of this environment in a generated package; the package itself is on the path, not installed."""
    path = os.pathsep.join([str(directory / "src"), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return make("banded", tmp_path_factory.mktemp("new") / "atom-banded")


@pytest.mark.parametrize("name", ["k", "banded", LONGEST])
def test_generated_code_is_formatted_and_clean(tmp_path, name):
    directory = make(name, tmp_path / "package")
    for command in (("format", "--check"), ("check", "--no-cache")):
        done = tool(directory, "ruff", *command, ".")
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_generated_code_passes_mypy_strict(package):
    done = tool(
        package, "mypy", "--follow-imports=silent", "--cache-dir", str(REPOSITORY / ".mypy_cache" / "generated"), "src"
    )
    assert done.returncode == 0, done.stdout
    assert "strict = true" in (package / "pyproject.toml").read_text()


@pytest.mark.slow
def test_generated_tests_pass_as_generated(package):
    done = tool(package, "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 15
    assert "failed" not in done.stdout
    assert "skipped" not in done.stdout


def test_generated_package_installs_and_its_plugin_loads(package, tmp_path):
    site = tmp_path / "site"
    install = ("install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(site), str(package))
    done = tool(package, "pip", *install)
    assert done.returncode == 0, done.stderr
    (record,) = Site(site).discover().records
    assert (record.name, record.distribution, record.version) == ("banded", "atom-banded", "0.1.0")
    assert str(record.status) == "loaded", record.reason
    assert (site / "atom_banded" / "py.typed").is_file()


def test_nothing_of_the_template_is_left():
    files = render_plugin("banded")
    assert {".github/workflows/ci.yml", "src/atom_banded/plugin.py"} < files.keys()
    for path, text in files.items():
        assert not re.search(r"\{\{|\{%|PACKAGE|jinja", f"{path}\n{text}"), path


def test_every_file_of_the_template_is_rendered():
    sources = [path for path in (REPOSITORY / "atom_core" / "templates" / "plugin").rglob("*") if path.is_file()]
    assert len(render_plugin("banded")) == len(sources) > 10


def test_a_name_of_several_words(tmp_path):
    directory = make("two_words", tmp_path / "package")
    assert "class TwoWordsPlugin(" in (directory / "src" / "atom_two_words" / "plugin.py").read_text()
    assert 'name = "atom-two-words"' in (directory / "pyproject.toml").read_text()
    assert (directory / "README.md").read_text().startswith("# atom-two-words\n\nTwo words attention")


@pytest.mark.parametrize("name", ["", "Banded", "2d", "a-b", "a.b", "a__b", "_a", "a_", "é", "a" * 25])
def test_a_name_that_is_no_identifier_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be a plugin's name here; expected lower-case letters"):
        make(name, tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_the_name_of_an_installed_plugin_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"a plugin named 'mha' is installed already: atom-mha 0\.1\.0 at "):
        make("mha", tmp_path / "package")


def test_the_name_of_a_package_that_is_no_plugin_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="would be named 'atom_core', and a package of this name can be imported"):
        make("core", tmp_path / "package")


def test_a_directory_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; give a new or empty directory"):
        make("banded", tmp_path)
    with pytest.raises(ConfigError, match=r"notes\.txt is a file"):
        make("banded", tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_directory_is_named_after_the_distribution(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    app(["new-plugin", "two_words"], standalone_mode=False)
    assert [path.name for path in tmp_path.iterdir()] == ["atom-two-words"]
    assert "cd atom-two-words" in capsys.readouterr().out
