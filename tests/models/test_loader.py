"""Finding, building and loading models; nothing here needs the network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    T5Config,
)

from atom_core.config import EngineConfig
from atom_core.errors import ConfigError, ModelError
from atom_core.models.loader import (
    build_meta_model,
    load_model,
    load_tokenizer,
    resolve_config,
    resolve_device,
    resolve_dtype,
    weight_bytes,
)

CPU = torch.device("cpu")
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def tiny_config(**changes):
    return LlamaConfig(**{**TINY, **HEADS, "bos_token_id": 1, "eos_token_id": 2, **changes})


@pytest.fixture
def checkpoint(tmp_path):
    """A model folder with bfloat16 weights, and the model it was saved from."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config()).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", model


def load(config: EngineConfig):
    model_config = resolve_config(config)
    dtype = resolve_dtype(config, model_config)
    return load_model(config, model_config, dtype, CPU)


def same_weights(a, b):
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


class TestFolder:
    def test_weights_and_dtype_are_the_checkpoints(self, checkpoint):
        folder, saved = checkpoint
        model = load(EngineConfig(model=str(folder)))
        assert model.dtype == torch.bfloat16
        assert same_weights(model, saved)

    def test_model_is_frozen_and_uses_our_attention(self, checkpoint):
        model = load(EngineConfig(model=checkpoint[0]))
        assert not model.training
        assert not any(p.requires_grad for p in model.parameters())
        assert model.config._attn_implementation == "atom"

    def test_dtype_asked_for_wins(self, checkpoint):
        model = load(EngineConfig(model=checkpoint[0], dtype="float16"))
        assert {p.dtype for p in model.parameters()} == {torch.float16}

    def test_rotary_frequencies_stay_float32(self, checkpoint):
        for extra in ({}, {"random_weights": 1}):
            model = load(EngineConfig(model=checkpoint[0], dtype="bfloat16", **extra))
            assert model.model.rotary_emb.inv_freq.dtype == torch.float32

    def test_sharded_weights(self, checkpoint, tmp_path):
        checkpoint[1].save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
        assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
        assert same_weights(load(EngineConfig(model=tmp_path / "sharded")), checkpoint[1])

    def test_missing_shard_is_named(self, checkpoint, tmp_path):
        checkpoint[1].save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
        lost = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
        lost.unlink()
        with pytest.raises(ModelError, match=lost.name):
            load(EngineConfig(model=tmp_path / "sharded"))

    def test_truncated_weights(self, checkpoint):
        file = checkpoint[0] / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(ModelError, match="cannot load the weights"):
            load(EngineConfig(model=checkpoint[0]))

    def test_weights_that_lack_a_tensor_are_refused_not_made_up(self, checkpoint):
        from safetensors.torch import load_file, save_file

        file = checkpoint[0] / "model.safetensors"
        tensors = load_file(file)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"1 missing keys.*layers\.1\.mlp\.up_proj"):
            load(EngineConfig(model=checkpoint[0]))

    def test_weights_of_another_shape_are_refused(self, checkpoint):
        file = checkpoint[0] / "config.json"
        fields = json.loads(file.read_text())
        file.write_text(json.dumps({**fields, "intermediate_size": 96}))
        with pytest.raises(ModelError, match=str(checkpoint[0])):
            load(EngineConfig(model=checkpoint[0]))

    def test_language_model_of_a_multimodal_checkpoint(self, tmp_path):
        torch.manual_seed(0)
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        whole = Gemma3ForConditionalGeneration(
            Gemma3Config(text_config={**TINY, **HEADS}, vision_config={**vision, "image_size": 28, "patch_size": 14})
        ).eval()
        whole.save_pretrained(tmp_path)
        config = EngineConfig(model=tmp_path)
        assert resolve_config(config).model_type == "gemma3_text"
        model = load(config)
        assert type(model).__name__ == "Gemma3ForCausalLM"
        assert same_weights(model.model, whole.model.language_model)
        assert torch.equal(model.lm_head.weight, whole.lm_head.weight)

    def test_progress_is_told(self, checkpoint):
        config = EngineConfig(model=checkpoint[0])
        told = []
        load_model(config, resolve_config(config), torch.float32, CPU, told.append)
        assert told == [f"loading weights of {checkpoint[0]}"]

    def test_nothing_on_the_terminal(self, checkpoint, capfd):
        load(EngineConfig(model=checkpoint[0]))
        assert capfd.readouterr() == ("", "")


