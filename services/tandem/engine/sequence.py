"""One sequence inside one engine: its tokens, its blocks, how far it is, and when it got there."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum

from tandem.clock import Clock
from tandem.engine.batch import SamplingRow
from tandem.engine.stopping import StopRule
from tandem.generation import Phase, PhaseTiming, SequenceSpec
from tandem.ids import BlockId
from tandem.kv.prefix_cache import CachedBlock


class Purpose(Enum):
    """What the sequence is here for."""

    GENERATE = "generate"
    EXPORT = "export"
    """Compute the prompt and one token, then keep the blocks for a sender."""
    RECEIVE = "receive"
    """Keep blocks for a receiver to fill; becomes GENERATE when admitted."""


class Stage(Enum):
    """What the scheduler may do with it."""

    WAITING = "waiting"
    """Queued; has no blocks."""
    RUNNING = "running"
    """Gets tokens step by step."""
    RESERVED = "reserved"
    """Has blocks that fill from outside; may be admitted."""
    HELD = "held"
    """Has blocks that someone outside still uses; computes no more."""
    ENDED = "ended"
    """Has no blocks; forgotten."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One instant on both clocks."""

    wall_ns: int
    monotonic_s: float

    @classmethod
    def now(cls, clock: Clock) -> Moment:
        """Read the clock."""
        return cls(clock.wall_ns(), clock.monotonic_s())


class Timeline:
    """The phases a sequence went through on this worker, back to back. Starts in QUEUE."""

    __slots__ = ("_done", "_since", "phase")

    def __init__(self, since: Moment) -> None:
        self.phase: Phase | None = Phase.QUEUE
        self._since = since
        self._done: list[PhaseTiming] = []

    def enter(self, phase: Phase | None, now: Moment, **attributes: int) -> float:
        """End the current phase, giving it `attributes`, and start `phase`; returns seconds spent."""
        duration_s = now.monotonic_s - self._since.monotonic_s
        if self.phase is not None:
            self._done.append(PhaseTiming(self.phase, self._since.wall_ns, duration_s, dict(attributes)))
        self.phase, self._since = phase, now
        return duration_s

    def add(self, phases: Iterable[PhaseTiming]) -> None:
        """Take phases that others measured, after those that ended here so far."""
        self._done.extend(phases)

    def phases(self) -> tuple[PhaseTiming, ...]:
        """Those that ended."""
        return tuple(self._done)


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable; only the scheduler and the engine change it. Neither prefill nor decode is a state:
    a sequence more than one token behind simply gets more tokens in a step.
    """

    spec: SequenceSpec
    purpose: Purpose
    arrival: int
    stop: StopRule
    timeline: Timeline
    stage: Stage = Stage.WAITING
    token_ids: array[int] = field(init=False)
    """All tokens so far, as uint32, the form in which blocks are hashed."""
    prompt_ids: SequenceOf[int] = field(init=False)
    output_ids: list[int] = field(init=False)
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    """Blocks in position order, as int32."""
    num_computed_tokens: int = 0
    """KV is valid at positions below this."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it first got blocks; None before."""
    num_shareable_blocks: int = 0
    last_shareable: CachedBlock | None = None
    """The node of the last shareable block in the prefix cache."""

    def __post_init__(self) -> None:
        num_prompt_tokens = self.spec.num_prompt_tokens
        self.token_ids = array("I", self.spec.token_ids)
        self.prompt_ids = self.spec.token_ids[:num_prompt_tokens]
        self.output_ids = list(self.spec.token_ids[num_prompt_tokens:])

    @property
    def order(self) -> tuple[int, int]:
        """Smallest first: higher priority, then earlier arrival."""
        return (-self.spec.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that lack KV; 1 while it decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    def append(self, token_id: int) -> None:
        """Take a generated token."""
        self.token_ids.append(token_id)
        self.output_ids.append(token_id)

    def sampling_row(self) -> SamplingRow:
        """How to draw the next token."""
        num_tokens = len(self.token_ids)
        return SamplingRow(
            self.spec.sampling,
            self.spec.seed,
            num_tokens,
            self.prompt_ids,
            self.output_ids,
            self.stop.suppressed(num_tokens),
        )

    def positioned_blocks(self) -> tuple[BlockId, ...]:
        """Its blocks, in position order."""
        return tuple(map(BlockId, self.block_ids))
