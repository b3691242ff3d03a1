"""A model that really stores its tokens in KV slots, so that a wrong block shows as a wrong token."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from tandem.engine.batch import BatchInput, SamplingRow
from tandem.engine.engine import Engine
from tandem.engine.settings import EngineSettings
from tandem.errors import InternalError, TandemError
from tandem.generation import SequenceSpec, TokenOutput
from tandem.ids import AttemptId
from tandem.request import SamplingParams

VOCAB_SIZE = 1000
ROOT = b"root"


def true_next(tokens: Sequence[int], seed: int = 0) -> int:
    """What the fake model says after `tokens`, told from the tokens alone."""
    digest = hashlib.sha256(repr((seed, list(tokens))).encode()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB_SIZE


def true_answer(tokens: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What follows `tokens`, told from the tokens alone."""
    known = list(tokens)
    for _ in range(num_tokens):
        known.append(true_next(known, seed))
    return known[len(tokens) :]


class FakeRunner:
    """`slots` is the KV storage: each holds the token computed there, -1 when never written.

    `fail_next` raises instead of the next forward. `on_forward` is called first (to stage races).
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.block_size = settings.block_size_tokens
        self.slots = np.full(settings.num_blocks * self.block_size, -1, dtype=np.int64)
        self.fail_next: Exception | None = None
        self.on_forward: Callable[[], None] = lambda: None
        self.batches: list[BatchInput] = []

    def forward(self, batch: BatchInput) -> list[list[int]]:
        self.batches.append(batch)
        self.on_forward()
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        assert len(set(batch.slots.tolist())) == batch.num_tokens, "two tokens were given one slot"
        self.slots[batch.slots] = batch.token_ids
        seen: list[list[int]] = []
        for row in batch.sample_rows.tolist():
            sequence = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
            assert row == batch.query_starts[sequence + 1] - 1
            length = int(batch.context_lens[sequence])
            assert batch.positions[row] == length - 1
            seen.append([self.read(batch.block_tables[sequence].tolist(), p) for p in range(length)])
        return seen

    def read(self, block_ids: Sequence[int], position: int) -> int:
        """The token stored at `position` of the sequence with these blocks."""
        block = block_ids[position // self.block_size]
        return int(self.slots[block * self.block_size + position % self.block_size])

    def fill(self, block_ids: Sequence[int], tokens: Sequence[int], first_position: int) -> None:
        """Write as a transfer would: positions from `first_position` on."""
        for position in range(first_position, len(tokens)):
            block = block_ids[position // self.block_size]
            self.slots[block * self.block_size + position % self.block_size] = tokens[position]


class FakeSampler:
    """Draws `true_next` of what was read through the block tables; remembers its rows.

    Rows of `broken_seeds` get an error, as rows of NaN do.
    """

    def __init__(self) -> None:
        self.rows: list[SamplingRow] = []
        self.broken_seeds: set[int] = set()

    def sample(self, logits: list[list[int]], rows: Sequence[SamplingRow]) -> list[TokenOutput | TandemError]:
        self.rows.extend(rows)
        drawn: list[TokenOutput | TandemError] = []
        for seen, row in zip(logits, rows, strict=True):
            assert seen == [*row.prompt_ids, *row.output_ids], "KV read back isn't the sequence's own"
            assert row.position == len(seen)
            if row.seed in self.broken_seeds:
                drawn.append(InternalError("this row's logits are NaN"))
            else:
                drawn.append(TokenOutput(true_next(seen, row.seed)))
        return drawn


class ManualClock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_ns(self) -> int:
        return int(self.now_s * 1e9)


def make_settings(**changes: int | frozenset[int]) -> EngineSettings:
    values: dict[str, int | frozenset[int]] = {
        "num_blocks": 32,
        "max_context_tokens": 200,
        "block_size_tokens": 4,
        "max_batch_tokens": 16,
        "max_num_sequences": 8,
        "max_waiting": 16,
    }
    return EngineSettings(**(values | changes))  # type: ignore[arg-type]


class Rig:
    """One engine on the fakes."""

    def __init__(self, **changes: int | frozenset[int]) -> None:
        self.settings = make_settings(**changes)
        self.runner = FakeRunner(self.settings)
        self.sampler = FakeSampler()
        self.clock = ManualClock()
        self.engine = Engine(self.settings, self.runner, self.sampler, self.clock)


def make_spec(
    name: str,
    tokens: Sequence[int],
    *,
    max_tokens: int | None = 4,
    num_prompt_tokens: int | None = None,
    priority: int = 0,
    deadline: object = None,
    root: bytes = ROOT,
    seed: int = 0,
    **sampling: object,
) -> SequenceSpec:
    return SequenceSpec(
        attempt_id=AttemptId(name),
        token_ids=tuple(tokens),
        num_prompt_tokens=len(tokens) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        seed=seed,
        chain_root=root,
        priority=priority,
        deadline=deadline,  # type: ignore[arg-type]
    )