class TestWhatCannotBeFound:
    def refuse(self, match, **fields):
        with pytest.raises(ModelError, match=match):
            load(EngineConfig(**fields))

    def test_missing_folder(self, tmp_path):
        self.refuse("no folder or file", model=str(tmp_path / "nowhere"))

    def test_missing_relative_folder(self):
        self.refuse("no folder or file", model="./nowhere")

    def test_missing_gguf_file(self):
        self.refuse("no folder or file", model="nowhere.gguf")

    def test_file_of_another_kind(self, tmp_path):
        (tmp_path / "model.safetensors").write_bytes(b"")
        self.refuse(r"expected a folder, a \.gguf file", model=tmp_path / "model.safetensors")

    def test_folder_without_config(self, tmp_path):
        self.refuse("has no config.json", model=tmp_path)

    def test_folder_with_a_gguf_file_only(self, tmp_path):
        (tmp_path / "some.gguf").write_bytes(b"GGUF")
        self.refuse("name its GGUF file itself.*some.gguf", model=tmp_path)

    def test_folder_without_weights(self, checkpoint):
        (checkpoint[0] / "model.safetensors").unlink()
        self.refuse("no model.safetensors.*random_weights=SEED", model=checkpoint[0])

    def test_config_that_is_no_json(self, tmp_path):
        (tmp_path / "config.json").write_text("{")
        self.refuse("config.json cannot be read", model=tmp_path)

    def test_config_without_model_type(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        self.refuse("names no model_type", model=tmp_path)

    def test_unknown_model_type(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "shiny"}')
        self.refuse("does not know model_type 'shiny'.*newer transformers", model=tmp_path)

    def test_code_of_the_model_is_not_run_unasked(self, tmp_path):
        fields = {"model_type": "shiny", "auto_map": {"AutoConfig": "code.Shiny", "AutoModelForCausalLM": "code.Model"}}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        (tmp_path / "code.py").write_text("raise RuntimeError('it ran')")
        self.refuse("brings its own code; pass trust_remote_code=True", model=tmp_path)
        self.refuse("it ran", model=tmp_path, trust_remote_code=True)

    def test_encoder_decoder(self):
        self.refuse("no causal language model", model=T5Config(), random_weights=0)

    def test_config_object_without_seed(self):
        self.refuse("has no weights; pass random_weights=SEED", model=tiny_config())

    def test_something_else(self):
        self.refuse("7 is no model: expected", model=7)
        self.refuse("Linear, expected a transformers PreTrainedModel", model=torch.nn.Linear(1, 1))

    def test_hub_id_without_network(self, monkeypatch, tmp_path):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        self.refuse("no local folder or file 'no-one/no-model'.*cannot be reached", model="no-one/no-model")


class TestHubCache:
    def test_a_cached_model_needs_no_network(self, checkpoint, monkeypatch, tmp_path):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        cached = tmp_path / "hub" / "models--someone--tiny"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0" * 40)
        shutil.copytree(checkpoint[0], cached / "snapshots" / ("0" * 40))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        assert same_weights(load(EngineConfig(model="someone/tiny")), checkpoint[1])


class TestRandomWeights:
    def test_depend_on_the_seed_only(self):
        torch.manual_seed(1)
        first = load(EngineConfig(model=tiny_config(), random_weights=5))
        torch.manual_seed(2)
        assert same_weights(first, load(EngineConfig(model=tiny_config(), random_weights=5)))
        assert not same_weights(first, load(EngineConfig(model=tiny_config(), random_weights=6)))

    def test_leave_the_global_random_state(self):
        before = torch.get_rng_state()
        load(EngineConfig(model=tiny_config(), random_weights=5))
        assert torch.equal(torch.get_rng_state(), before)

    def test_are_drawn_in_float32_and_cast(self):
        exact = load(EngineConfig(model=tiny_config(), random_weights=5))
        half = load(EngineConfig(model=tiny_config(), random_weights=5, dtype="bfloat16"))
        assert torch.equal(half.lm_head.weight, exact.lm_head.weight.to(torch.bfloat16))

    def test_tied_weights_stay_tied(self):
        model = load(EngineConfig(model=tiny_config(tie_word_embeddings=True), random_weights=0, dtype="bfloat16"))
        assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_from_a_config_file_and_its_folder(self, tmp_path):
        tiny_config().save_pretrained(tmp_path)
        from_folder = load(EngineConfig(model=tmp_path, random_weights=3))
        assert same_weights(from_folder, load(EngineConfig(model=tmp_path / "config.json", random_weights=3)))
        with pytest.raises(ModelError, match="config without weights; pass random_weights"):
            load(EngineConfig(model=tmp_path / "config.json"))

    def test_leave_the_users_config(self):
        config = tiny_config()
        before = config.to_dict()
        load(EngineConfig(model=config, random_weights=0, dtype="bfloat16"))
        assert config.to_dict() == before
        assert config._attn_implementation is None


class TestLoadedModel:
    def test_is_used_as_it_is(self):
        given = LlamaForCausalLM(tiny_config())
        weight = given.lm_head.weight
        model = load(EngineConfig(model=given))
        assert model is given
        assert model.lm_head.weight is weight
        assert given.model.layers[0].self_attn.config._attn_implementation == "atom"

    def test_a_model_whose_class_cannot_switch(self):
        """set_attn_implementation would only warn and keep the old one."""
        given = AutoModelForCausalLM.from_config(Qwen3Config(**TINY, **HEADS))
        type(given)._can_set_attn_implementation_cached_value = False
        try:
            assert load(EngineConfig(model=given)).config._attn_implementation == "atom"
        finally:
            del type(given)._can_set_attn_implementation_cached_value

    def test_is_cast_on_request(self):
        model = load(EngineConfig(model=LlamaForCausalLM(tiny_config()), dtype="bfloat16"))
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32

    def test_refuses_a_seed(self):
        with pytest.raises(ConfigError, match="random_weights"):
            load(EngineConfig(model=LlamaForCausalLM(tiny_config()), random_weights=0))


class TestDtypeAndDevice:
    def test_a_checkpoint_without_dtype_is_float32(self):
        assert resolve_dtype(EngineConfig(model="x"), tiny_config()) == torch.float32

    def test_an_unusable_dtype(self):
        with pytest.raises(ModelError, match="float8_e4m3fn, expected float32"):
            resolve_dtype(EngineConfig(model="x"), tiny_config(dtype="float8_e4m3fn"))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
    def test_cuda_where_there_is_none(self):
        assert resolve_device(EngineConfig(model="x")) == CPU
        with pytest.raises(ConfigError, match="finds no CUDA device; use device=cpu"):
            resolve_device(EngineConfig(model="x", device="cuda:1"))


class TestMetaModel:
    def test_has_every_module_and_no_memory(self):
        model = build_meta_model(tiny_config(), torch.bfloat16)
        assert {p.device.type for p in model.parameters()} == {"meta"}
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert not model.training

    def test_weight_bytes_equal_those_of_the_loaded_model(self, checkpoint):
        meta = build_meta_model(tiny_config(), torch.bfloat16)
        assert weight_bytes(meta) == weight_bytes(load(EngineConfig(model=checkpoint[0])))

    def test_tied_weights_count_once(self):
        tied, untied = (build_meta_model(tiny_config(tie_word_embeddings=t), torch.float32) for t in (True, False))
        assert weight_bytes(untied) - weight_bytes(tied) == 64 * 32 * 4

    def test_a_config_that_cannot_be_built(self):
        broken = tiny_config()
        broken.hidden_act = "sparkle"
        with pytest.raises(ModelError, match="cannot build a model from this LlamaConfig"):
            build_meta_model(broken, torch.float32)


class TestTokenizer:
    def save(self, folder: Path):
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        vocabulary = {"<s>": 0, "a": 1, "b": 2}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [])))
        tokenizer.save_pretrained(folder)

    def test_beside_the_model(self, checkpoint):
        self.save(checkpoint[0])
        tokenizer = load_tokenizer(EngineConfig(model=checkpoint[0]))
        assert tokenizer("ab").input_ids == [1, 2]

    def test_from_another_place(self, checkpoint, tmp_path):
        self.save(tmp_path / "other")
        assert load_tokenizer(EngineConfig(model=tiny_config(), tokenizer=str(tmp_path / "other"))) is not None

    def test_none_there(self, checkpoint):
        with pytest.raises(ModelError, match=r"has no tokenizer files.*skip_tokenizer=True"):
            load_tokenizer(EngineConfig(model=checkpoint[0]))

    def test_none_needed(self, checkpoint):
        assert load_tokenizer(EngineConfig(model=checkpoint[0], skip_tokenizer=True)) is None
        assert load_tokenizer(EngineConfig(model=tiny_config(), random_weights=0)) is None
        assert load_tokenizer(EngineConfig(model=LlamaForCausalLM(tiny_config()))) is None
