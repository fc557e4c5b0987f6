"""Sampler: every filter against definitions worked out here and against transformers', and who may influence whom."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from atom_core.engine.distribution import draw_plain, draw_ranked, filtered_weights
from atom_core.engine.sampler import Sampler, SamplingRow, edit_logits, prompt_logprobs
from atom_core.engine.sampling import SamplingParams
from atom_core.errors import EngineError

CPU = torch.device("cpu")


def make_row(params=None, seed=0, prompt=(), output=(), eos=(), **fields):
    params = params or SamplingParams(**fields)
    return SamplingRow(params, seed, list(prompt), list(output), len(output), frozenset(eos))


def probabilities(logits, *rows):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    logits = logits if logits.dim() == 2 else logits.expand(len(rows), -1)
    return Sampler(logits.shape[1], CPU).probabilities(logits, rows).double().numpy()


def sample(logits, rows):
    return Sampler(logits.shape[1], CPU)(logits, rows).token_ids


def plain_oracle(logits, params, prompt=(), output=(), eos=()):
    """The definitions, one token at a time; `None` where rounding could decide."""
    scores = [float(value) for value in logits]
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        for token in {*eos, *params.stop_token_ids}:
            scores[token] = -math.inf
    if params.greedy:
        return [float(token == scores.index(max(scores))) for token in range(len(scores))]
    masses = [math.exp((score - max(scores)) / params.temperature) for score in scores]
    if 0 < params.top_k < len(masses):
        kth = sorted(scores, reverse=True)[params.top_k - 1]
        masses = [mass if score >= kth else 0.0 for mass, score in zip(masses, scores, strict=True)]
    shares_above = [
        sum(other for other, s in zip(masses, scores, strict=True) if s > score) / sum(masses) for score in scores
    ]
    if any(abs(share - params.top_p) < 1e-6 for share in shares_above):
        return None
    masses = [mass if share < params.top_p else 0.0 for mass, share in zip(masses, shares_above, strict=True)]
    if any(abs(mass - params.min_p) < 1e-6 for mass in masses if mass < 1 and params.min_p > 0):
        return None
    masses = [mass if mass >= params.min_p else 0.0 for mass in masses]
    return [mass / sum(masses) for mass in masses]


def hf_oracle(logits, params, ids):
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(torch.tensor([list(ids)], dtype=torch.long), logits[None].clone()).softmax(-1)[0].double().numpy()


TOKENS = st.lists(st.integers(0, 11), max_size=8)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 7, 12, 50]),
    top_p=st.sampled_from([0.05, 0.4, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.6]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.3]),
    min_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.sampled_from([(), (2,), (2, 5)]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-24, 24), min_size=12, max_size=12), PARAMS, TOKENS, TOKENS)
def test_all_filters_together_equal_their_definitions(quarters, params, prompt, output):
    logits = [quarter / 4 + 0.01 for quarter in quarters]
    expected = plain_oracle(logits, params, prompt, output, eos=(0,))
    assume(expected is not None)
    found = probabilities(logits, make_row(params, prompt=prompt, output=output, eos=(0,)))[0]
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert list(found > 0) == [share > 0 for share in expected]


@pytest.mark.parametrize("scale", [0.3, 8.0], ids=["many tokens left", "few tokens left"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 600},
        {"top_k": 5000},
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 1.7},
        {"min_p": 0.05},
        {"top_k": 30, "top_p": 0.7},
        {"top_k": 700, "top_p": 0.8, "min_p": 0.2},
        {"top_p": 0.95, "min_p": 0.3},
        {"repetition_penalty": 1.3, "top_k": 20},
    ],
    ids=str,
)
def test_filters_equal_those_of_transformers(fields, scale):
    generator = torch.Generator().manual_seed(5)
    params = SamplingParams(**fields)
    for logits in torch.randn(4, 1000, generator=generator) * scale:
        ids = torch.randint(0, 1000, (30,), generator=generator).tolist()
        found = probabilities(logits, make_row(params, prompt=ids[:20], output=ids[20:]))[0]
        expected = hf_oracle(logits, params, ids)
        if scale < 1:  # no token here is too unlikely for float32
            assert (found > 0).tolist() == (expected > 0).tolist()
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_tokens_with_equal_logits_share_one_fate():
    logits = [2.0, 1.0, 1.0, 1.0, 0.0]
    assert (probabilities(logits, make_row(top_k=2))[0] > 0).tolist() == [True, True, True, True, False]
    assert (probabilities(logits, make_row(top_p=0.6))[0] > 0).tolist() == [True, True, True, True, False]
    many = torch.zeros(700)
    many[:3] = 1.0
    assert (probabilities(many, make_row(top_k=5))[0] > 0).all()


def test_penalties_leave_tokens_alone_that_the_text_has_not():
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5]])
    rows = [
        make_row(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, prompt=[0, 1], output=[2, 2])
    ]
    edited = edit_logits(logits, rows)
    assert edited.tolist() == [[0.5, -2.0, 1.0 - 1.25, 0.5]]
    assert logits.tolist() == [[1.0, -1.0, 2.0, 0.5]]
    assert edit_logits(logits, [make_row()]) is logits


def test_token_ids_may_be_arrays():
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(4))
    prompt, output, fields = [3, 3, 5], [5, 7, 7], {"repetition_penalty": 1.5, "frequency_penalty": 0.5}
    row = make_row(prompt=prompt, output=output, **fields)
    row.prompt_token_ids, row.output_token_ids = np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int64)
    assert torch.equal(
        edit_logits(logits, [row]), edit_logits(logits, [make_row(prompt=prompt, output=output, **fields)])
    )


def test_a_row_of_nan_gives_a_token_of_the_vocabulary():
    logits = torch.full((1, 300), torch.nan)
    for fields in ({}, {"temperature": 0.0}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.2}):
        assert 0 <= sample(logits, [make_row(**fields)])[0] < 300


def test_ids_outside_the_vocabulary_are_ignored():
    logits = torch.tensor([[1.0, 3.0]])
    row = make_row(temperature=0.0, repetition_penalty=2.0, min_tokens=3, stop_token_ids=[99], prompt=[7], eos=[1, 8])
    assert sample(logits, [row]) == [0]


def test_min_tokens_bars_the_end_until_it_is_reached():
    logits = torch.tensor([[1.0, 5.0, 4.0, 3.0]])
    for output, expected in (((), 3), ((0,), 3), ((0, 0), 1)):
        row = make_row(temperature=0.0, min_tokens=2, stop_token_ids=[2], output=output, eos=[1])
        assert sample(logits, [row]) == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_rows_are_argmax_in_any_company(dtype):
    logits = (torch.randn(40, 500, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    rows = [make_row(temperature=0.0 if index % 3 else 1.5, top_p=0.9, seed=index) for index in range(40)]
    found = sample(logits, rows)
    greedy = sample(logits, [make_row(temperature=0.0)] * 40)
    assert greedy == logits.argmax(-1).tolist()
    assert [found[i] for i in range(40) if i % 3] == [greedy[i] for i in range(40) if i % 3]
    assert found != greedy


def test_a_row_depends_neither_on_its_company_nor_on_its_place():
    chooser = random.Random(3)
    generator = torch.Generator().manual_seed(3)
    kinds = [
        {},
        {"temperature": 0.0},
        {"top_k": 9},
        {"top_k": 300, "top_p": 0.9},
        {"top_p": 0.8},
        {"top_p": 0.99, "min_p": 0.01},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
    ]
    logits = torch.randn(64, 5000, generator=generator) * torch.rand(64, 1, generator=generator) * 6
    rows = [
        make_row(seed=index * 7, output=range(index % 5), **chooser.choice(kinds), logprobs=index % 2 or None)
        for index in range(64)
    ]
    together = sample(logits, rows)
    alone = [sample(logits[index : index + 1], [rows[index]])[0] for index in range(64)]
    order = chooser.sample(range(64), 37)
    assert together == alone
    assert sample(logits[order], [rows[index] for index in order]) == [together[index] for index in order]


def test_a_draw_depends_on_seed_and_position():
    logits = torch.zeros(1, 1000)
    draws = {
        (seed, position): sample(logits, [make_row(seed=seed, output=[0] * position)])[0]
        for seed in range(10)
        for position in range(10)
    }
    assert len(set(draws.values())) > 80
    assert draws[3, 4] == sample(logits, [make_row(seed=3, output=[9] * 4, prompt=[1, 2])])[0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([3, 256, 257, 700, 1024]),
    st.sampled_from([0.05, 1.0, 9.0]),
    st.sampled_from([0, 4, 400]),
    st.sampled_from([0.3, 0.97, 1.0]),
    st.sampled_from([0.0, 0.02]),
)
def test_every_way_to_draw_finds_the_token_of_the_cumulative_sum(seed, vocab, scale, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, vocab, generator=generator).bfloat16() * scale
    filters = torch.tensor([[0.9, min(top_k, vocab), top_p, min_p]] * 8, dtype=torch.float64)
    uniforms = torch.rand(8, generator=generator, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-53])
    weights = filtered_weights(logits, filters, whole_mass=True)
    expected = []
    for row, uniform in zip(weights.tolist(), uniforms.tolist(), strict=True):
        target = min(int(uniform * sum(row)), sum(row) - 1)
        expected.append(int(np.searchsorted(np.cumsum(row), target, side="right")))
    assert draw_ranked(logits, filters, uniforms, whole_mass=True).tolist() == expected
    if top_k or top_p == 1:
        assert draw_ranked(logits, filters, uniforms, whole_mass=False).tolist() == expected
    if not top_k and top_p == 1 and not min_p:
        assert draw_plain(logits, filters, uniforms).tolist() == expected


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.9, "temperature": 1.4}, {"min_p": 0.1}], ids=str)
def test_draws_follow_the_distribution(fields, vary):
    logits, num_draws = torch.tensor([0.3, 2.0, -1.0, 1.2, 0.0, -3.0, 1.9, 0.8]), 20_000
    params = SamplingParams(**fields)
    rows = [
        SamplingRow(params, *((index, [], [], 5) if vary == "seed" else (11, [], [], index)), frozenset())
        for index in range(num_draws)
    ]
    counts = np.bincount(sample(logits.expand(num_draws, -1).clone(), rows), minlength=8)
    expected = probabilities(logits, make_row(params))[0] * num_draws
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 29.9  # 7 degrees of freedom exceed this once in 10,000


def test_uniforms_are_even_and_streams_independent():
    sampler = Sampler(2, CPU)
    rows = [make_row(seed=seed, output=range(position)) for seed in range(200) for position in range(100)]
    first, second = sampler.uniforms(rows).numpy(), sampler.uniforms(rows, stream=1).numpy()
    cells = np.histogram2d(first, second, bins=8, range=[[0, 1], [0, 1]])[0]
    assert ((cells - len(rows) / 64) ** 2 / (len(rows) / 64)).sum() < 112  # 63 degrees of freedom, once in 10,000
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.03
    assert len(np.unique(first)) == len(rows)
    assert (sampler.uniforms([make_row(seed=2**64 - 1)]) < 1).all()


def test_extreme_logits_and_temperatures_stay_within_reason():
    logits = torch.tensor([[1e30, -1e30, 0.0, -torch.inf], [-torch.inf, -torch.inf, 3.0, -torch.inf]])
    for fields in ({}, {"temperature": 2e-5}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.5}):
        assert sample(logits, [make_row(**fields)] * 2) == [0, 2]
    assert probabilities([1.0, 0.0], make_row(temperature=1e6))[0] == pytest.approx([0.5, 0.5], abs=1e-5)


def test_logprobs_are_of_the_raw_distribution_and_only_for_those_who_ask():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    rows = [make_row(temperature=0.5, top_k=3, logprobs=number, seed=9) for number in (None, 0, 3, 400)]
    result = Sampler(50, CPU)(logits, rows)
    assert result.logprobs[0] is None
    raw = logits.log_softmax(-1)
    for index, length in ((1, 1), (2, 3), (3, 50)):
        answer, token = result.logprobs[index], result.token_ids[index]
        assert next(iter(answer)) == token
        assert length <= len(answer) <= length + 1
        for token_id, logprob in answer.items():
            assert logprob.logprob == pytest.approx(raw[index, token_id].item(), abs=1e-5)
            assert logprob.rank == 1 + int((raw[index] > raw[index, token_id]).sum())


def test_prompt_logprobs_report_each_target_and_the_likeliest():
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, 0.0, 1.0]])
    first, second = prompt_logprobs(logits, [0, 0], 1)
    assert {token: logprob.rank for token, logprob in first.items()} == {0: 3, 2: 1}
    assert {token: logprob.rank for token, logprob in second.items()} == {0: 1}
    assert first[0].logprob == pytest.approx(-math.log(1 + math.e + math.e**2), abs=1e-6)
    assert prompt_logprobs(logits[:0], [], 1) == []


def test_logits_of_the_wrong_shape_are_refused():
    with pytest.raises(EngineError, match=r"shape \(2, 3\), expected \(1, 3\)"):
        Sampler(3, CPU)(torch.zeros(2, 3), [make_row()])


def test_no_rows_give_no_tokens():
    assert sample(torch.zeros(0, 5), []) == []
