"""The core knows no attention type and no model family: no Python file of it holds such a word."""

import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[1] / "atom_core"
WORDS = (
    "mha mla gdn mimo mamba deltanet delta_net deepseek qwen llama gemma mistral mixtral phi3 olmo granite cohere "
    "gpt_oss starcoder kimi glm falcon smollm gqa grouped_query latent sliding ring indexer compressor"
).split()
PATTERN = re.compile(r"(?<![a-z])(" + "|".join(WORDS) + r")(?![a-z])", re.IGNORECASE)

# SmolLM2 is the demo's model and named where its file comes from, nowhere else.
EXCEPTIONS = {"models/demo.py": {"smollm"}}


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: str(path.relative_to(CORE)))
def test_no_attention_type_or_model_family_is_named(path):
    allowed = EXCEPTIONS.get(str(path.relative_to(CORE)), set())
    found = {match.lower() for match in PATTERN.findall(path.read_text())} - allowed
    assert not found


def test_the_words_are_found_where_they_stand():
    assert PATTERN.findall("class LlamaAttention, if is_mla: Qwen3Next deepseek_v3") != []
