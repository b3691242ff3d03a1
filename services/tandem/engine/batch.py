"""The seam to the model: one step's work, flat. All tokens in one row, no padding between sequences.

The varlen form of FlashAttention and nano-vllm: `query_starts` cuts the row into sequences, and
block tables say where each sequence's keys and values live. Prefill and decode look the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tandem.errors import TandemError
from tandem.generation import TokenOutput
from tandem.request import SamplingParams

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchInput:
    """T tokens of S sequences; N of them need logits. Arrays are C-contiguous and never reused.

    Sequence s owns the flat rows ``[query_starts[s], query_starts[s + 1])``: at least one token,
    at consecutive positions that end at ``context_lens[s] - 1``. Its keys and values at position p
    live in slot ``block_tables[s, p // block_size] * block_size + p % block_size``, those before
    the step's first position already, the others after the step has written them.
    """

    token_ids: Int64Array
    """[T] what to compute."""
    positions: Int64Array
    """[T] each token's position in its sequence, from 0."""
    slots: Int64Array
    """[T] where each token's key and value go: ``block_id * block_size + offset``."""
    query_starts: Int32Array
    """[S + 1] first flat row of each sequence; starts with 0, ends with T."""
    context_lens: Int32Array
    """[S] tokens of each sequence whose KV is valid after the step."""
    block_tables: Int32Array
    """[S, B] block ids in position order; rows shorter than B are padded with 0."""
    sample_rows: Int64Array
    """[N] flat rows whose logits are needed, ascending; empty while prompts are only part read."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.context_lens)

    @property
    def max_query_tokens(self) -> int:
        """Most tokens of one sequence in this step; 1 means that all only decode."""
        return int(np.diff(self.query_starts).max())

    @property
    def max_context_tokens(self) -> int:
        """The longest context in this step."""
        return int(self.context_lens.max())


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to draw one token: all that the draw may depend on besides the logits.

    `position` is where the drawn token will stand in its sequence, so (`seed`, `position`) names
    the draw on whichever worker it happens. `prompt_ids` and `output_ids` are live views, valid
    during the call only. `suppress_token_ids` must not be drawn (end of sequence and stop ids
    while fewer than min_tokens tokens exist); empty for most rows.
    """

    sampling: SamplingParams
    seed: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    suppress_token_ids: frozenset[int] = frozenset()


LogitsOut = TypeVar("LogitsOut", covariant=True)
LogitsIn = TypeVar("LogitsIn", contravariant=True)


class Runner(Protocol[LogitsOut]):
    """The model."""

    def forward(self, batch: BatchInput) -> LogitsOut:
        """Write the batch's KV and return logits [N, vocab] of `batch.sample_rows`."""
        ...


class TokenSampler(Protocol[LogitsIn]):
    """The draw."""

    def sample(self, logits: LogitsIn, rows: Sequence[SamplingRow]) -> Sequence[TokenOutput | TandemError]:
        """One token for each of the N rows; an error in the place of a row that has none (NaN logits)."""
        ...
