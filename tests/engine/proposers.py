"""Proposers for tests: one that is always right, one that never is, and one between."""

from __future__ import annotations

import random


class Replay:
    """Drafts from known answers, each token wrong with some probability.

    Args:
        answers: prompt and output of every sequence that will run, in any order.
        wrong: probability that a draft is garbage.
        vary: draft any number of tokens up to the most, none too.
    """

    def __init__(self, answers, wrong=0.0, vary=False, vocab_size=96):
        self.answers = [list(answer) for answer in answers]
        self.random = random.Random(0)
        self.wrong, self.vary, self.vocab_size = wrong, vary, vocab_size
        self.num_calls = 0

    def propose(self, requests):
        self.num_calls += 1
        return [self.drafts(request.token_ids.tolist(), request.max_drafts) for request in requests]

    def drafts(self, tokens, count):
        if self.vary:
            count = self.random.randint(0, count)
        known = next((answer for answer in self.answers if answer[: len(tokens)] == tokens), tokens)
        drafts = known[len(tokens) : len(tokens) + count]
        drafts += [self.random.randrange(self.vocab_size) for _ in range(count - len(drafts))]
        return [self.random.randrange(self.vocab_size) if self.random.random() < self.wrong else d for d in drafts]

    def release(self, sequence_id):
        pass


def garbage(seed=0, vocab_size=96):
    return Replay([], vocab_size=vocab_size)


def make_garbage(*, model_config, num_spec_tokens):
    """A factory as plugins bring them."""
    assert num_spec_tokens > 0
    return garbage(vocab_size=model_config.vocab_size)
