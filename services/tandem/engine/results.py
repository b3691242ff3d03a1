"""What the engine says: the answers to its verbs, and what one step brought."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.errors import TandemError
from tandem.generation import PhaseTiming, SequenceOutput, TokenOutput
from tandem.ids import AttemptId, BlockId


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks that wait to be filled from outside.

    `block_ids` are all blocks of the tokens in position order. The first
    ``num_cached_tokens / block_size`` of them hold valid KV and are shared: never write into those.
    """

    attempt_id: AttemptId
    block_ids: tuple[BlockId, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reservation that waited and will not come."""

    attempt_id: AttemptId
    error: TandemError


@dataclass(frozen=True, slots=True)
class ExportProgress:
    """How far an exported sequence is computed; its blocks stay put until they are released.

    KV is valid at positions below `num_computed_tokens`. The last progress has `first_token` and
    `phases`, or, when the computation ended without a token (deadline, failed step), `error`.
    """

    attempt_id: AttemptId
    block_ids: tuple[BlockId, ...]
    num_computed_tokens: int
    num_cached_tokens: int = 0
    first_token: TokenOutput | None = None
    phases: tuple[PhaseTiming, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """All that one step brought. `reservations` and `refusals` answer waiting `reserve` calls."""

    outputs: tuple[SequenceOutput, ...] = ()
    exports: tuple[ExportProgress, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to say."""
        return bool(self.outputs or self.exports or self.reservations or self.refusals)


@dataclass(slots=True)
class Outbox:
    """Where the engine puts what it has to say until the step ends."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    exports: list[ExportProgress] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    def collect(self) -> StepResult:
        """All that was put in since the last call; empties it."""
        result = StepResult(
            tuple(self.outputs), tuple(self.exports), tuple(self.reservations), tuple(self.refusals)
        )
        self.outputs.clear()
        self.exports.clear()
        self.reservations.clear()
        self.refusals.clear()
        return result
