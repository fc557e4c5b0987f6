"""`atom plan` for released models, against bytes worked out by hand; where the configs come from is in tests/data.

All caches are bfloat16, 2 bytes per value, and blocks have 16 tokens. `TOKEN_BYTES` and `SLOT_BYTES` are formulas with
the numbers of the config, never our own output; where a figure was multiplied out on paper, it stands beside.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atom_core.cli.main import app
from atom_core.cli.options import engine_config
from atom_core.cli.plan import plan_dict
from atom_core.engine.startup import inspect_model
from atom_core.errors import LayerError
from atom_core.plugin.registry import PluginRegistry

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
PAGES = Path(__file__).parents[2] / "docs" / "plugins"
BLOCK = 16
MEMORY = "4000GiB"
PLAN_SECONDS, PEAK_BYTES = 5.0, 2 << 30


def token_bytes(layers, kv_heads, key_dim, value_dim):
    """Keys and values of one token."""
    return layers * kv_heads * (key_dim + value_dim) * 2


def delta_slot(layers, k_heads, v_heads):
    """Heads of 128; the last 3 inputs of the convolution in bfloat16, and a float32 matrix per value head."""
    return layers * (3 * (2 * k_heads * 128 + v_heads * 128) * 2 + v_heads * 128 * 128 * 4)


def ring_slot(heads, drafts):
    """39 layers of MiMo-V2-Flash: the window of 128, the query itself, and a row per draft."""
    return 39 * heads * (192 + 128) * 2 * (128 + 1 + drafts)


# Bytes of one token in blocks on one rank, by plugin.
TOKEN_BYTES = {
    # A latent of 512 and a rotary key of 64, 61 layers: 70,272. Every rank holds all of it.
    ("DeepSeek-V3", 1): {"mla": 61 * (512 + 64) * 2},
    ("DeepSeek-V3", 4): {"mla": 61 * (512 + 64) * 2},
    # And an index key of 128: 85,888.
    ("DeepSeek-V3.2", 1): {"mla": 61 * (512 + 64 + 128) * 2},
    ("DeepSeek-V3.2", 4): {"mla": 61 * (512 + 64 + 128) * 2},
    # 12 of 48 layers keep keys, 2 heads of 256: 24,576.
    ("Qwen3-Next-80B-A3B", 1): {"mha": token_bytes(12, 2, 256, 256), "gdn": 0},
    ("Qwen3-Next-80B-A3B", 2): {"mha": token_bytes(12, 1, 256, 256), "gdn": 0},
    # 15 of 60: 30,720.
    ("Qwen3.5-397B-A17B", 1): {"mha": token_bytes(15, 2, 256, 256), "gdn": 0},
    ("Qwen3.5-397B-A17B", 2): {"mha": token_bytes(15, 1, 256, 256), "gdn": 0},
    # 9 of 48, 4 heads: 23,040.
    ("MiMo-V2-Flash", 1): {"mimo": token_bytes(9, 4, 192, 128)},
    ("MiMo-V2-Flash", 4): {"mimo": token_bytes(9, 1, 192, 128)},
    # 8 heads of 128, 80 layers: 327,680.
    ("Llama-3.1-70B", 1): {"mha": token_bytes(80, 8, 128, 128)},
    ("Llama-3.1-70B", 4): {"mha": token_bytes(80, 2, 128, 128)},
    # 4 heads of 128, 94 layers: 192,512.
    ("Qwen3-235B-A22B", 1): {"mha": token_bytes(94, 4, 128, 128)},
    ("Qwen3-235B-A22B", 4): {"mha": token_bytes(94, 1, 128, 128)},
    # 8 heads of 64, 36 layers: 73,728. transformers' own plan does not shard this attention: every rank holds all.
    ("gpt-oss-120b", 1): {"mha": token_bytes(36, 8, 64, 64)},
    ("gpt-oss-120b", 4): {"mha": token_bytes(36, 8, 64, 64)},
}
assert [
    sum(TOKEN_BYTES[name, 1].values())
    for name in (
        "DeepSeek-V3",
        "DeepSeek-V3.2",
        "Qwen3-Next-80B-A3B",
        "Qwen3.5-397B-A17B",
        "MiMo-V2-Flash",
        "Llama-3.1-70B",
        "Qwen3-235B-A22B",
        "gpt-oss-120b",
    )
] == [70_272, 85_888, 24_576, 30_720, 23_040, 327_680, 192_512, 73_728]

# Bytes of one slot and slots of one request, by drafts per step; other models have no state.
STATE = {
    ("Qwen3-Next-80B-A3B", 1, 0): (delta_slot(36, 16, 32), 1),
    ("Qwen3-Next-80B-A3B", 1, 3): (delta_slot(36, 16, 32), 4),
    ("Qwen3-Next-80B-A3B", 2, 0): (delta_slot(36, 8, 16), 1),
    ("Qwen3-Next-80B-A3B", 2, 3): (delta_slot(36, 8, 16), 4),
    ("Qwen3.5-397B-A17B", 1, 0): (delta_slot(45, 16, 64), 1),
    ("Qwen3.5-397B-A17B", 1, 3): (delta_slot(45, 16, 64), 4),
    ("Qwen3.5-397B-A17B", 2, 0): (delta_slot(45, 8, 32), 1),
    ("Qwen3.5-397B-A17B", 2, 3): (delta_slot(45, 8, 32), 4),
    ("MiMo-V2-Flash", 1, 0): (ring_slot(8, 0), 1),
    ("MiMo-V2-Flash", 1, 3): (ring_slot(8, 3), 1),
    ("MiMo-V2-Flash", 4, 0): (ring_slot(2, 0), 1),
    ("MiMo-V2-Flash", 4, 3): (ring_slot(2, 3), 1),
}
assert delta_slot(36, 16, 32) == 77_266_944
assert delta_slot(45, 16, 64) == 192_061_440
assert ring_slot(8, 0) == 25_758_720
assert ring_slot(8, 3) == 26_357_760

# Full-attention layers of these have 2 key heads.
REFUSED = ("Qwen3-Next-80B-A3B", "Qwen3.5-397B-A17B")


@pytest.fixture(scope="module")
def registry():
    return PluginRegistry.discover()


def inspect(name, registry, **options):
    options = {"max_num_seqs": 4, "memory": MEMORY, **options}
    return inspect_model(engine_config(model=str(CONFIGS / f"{name}.json"), random_weights=0, **options), registry)


def make_plan(name, registry, **options):
    inspection = inspect(name, registry, **options)
    return plan_dict(inspection, inspection.plan())


@pytest.mark.parametrize(("name", "tp_size"), TOKEN_BYTES, ids=lambda value: str(value))
def test_bytes_are_those_worked_out_by_hand(name, tp_size, registry):
    for drafts in (0, 3):
        found = make_plan(name, registry, tensor_parallel_size=tp_size, num_spec_tokens=drafts)
        slot_bytes, slots = STATE.get((name, tp_size, drafts), (0, None))
        expected = TOKEN_BYTES[name, tp_size]
        assert found["block_size"] == BLOCK
        assert found["bytes_per_token"] == sum(expected.values())
        plugins = found["plugins"]
        assert {plugin: figures["block_bytes"] for plugin, figures in plugins.items()} == {
            plugin: BLOCK * figure for plugin, figure in expected.items()
        }
        with_state = {plugin: figures for plugin, figures in plugins.items() if figures["slot_bytes"]}
        assert {plugin: figures["slot_bytes"] for plugin, figures in with_state.items()} == (
            {"mimo" if "mimo" in expected else "gdn": slot_bytes} if slot_bytes else {}
        )
        assert all(figures["slots_per_req"] == slots for figures in with_state.values())
        assert found["plan"]["group_bytes"] == slot_bytes * (slots or 0)


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_do_not_divide_are_refused_by_name(name, registry):
    with pytest.raises(LayerError) as caught:
        make_plan(name, registry, tensor_parallel_size=4)
    assert "layers.3.self_attn" in str(caught.value)
    assert "2 key heads cannot be divided among 4 ranks; choose a tensor-parallel size" in str(caught.value)


REPLICATED, QUARTER = {"block": 1.0}, {"block": 0.25}
SHARES_AT_4 = {
    "DeepSeek-V3": {"mla": REPLICATED},
    "DeepSeek-V3.2": {"mla": REPLICATED},
    "MiMo-V2-Flash": {"mimo": {"block": 0.25, "slot": 0.25}},
    "Llama-3.1-70B": {"mha": QUARTER},
    "Qwen3-235B-A22B": {"mha": QUARTER},
    "gpt-oss-120b": {"mha": REPLICATED},
}


@pytest.mark.parametrize("name", SHARES_AT_4)
def test_the_plan_says_what_is_replicated(name, registry):
    whole = inspect(name, registry)
    quarter = inspect(name, registry, tensor_parallel_size=4)
    found = plan_dict(quarter, quarter.plan(), whole)
    assert {plugin: figures["rank_share"] for plugin, figures in found["plugins"].items()} == SHARES_AT_4[name]


@pytest.mark.parametrize(("name", "words"), [("gpt-oss-120b", "replicated"), ("Llama-3.1-70B", "holds 0.25 of it")])
def test_the_printed_plan_says_it_too(name, words, capsys):
    arguments = ["plan", str(CONFIGS / f"{name}.json"), "--memory", MEMORY, "--tensor-parallel-size", "4"]
    app([*arguments, "--max-num-seqs", "4"], standalone_mode=False)
    assert f"mha block: {'divided, a rank ' if 'holds 0' in words else ''}{words}" in capsys.readouterr().out


def test_a_rank_has_its_share_of_the_weights(registry):
    """Llama-3.1-70B: all projections, embeddings and the head are divided; 161 norms of 8,192 are not."""
    norms = 161 * 8192 * 2
    whole = inspect("Llama-3.1-70B", registry).weight_bytes
    buffers = whole - 70_553_706_496 * 2
    assert buffers == 2 * 64 * 4, "64 rotary frequencies in float32, as they are and as they were before scaling"
    quarter = inspect("Llama-3.1-70B", registry, tensor_parallel_size=4).weight_bytes
    assert quarter - buffers == (70_553_706_496 * 2 - norms) // 4 + norms


def test_a_long_request_of_rings_and_blocks(registry):
    """131,072 tokens: 9 full layers of 4 heads in blocks, 39 windowed layers of 8 heads in rings."""
    options = {"max_model_len": 131_072, "max_num_seqs": 1}
    plan = make_plan("MiMo-V2-Flash", registry, **options)["plan"]
    assert plan["num_blocks"] * BLOCK == 131_072
    assert plan["num_groups"] == 1
    assert plan["num_blocks"] * plan["block_bytes"] + plan["group_bytes"] == (
        9 * 4 * (192 + 128) * 2 * 131_072 + 39 * 8 * (192 + 128) * 2 * 129
    )
    assert plan["num_blocks"] * plan["block_bytes"] + plan["group_bytes"] == 3_045_657_600


def measure(*command):
    """Run a process; its output, CPU seconds and peak bytes."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return output, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


