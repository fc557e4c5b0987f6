import pytest
import torch

from atom_core import EngineConfig
from atom_core.engine.memory import available_bytes, cache_budget_bytes, format_bytes
from atom_core.errors import CapacityError, ConfigError

CPU = torch.device("cpu")
GIB = 1024**3


def test_cache_memory_is_the_budget_itself():
    assert cache_budget_bytes(EngineConfig(model="x", cache_memory="2GiB", memory="1GiB"), CPU, 5 * GIB) == 2 * GIB


def test_memory_includes_the_weights():
    assert cache_budget_bytes(EngineConfig(model="x", memory="80GiB"), CPU, 30 * GIB) == 50 * GIB


def test_without_a_figure_a_share_of_what_is_free_counts():
    free = available_bytes(CPU)
    found = cache_budget_bytes(EngineConfig(model="x", memory_fraction=0.5), CPU, 0)
    assert 0.25 * free < found < 0.75 * free


def test_weights_that_do_not_fit_are_an_error_with_both_figures():
    with pytest.raises(CapacityError, match=r"weights take 3\.0 GiB, but there are 2\.0 GiB"):
        cache_budget_bytes(EngineConfig(model="x", memory="2GiB"), CPU, 3 * GIB)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (GIB, "1.0 GiB"), (3 * 1024 * GIB, "3.0 TiB")]
)
def test_bytes_for_people(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * GIB), ("1.5GB", 1_500_000_000), ("512M", 512 * 1024**2), (7, 7), ("7", 7)]
)
def test_sizes_that_users_write(text, size):
    assert EngineConfig(model="x", memory=text).memory == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 parsec", 0])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match="size"):
        EngineConfig(model="x", memory=text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("block_size", 0),
        ("num_spec_tokens", -1),
        ("memory_fraction", 1.5),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("scheduling_policy", "random"),
    ],
)
def test_bad_options_are_named_with_what_is_expected(field, value):
    with pytest.raises(ConfigError, match=field):
        EngineConfig(model="x", **{field: value})
