"""Detokenizer: deltas add up to the decoded text, whatever the tokens cut apart, and stop strings end it."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from atom_core.engine.detokenizer import Detokenizer
from atom_core.engine.sampling import SamplingParams

LINES = ["hello world, das ist schön", "日本語のテキスト 🙂🙃 naïve", "привет мир", "stop stopping at the stop sign"]
TEXTS = st.text(max_size=40) | st.text(alphabet="stop äß日🙂 \n", max_size=40)


class DecodesOnlyWhole(PreTrainedTokenizerFast):
    """Claims to be one of the slow kind, which decode whole sequences only."""

    @property
    def is_fast(self):
        return False


def train(kind):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(LINES * 3, trainer)
    return kind(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)


@cache
def byte_level():
    return train(PreTrainedTokenizerFast)


@cache
def whole():
    return train(DecodesOnlyWhole)


@cache
def byte_fallback():
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "▁hello", "é"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@cache
def slow():
    return ByT5Tokenizer()


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def stream(tokenizer, ids, params=None, chunk=1):
    detokenizer = Detokenizer(tokenizer, params or SamplingParams())
    deltas = [detokenizer.append(ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
    return detokenizer, [*deltas, detokenizer.flush()]


@pytest.mark.parametrize("make", [byte_level, whole, slow])
@settings(max_examples=100, deadline=None)
@given(text=TEXTS, chunk=st.integers(1, 4))
def test_deltas_add_up_to_the_decoded_text(make, text, chunk):
    ids = encode(make(), text)
    detokenizer, deltas = stream(make(), ids, chunk=chunk)
    assert "".join(deltas) == detokenizer.text == make().decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)
    assert detokenizer.num_tokens == len(ids)


@pytest.mark.parametrize("make", [byte_level, whole])
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 320), max_size=30))
def test_tokens_that_are_no_text_still_add_up(make, ids):
    detokenizer, deltas = stream(make(), ids)
    assert "".join(deltas) == detokenizer.text == byte_level().decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 261), max_size=30))
def test_a_decoder_that_takes_text_back_stops_nothing(ids):
    detokenizer, deltas = stream(byte_fallback(), ids)
    assert "".join(deltas) == detokenizer.text
    assert detokenizer.num_tokens == len(ids)


def test_a_decoder_that_takes_text_back_loses_nothing_after_it():
    ids = [byte_fallback().convert_tokens_to_ids(word) for word in ("<0x61>", "<0xFF>", "é", "a")]
    assert stream(byte_fallback(), ids)[1] == ["a", "", "\ufffdé", "a", ""]


def test_byte_fallback_text_adds_up():
    ids = [byte_fallback().convert_tokens_to_ids(word) for word in ("▁hello", "▁a", "<0xF0>", "<0x9F>", "<0x99>")]
    ids.append(byte_fallback().convert_tokens_to_ids("<0x82>"))
    assert stream(byte_fallback(), ids)[1] == ["hello", " a", "", "", "", "🙂", ""]


def test_a_split_character_comes_whole_and_a_missing_end_only_at_the_flush():
    ids = [byte_level().convert_tokens_to_ids(letter) for letter in "ðŁĻĤ"]
    assert stream(byte_level(), ids)[1] == ["", "", "", "🙂", ""]
    assert stream(byte_level(), ids[:3])[1] == ["", "", "", "\ufffd"]


@pytest.mark.parametrize("make", [byte_level, whole])
@pytest.mark.parametrize("stop", [(), "hey"])
def test_flushing_again_adds_nothing(make, stop):
    ids = [make().convert_tokens_to_ids(letter) for letter in "heð"]
    detokenizer, deltas = stream(make(), ids, SamplingParams(stop=stop))
    assert deltas[-1].endswith("\ufffd")
    assert detokenizer.flush() == ""
    assert detokenizer.text == make().decode(ids) == "he\ufffd"


def test_special_tokens_are_left_out_unless_wanted():
    ids = [*encode(byte_level(), "hello"), byte_level().eos_token_id]
    assert stream(byte_level(), ids)[0].text == "hello"
    assert stream(byte_level(), ids, SamplingParams(skip_special_tokens=False))[0].text == "hello<eos>"


def stop_oracle(text, stops, include):
    """What is left of a text, read one character after the other, and the stop string found."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="stop ä", max_size=30),
    stops=st.lists(st.text(alphabet="stop ä", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
    chunk=st.integers(1, 5),
)
def test_stop_strings_end_the_text_wherever_tokens_cut_it(text, stops, include, chunk):
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    detokenizer, deltas = stream(byte_level(), encode(byte_level(), text), params, chunk)
    assert (detokenizer.text, detokenizer.finished_by) == stop_oracle(text, stops, include)
    assert "".join(deltas) == detokenizer.text


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="stop", max_size=30), stops=st.lists(st.text("stop", min_size=1, max_size=5), min_size=1))
def test_nothing_given_out_is_taken_back_and_nothing_is_held_without_reason(text, stops):
    detokenizer = Detokenizer(byte_level(), SamplingParams(stop=stops))
    final = stop_oracle(text, stops, include=False)[0]
    given_out, read = "", ""
    for token_id in encode(byte_level(), text):
        given_out += detokenizer.append([token_id])
        read += byte_level().decode([token_id])
        assert final.startswith(given_out)
        if detokenizer.finished_by is None:
            held = read[len(given_out) :]
            assert not held or any(stop.startswith(held) for stop in stops)


def test_tokens_after_the_stop_are_not_taken():
    ids = encode(byte_level(), "hello stop hello")
    detokenizer = Detokenizer(byte_level(), SamplingParams(stop="stop"))
    assert detokenizer.append(ids) == "hello "
    assert byte_level().decode(ids[: detokenizer.num_tokens]).endswith("stop")
    assert detokenizer.append([5]) == detokenizer.flush() == ""
    assert detokenizer.finished_by == "stop"


def test_stop_strings_do_not_count_before_min_tokens():
    ids = [byte_level().convert_tokens_to_ids(letter) for letter in "abxabx"]
    for min_tokens, expected in ((0, "a"), (2, "a"), (3, "abxa"), (5, "abxa"), (6, "abxabx")):
        detokenizer, _ = stream(byte_level(), ids, SamplingParams(stop="b", min_tokens=min_tokens))
        assert detokenizer.text == expected
    early = Detokenizer(byte_level(), SamplingParams(stop="b", min_tokens=3))
    assert early.append(ids[:2]) == "ab"
    held, _ = stream(byte_level(), ids[:3], SamplingParams(stop=["b", "abxy"], min_tokens=3))
    assert (held.text, held.finished_by) == ("abx", None)
