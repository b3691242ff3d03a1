"""From the scheduler's plan to the flat batch: a few numpy calls a step, none a token."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from tandem.engine.batch import BatchInput
from tandem.engine.sequence import Sequence


def assemble(chunks: SequenceOf[tuple[Sequence, int]], block_size_tokens: int) -> BatchInput:
    """The batch that computes the next `n` tokens of each (sequence, n), in that order.

    The last row of each sequence that has no tokens left after the step is sampled. Reads only.
    """
    num_new = np.array([n for _, n in chunks], dtype=np.int32)
    context_lens = np.array([s.num_computed_tokens + n for s, n in chunks], dtype=np.int32)
    query_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(num_new, out=query_starts[1:])
    num_tokens = int(query_starts[-1])

    token_ids = np.empty(num_tokens, dtype=np.int64)
    width = -(-int(context_lens.max()) // block_size_tokens)
    block_tables = np.zeros((len(chunks), width), dtype=np.int32)
    samples = np.empty(len(chunks), dtype=np.bool_)
    start = 0
    for row, (sequence, n) in enumerate(chunks):
        first, end = sequence.num_computed_tokens, sequence.num_computed_tokens + n
        token_ids[start : start + n] = sequence.token_ids[first:end]
        blocks = sequence.block_ids[:width]
        block_tables[row, : len(blocks)] = blocks
        samples[row] = end == len(sequence.token_ids)
        start += n

    rows = np.repeat(np.arange(len(chunks)), num_new)
    firsts = (context_lens - query_starts[1:]).astype(np.int64)
    positions = np.arange(num_tokens, dtype=np.int64) + firsts[rows]
    blocks_of = block_tables[rows, positions // block_size_tokens].astype(np.int64)
    return BatchInput(
        token_ids=token_ids,
        positions=positions,
        slots=blocks_of * block_size_tokens + positions % block_size_tokens,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        sample_rows=(query_starts[1:][samples] - 1).astype(np.int64),
    )