@pytest.fixture(scope="module")
def import_seconds():
    """What any program that uses transformers' models pays on this machine, as loaded as it is now."""
    return measure(sys.executable, "-c", "import torch, transformers.modeling_utils")[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for name, _ in TOKEN_BYTES}))
def test_a_plan_takes_seconds_and_no_weights(name, import_seconds, record_property):
    """Of the 10 seconds of the whole command, half is left to the imports, which a busy machine makes slower."""
    path = str(CONFIGS / f"{name}.json")
    atom = str(Path(sys.executable).with_name("atom"))
    output, seconds, peak = measure(atom, "plan", path, "--json", "--memory", MEMORY, "--max-num-seqs", "4")
    found = json.loads(output)
    record_property("cpu_seconds", seconds)
    record_property("import_seconds", import_seconds)
    record_property("peak_bytes", peak)
    assert found["bytes_per_token"] == sum(TOKEN_BYTES[name, 1].values())
    assert seconds - import_seconds < PLAN_SECONDS
    assert peak < PEAK_BYTES
    assert found["weight_bytes"] > 20 * peak


def test_the_pages_of_the_plugins_show_these_figures():
    figures = {plugin: set() for plugin in ("mha", "mla", "gdn", "mimo")}
    for by_plugin in TOKEN_BYTES.values():
        for plugin, figure in by_plugin.items():
            figures[plugin].add(figure * BLOCK if plugin == "mimo" else figure)
    for (name, _, _), (slot_bytes, _) in STATE.items():
        figures["mimo" if name.startswith("MiMo") else "gdn"].add(slot_bytes)
    for plugin, expected in figures.items():
        page = (PAGES / f"{plugin}.md").read_text(encoding="utf-8")
        # Qwen3's two hybrids at two ranks have half of what the page of mha shows for one.
        expected -= {0, token_bytes(12, 1, 256, 256), token_bytes(15, 1, 256, 256)}
        assert {figure for figure in expected if f"{figure:,}" not in page} == set(), plugin


def test_every_config_is_planned():
    assert {path.stem for path in CONFIGS.glob("*.json")} == {name for name, _ in TOKEN_BYTES}
