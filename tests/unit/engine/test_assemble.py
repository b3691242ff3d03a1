from __future__ import annotations

from array import array

import numpy as np
from tests.support.engine_fakes import make_spec

from tandem.engine.assemble import assemble
from tandem.engine.sequence import Moment, Purpose, Sequence, Timeline
from tandem.engine.stopping import StopRule


def make_sequence(tokens: range, num_computed: int, blocks: list[int]) -> Sequence:
    spec = make_spec("a", tokens)
    sequence = Sequence(spec, Purpose.GENERATE, 0, StopRule.of(spec, (), 100), Timeline(Moment(0, 0.0)))
    sequence.num_computed_tokens = num_computed
    sequence.block_ids = array("i", blocks)
    return sequence


def test_a_mixed_batch_is_flat_and_points_at_the_right_slots():
    decode = make_sequence(range(100, 106), 5, [7, 3])
    chunk = make_sequence(range(200, 212), 2, [5, 9, 1])
    last_chunk = make_sequence(range(50, 53), 0, [2])
    batch = assemble([(decode, 1), (chunk, 4), (last_chunk, 3)], block_size_tokens=4)

    assert batch.token_ids.tolist() == [105, 202, 203, 204, 205, 50, 51, 52]
    assert batch.positions.tolist() == [5, 2, 3, 4, 5, 0, 1, 2]
    assert batch.slots.tolist() == [13, 22, 23, 36, 37, 8, 9, 10]
    assert batch.query_starts.tolist() == [0, 1, 5, 8]
    assert batch.context_lens.tolist() == [6, 6, 3]
    assert batch.block_tables.tolist() == [[7, 3], [5, 9], [2, 0]]
    assert batch.sample_rows.tolist() == [0, 7]
    assert (batch.num_tokens, batch.num_sequences) == (8, 3)
    assert (batch.max_query_tokens, batch.max_context_tokens) == (4, 6)


def test_the_types_are_those_of_the_contract():
    batch = assemble([(make_sequence(range(9), 0, [0, 1, 2]), 5)], block_size_tokens=4)
    assert batch.token_ids.dtype == batch.positions.dtype == batch.slots.dtype == np.int64
    assert batch.query_starts.dtype == batch.context_lens.dtype == batch.block_tables.dtype == np.int32
    assert batch.sample_rows.dtype == np.int64
    assert batch.sample_rows.tolist() == []
