"""SamplingParams: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from atom_core.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from atom_core.engine.sampling import SamplingParams
from atom_core.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("n", 0, "at least 1"),
        ("n", True, "a whole number"),
        ("n", 1.0, "a whole number"),
        ("max_tokens", 0, "at least 1, or None"),
        ("min_tokens", -1, "0 or more"),
        ("temperature", -0.1, "0 (greedy) or more"),
        ("temperature", float("nan"), "finite"),
        ("temperature", float("inf"), "finite"),
        ("temperature", "hot", "a finite number"),
        ("top_k", -1, "0 (off) or more"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.5, "at most 1"),
        ("min_p", -0.5, "from 0 (off) to 1"),
        ("min_p", 1.1, "from 0 (off) to 1"),
        ("seed", -1, "from 0 to 2**64 - 1"),
        ("seed", 2**64, "from 0 to 2**64 - 1"),
        ("repetition_penalty", 0, "above 0"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", -2.1, "from -2 to 2"),
        ("stop", "", "non-empty string"),
        ("stop", ["a", ""], "non-empty string"),
        ("stop", [1], "non-empty string"),
        ("stop_token_ids", [-1], "token ids"),
        ("stop_token_ids", ["a"], "token ids"),
        ("stop_token_ids", 3, "token ids"),
        ("include_stop_str_in_output", 1, "True or False"),
        ("ignore_eos", None, "True or False"),
        ("logprobs", -1, "0 or more"),
        ("logprobs", True, "a whole number"),
        ("prompt_logprobs", 2.5, "a whole number"),
        ("skip_special_tokens", "no", "True or False"),
    ],
)
def test_a_bad_value_is_refused_naming_field_found_and_expected(field, value, expected):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    message = str(error.value)
    assert message.startswith(f"{field} must be ")
    assert expected in message
    assert message.endswith(f"found {value!r}")


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError, match=r"min_tokens must be at most max_tokens \(4\), found 5"):
        SamplingParams(max_tokens=4, min_tokens=5)
    assert SamplingParams(max_tokens=None, min_tokens=5).min_tokens == 5


def test_edges_are_accepted():
    params = SamplingParams(top_p=1, min_p=1, top_k=0, temperature=0, seed=2**64 - 1, logprobs=0, presence_penalty=-2)
    assert params.greedy


def test_one_stop_string_is_a_sequence_of_one_and_params_are_values():
    one, many = SamplingParams(stop="ab"), SamplingParams(stop=["ab"], stop_token_ids=[])
    assert one == many
    assert hash(one) == hash(many)
    assert one.stop_strings == ("ab",)
    with pytest.raises(FrozenInstanceError):
        one.n = 2


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "plain"),
        ({"temperature": 0.0, "top_p": 0.5}, "greedy"),
        ({"temperature": 1e-6}, "greedy"),
        ({"top_k": 5, "top_p": 0.5}, "ranked"),
        ({"min_p": 0.1}, "ranked"),
        ({"top_p": 0.5, "min_p": 0.1}, "nucleus"),
    ],
)
def test_kind_is_the_cheapest_way_that_serves(fields, kind):
    assert SamplingParams(**fields).kind == kind


def test_only_penalties_that_do_something_penalize():
    assert not SamplingParams().penalizes
    for field, value in (("repetition_penalty", 0.9), ("presence_penalty", 0.1), ("frequency_penalty", -0.1)):
        assert SamplingParams(**{field: value}).penalizes


def test_outputs_start_unfinished():
    output = RequestOutput("7", None, (1, 2), [CompletionOutput(0, "", ())], False, RequestMetrics(arrival_time=1.5))
    assert output.error is None
    assert output.outputs[0].finish_reason is None
    assert output.metrics.first_token_time is None


def test_parameters_and_outputs_import_no_torch():
    code = "import sys, atom_core.engine.sampling, atom_core.engine.outputs; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
