"""RunningRows: what a row takes, and when it is given back."""

from pathlib import Path

import pytest

from atom_core import LLM, SamplingParams
from atom_core.cache.block_manager import BlockManager
from atom_core.cache.config import CacheConfig
from atom_core.engine.running_rows import RunningRows
from atom_core.engine.scheduler import Scheduler, SchedulerLimits
from atom_core.engine.sequence import Sequence
from atom_core.errors import EngineError
from tests.tiny_models import tiny_model

STATUS = Path("/proc/self/statm")


@pytest.mark.skipif(not STATUS.exists(), reason="reads the process's memory from /proc")
def test_short_sequences_take_little_of_long_rows():
    """512 KiB of tokens, in rows that have room for 1 GiB of them."""
    rows = RunningRows(256, 1_000_000, 16)
    seqs = [Sequence(number, [1] * 500, SamplingParams(), max_num_tokens=600) for number in range(256)]
    before = int(STATUS.read_text().split()[1])
    for seq in seqs:
        rows.add(seq)
    assert (int(STATUS.read_text().split()[1]) - before) * 4096 < 64 * 2**20


def test_tokens_and_counts_go_with_the_sequence():
    rows = RunningRows(2, 8, 4)
    seq, other = (Sequence(number, [1, 2, 3], SamplingParams(), max_num_tokens=8) for number in range(2))
    seq.block_table = [5]
    rows.add(seq)
    seq.append_token(4)
    assert rows.tokens[seq.row, :4].tolist() == [1, 2, 3, 4]
    assert rows.of([seq]).tolist() == [seq.row]
    assert rows.tables.blocks[seq.row, 0] == 5
    row = seq.row
    rows.remove(seq)
    rows.add(other)
    assert other.row == row
    other.append_token(9)
    assert (seq.row, seq.num_tokens, seq.token_ids.tolist()) == (-1, 4, [1, 2, 3, 4])
    assert rows.tables.lengths[row] == 0
    with pytest.raises(AssertionError, match="without a row"):
        rows.of([seq])


def test_a_row_that_does_not_fit_is_not_lost():
    rows = RunningRows(1, 8, 4)
    with pytest.raises(EngineError, match="may grow to 9 tokens, a row has 8"):
        rows.add(Sequence(0, [1], SamplingParams(), max_num_tokens=9))
    assert rows.num_free == 1


def test_a_step_without_rows_can_be_taken():
    config = CacheConfig(block_size=4, num_blocks=16, max_model_len=64)
    scheduler = Scheduler(SchedulerLimits(4, 16, 64), BlockManager(config))
    assert scheduler.postprocess(scheduler.schedule(), []) == []


def test_the_smallest_model_length_starts():
    options = {"max_model_len": 2, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    llm = LLM(tiny_model("llama"), skip_tokenizer=True, cache_memory="64MB", **options)
    outputs = llm.generate([[5]], SamplingParams(max_tokens=1, temperature=0))
    assert len(outputs[0].outputs[0].token_ids) == 1
