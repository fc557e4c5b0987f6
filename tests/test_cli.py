"""The `atom` command: results on stdout, one clear line on stderr and exit code 2 for bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atom_core.cli.main import app
from tests.tiny_models import tiny_config, tiny_model

ATOM = Path(sys.executable).with_name("atom")


def run(*arguments):
    return subprocess.run([str(ATOM), *arguments], capture_output=True, text=True, check=False)


def in_process(capsys, *arguments):
    """Run a subcommand without a new process; returns what it printed."""
    app(list(arguments), standalone_mode=False)
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def config_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    tiny_config("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "no/such/model/here"), "no/such/model/here"),
        (("plan", "demo", "--memory", "many"), "'many' is not a size"),
        (("generate", "demo"), "give either prompts"),
        (("kernels", "--kernel", "nonsense"), "OP=NAME"),
        (("plugins", "--no-plugin", "nobody"), "nobody"),
        (("no-such-command",), "no-such-command"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback():
    done = run("--debug", "plan", "demo", "--memory", "many")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_plugins_lists_what_is_installed(capsys):
    rows = json.loads(in_process(capsys, "plugins", "--json"))
    assert {"name": "mha", "distribution": "atom-mha", "status": "loaded"}.items() <= next(
        row for row in rows if row["name"] == "mha"
    ).items()


def test_kernels_lists_ops_with_their_owner(capsys):
    rows = json.loads(in_process(capsys, "kernels", "--json"))
    assert any(row["op"] == "mha.decode" and row["kernel"] == "reference" for row in rows)


def test_check_maps_layers_to_plugins(capsys, config_folder):
    found = json.loads(
        in_process(capsys, "check", str(config_folder), "--random-weights", "0", "--cache-memory", "8MB", "--json")
    )
    assert {row["plugin"] for row in found["layers"]} == {"mha"}
    assert found["stateful"] is False
    assert "ok" in in_process(capsys, "check", str(config_folder), "--random-weights", "0", "--cache-memory", "8MB")


def test_plan_needs_no_weights(capsys, config_folder):
    found = json.loads(in_process(capsys, "plan", str(config_folder), "--memory", "64MB", "--json"))
    config = tiny_config("llama")
    head_dim = config.hidden_size // config.num_attention_heads
    expected = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4
    assert found["bytes_per_token"] == expected


def test_plan_and_check_show_the_role_that_drafts(capsys, config_folder):
    alone = json.loads(in_process(capsys, "plan", str(config_folder), "--memory", "64MB", "--json"))
    draft = ("--draft-model", str(config_folder), "--num-spec-tokens", "2", "--memory", "64MB")
    found = json.loads(in_process(capsys, "plan", str(config_folder), *draft, "--json"))
    assert set(found["plugins"]) == {"mha", "draft/mha"}
    for field in ("weight_bytes", "bytes_per_token"):
        assert found[field] == 2 * alone[field]
    assert in_process(capsys, "plan", str(config_folder), *draft).count("of the draft") == 2
    layers = json.loads(in_process(capsys, "check", str(config_folder), *draft, "--random-weights", "0", "--json"))
    assert sum(row["module"].startswith("draft/") for row in layers["layers"]) == len(layers["layers"]) / 2


def test_bench_takes_a_proposer(capsys, model_folder):
    arguments = ("--input-tokens", "8", "--output-tokens", "6", "--cache-memory", "32MB", "--json")
    found = json.loads(
        in_process(capsys, "bench", "throughput", str(model_folder), "--draft-model", str(model_folder), *arguments)
    )
    assert found["stats"]["acceptance_length"] > 1


def test_plan_says_what_would_fit(config_folder):
    done = run("plan", str(config_folder), "--memory", "1MB")
    assert done.returncode == 2
    assert "max_model_len" in done.stderr or "weights take" in done.stderr


def test_bench_reports_rates(capsys, model_folder):
    arguments = ("--input-tokens", "8", "--output-tokens", "4", "--cache-memory", "8MB", "--json")
    for kind, figure in (("throughput", "output_tokens_per_second"), ("latency", "seconds_to_first_token")):
        found = json.loads(in_process(capsys, "bench", kind, str(model_folder), *arguments))
        assert found[figure] > 0


def test_generate_needs_a_tokenizer_for_text(model_folder):
    done = run("generate", str(model_folder), "--prompt", "hello", "--cache-memory", "8MB")
    assert done.returncode == 2
    assert "tokenizer" in done.stderr
    assert "Traceback" not in done.stderr


def test_version(capsys):
    import atom_core

    assert run("--version").stdout.strip() == f"atom {atom_core.__version__}"
