"""A model's own multi-token-prediction layer drafts: the drafts are those of transformers' module without any cache."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from atom_core import LLM, SamplingParams
from atom_core.engine.batch_builder import StepShape
from atom_core.errors import ConfigError, ModelError
from atom_core.models.mtp import load_mtp
from tests.tiny_models import reference_generate, tiny_config, tiny_model

NUM_TOKENS, NUM_DRAFTS = 12, 3
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
LAYERS = {
    "deepseek_v3": {"num_nextn_predict_layers": 1},
    "glm4_moe": {"num_nextn_predict_layers": 1},
    "qwen3_next": {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]},
    "mimo_v2_flash": {
        "num_mtp_layers": 1,
        "mtp_layer_types": ["sliding_attention"],
        "mtp_mlp_layer_types": ["dense"],
    },
}
PROMPTS = [[(index * index * 7 + index * 3 + length) % 120 for index in range(length)] for length in (1, 17, 40, 27)]


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def config_of(model_type):
    return tiny_config(model_type, initializer_range=0.3, **LAYERS[model_type])


def make_llm(model, **options):
    defaults = {"cache_memory": "512MB", "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    options = {"speculation": "mtp", "num_spec_tokens": NUM_DRAFTS, "skip_tokenizer": True, **defaults, **options}
    return LLM(model, **options)


def recorded_drafts(llm, prompts, params):
    """Generate; returns the outputs, and what was drafted behind which tokens."""
    drafter, found = llm.engine.speculator, []
    original = drafter.draft

    def draft(batch):
        original(batch)
        for seq in batch.seqs[: batch.num_decodes]:
            end = seq.num_tokens + seq.num_draft_tokens
            found.append((seq.token_ids.tolist(), seq.tokens_between(seq.num_tokens, end).tolist()))

    drafter.draft = draft
    outputs = llm.generate(prompts, params)
    drafter.draft = original
    return outputs, found


@torch.no_grad()
def reference_drafts(model, mtp, token_ids, count):
    """Every position computed again for every draft, with transformers' own attention."""
    hidden = model.get_decoder()(torch.tensor([token_ids[:-1]])).last_hidden_state
    behind, drafts = list(token_ids[1:]), []
    for _ in range(count):
        positions = torch.arange(1, len(behind) + 1)[None]
        output = mtp.forward_layer(0, hidden, positions, None, input_ids=torch.tensor([behind]))
        drafts.append(int(mtp._project_to_logits(output[:, -1:])[0, 0].argmax()))
        hidden = torch.cat([hidden, output[:, -1:]], dim=1)
        behind.append(drafts[-1])
    return drafts


def reference_of(model_type):
    """The model and its layers with the weights of seed 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(model_type), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model, load_mtp(model, model.config, 0)


@pytest.mark.parametrize("options", [{}, {"block_size": 4, "prefill_chunk_tokens": 5, "max_num_seqs": 3}], ids=str)
@pytest.mark.parametrize("model_type", LAYERS)
def test_drafts_are_those_of_the_module_and_change_no_token(model_type, options):
    model, mtp = reference_of(model_type)
    expected = reference_generate(model, PROMPTS, NUM_TOKENS)
    llm = make_llm(config_of(model_type), random_weights=0, enable_prefix_caching=False, **options)
    outputs, drafted = recorded_drafts(llm, PROMPTS, GREEDY)
    assert tokens(outputs) == expected
    assert len(drafted) > NUM_TOKENS
    for known, drafts in drafted:
        assert drafts == reference_drafts(model, mtp, known, len(drafts))
    assert max(len(drafts) for _, drafts in drafted) == NUM_DRAFTS


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_next"])
def test_hits_preemption_and_samples(model_type):
    model, _ = reference_of(model_type)
    expected = reference_generate(model, PROMPTS, NUM_TOKENS)
    llm = make_llm(config_of(model_type), random_weights=0, max_model_len=64, block_size=8, max_blocks=10)
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    stats = llm.stats()
    assert stats["num_preemptions"] > 0
    assert stats["cache"]["hit_tokens"] > 0
    sampled = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=3, n=3)
    plain = make_llm(config_of(model_type), random_weights=0, speculation=None, num_spec_tokens=0)
    one, other = (each.generate(PROMPTS[2], sampled)[0].outputs for each in (llm, plain))
    assert [completion.token_ids for completion in one] == [completion.token_ids for completion in other]


def save_with_layers(model, mtp, folder):
    """A checkpoint as Qwen3-Next is released: `mtp.` before the layer's names, experts one by one, norms above it."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    above = {
        "eh_proj": "fc",
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "post_norm": "norm",
    }
    for name, parameter in mtp.layers[0].named_parameters():
        inside = f"mtp.layers.0.{name.removeprefix('mtp_block.')}"
        if name.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(parameter):
                for half, part in zip(("gate", "up"), matrix.chunk(2), strict=True):
                    weights[inside.replace("gate_up_proj", f"{expert}.{half}_proj.weight")] = part.clone()
        elif name.endswith("experts.down_proj"):
            for expert, matrix in enumerate(parameter):
                weights[inside.replace("down_proj", f"{expert}.down_proj.weight")] = matrix.clone()
        else:
            module = name.split(".")[0]
            weights[f"mtp.{above[module]}.weight" if module in above else inside] = parameter.clone()
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")


@torch.no_grad()
def test_random_layers_are_drawn_whole():
    _, mtp = reference_of("glm4_moe")
    for name, parameter in mtp.layers.named_parameters():
        assert parameter.abs().max() < 10, name
        assert parameter.ndim == 1 or parameter.std() > 0.1, name


@torch.no_grad()
def test_the_layers_of_a_checkpoint_are_loaded(tmp_path):
    model, mtp = reference_of("qwen3_next")
    for parameter in mtp.layers.parameters():
        parameter.mul_(1.5)
    save_with_layers(model, mtp, tmp_path)
    llm = make_llm(str(tmp_path), enable_prefix_caching=False)
    outputs, drafted = recorded_drafts(llm, PROMPTS, GREEDY)
    assert tokens(outputs) == reference_generate(model, PROMPTS, NUM_TOKENS)
    for known, drafts in drafted:
        assert drafts == reference_drafts(model, mtp, known, len(drafts))


def test_a_checkpoint_without_the_layers_is_refused(tmp_path):
    reference_of("qwen3_next")[0].save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="multi-token-prediction layers of Qwen3NextForCausalLM cannot be loaded"):
        make_llm(str(tmp_path))


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ConfigError, match="llama names no multi-token-prediction layers"):
        make_llm(tiny_model("llama"))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next"])
def test_padded_steps_show_their_hidden_states(model_type):
    model, mtp = reference_of(model_type)
    llm = make_llm(config_of(model_type), random_weights=0, enable_prefix_caching=False)
    shapes = [StepShape(rows, length) for rows in (3, 8) for length in (1, 1 + NUM_DRAFTS)]
    llm.engine.runner.use_graphs(shapes, capture=False)
    outputs, drafted = recorded_drafts(llm, PROMPTS, GREEDY)
    assert tokens(outputs) == reference_generate(model, PROMPTS, NUM_TOKENS)
    for known, drafts in drafted:
        assert drafts == reference_drafts(model, mtp, known, len(drafts))


def test_a_transformers_that_cannot_run_a_layer_is_named(monkeypatch):
    monkeypatch.delattr(MtpModel, "forward_layer")
    with pytest.raises(ConfigError, match=r"needs a newer transformers: that of version \d+\.\d+"):
        make_llm(config_of("deepseek_v3"), random_weights=0)
