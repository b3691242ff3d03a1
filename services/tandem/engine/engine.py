"""The engine: verbs that put sequences in and take them out, and `step`, which moves them on.

It does not know that it is disaggregated. `export` leaves a prompt's blocks standing for a sender;
`reserve` and `admit` start a sequence whose blocks were filled from outside; all else is alike.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from typing import TypeVar

from tandem.clock import Clock
from tandem.engine.assemble import assemble
from tandem.engine.batch import BatchInput, Runner, SamplingRow, TokenSampler
from tandem.engine.results import ExportProgress, Outbox, Refusal, Reservation, StepResult
from tandem.engine.scheduler import Plan, Scheduler
from tandem.engine.sequence import Moment, Purpose, Sequence, Stage, Timeline
from tandem.engine.settings import EngineSettings
from tandem.engine.stopping import StopRule
from tandem.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    OutOfBlocks,
    Refused,
    TandemError,
)
from tandem.generation import (
    DEADLINE_ERROR,
    Phase,
    PhaseTiming,
    SequenceOutput,
    SequenceSpec,
    TokenOutput,
    WorkerLoad,
)
from tandem.ids import AttemptId
from tandem.kv.events import EventLog
from tandem.kv.pool import BlockPool
from tandem.request import FinishReason

logger = logging.getLogger(__name__)

Logits = TypeVar("Logits")

_QUEUE_SMOOTHING = 0.2
_MIN_RETRY_AFTER_S = 0.1


class Engine:
    """Not thread-safe: `EngineLoop` runs it. Verbs return at once; `step` says what came of them."""

    def __init__(
        self,
        settings: EngineSettings,
        runner: Runner[Logits],
        sampler: TokenSampler[Logits],
        clock: Clock,
    ) -> None:
        def compute(
            batch: BatchInput, rows: SequenceOf[SamplingRow]
        ) -> SequenceOf[TokenOutput | TandemError]:
            logits = runner.forward(batch)
            return sampler.sample(logits, rows) if rows else ()

        self.settings = settings
        self.idle = True
        """True when another step would bring nothing until a verb is called or a deadline passes."""
        self._compute = compute
        self._clock = clock
        self._pool = BlockPool(settings.num_blocks, settings.block_size_tokens)
        self._scheduler = Scheduler(self._pool, settings)
        self._sequences: dict[AttemptId, Sequence] = {}
        self._num_arrivals = 0
        self._outbox = Outbox()

    @property
    def kv_events(self) -> EventLog:
        """What entered and left the prefix cache; may be drained from any thread."""
        return self._pool.cache.events

    @property
    def num_sequences(self) -> int:
        """Sequences known here in any stage, those held or reserved for others included."""
        return len(self._sequences)

    def load(self) -> WorkerLoad:
        """The load as of now."""
        scheduler = self._scheduler
        return WorkerLoad(
            num_free_blocks=self._pool.num_free,
            num_running=len(scheduler.running) + scheduler.num_reserved,
            num_waiting=len(scheduler.waiting),
            queued_prefill_tokens=sum(
                s.num_pending_tokens for s in scheduler.waiting if s.purpose is not Purpose.RECEIVE
            )
            + sum(s.num_pending_tokens for s in scheduler.running if s.num_pending_tokens > 1),
        )

    def until_deadline_s(self) -> float | None:
        """Seconds until the first deadline among the sequences that wait or run; None without any."""
        first = min(
            (
                s.spec.deadline
                for s in self._sequences.values()
                if s.spec.deadline is not None and s.stage in (Stage.WAITING, Stage.RUNNING)
            ),
            default=None,
        )
        return None if first is None else first.remaining_s(self._clock)

    # Verbs

    def submit(self, spec: SequenceSpec) -> None:
        """Compute the whole sequence here. Raises `Overloaded`, `InvalidRequest`, `Refused`."""
        self._add(spec, Purpose.GENERATE)

    def export(self, spec: SequenceSpec) -> None:
        """Compute the prompt and one token, then hold the blocks until `release`. Raises as `submit`."""
        self._add(spec, Purpose.EXPORT)

    def reserve(self, spec: SequenceSpec) -> None:
        """Ask for the prompt's blocks; a later step grants or refuses. Raises as `submit`."""
        self._add(spec, Purpose.RECEIVE)

    def admit(
        self, attempt_id: AttemptId, first_token: TokenOutput, phases: tuple[PhaseTiming, ...] = ()
    ) -> None:
        """Run a reserved sequence: all its blocks are filled, and `first_token` was drawn elsewhere.

        The caller of the sequence already has that token: outputs start with the second, or with a
        mere finish if the first one ended it; its last output also tells `phases`, measured by whoever
        filled the blocks. Raises `Refused`, or `Cancelled` after an abort.
        """
        sequence = self._sequences.get(attempt_id)
        if sequence is not None and sequence.stage is Stage.HELD and sequence.purpose is Purpose.RECEIVE:
            raise Cancelled(f"attempt {attempt_id} was aborted before its blocks had arrived")
        if sequence is None or sequence.stage is not Stage.RESERVED:
            raise Refused(f"attempt {attempt_id} has no reservation here; reserve it first")
        self.idle = False
        now = Moment.now(self._clock)
        self._scheduler.admit(sequence)
        sequence.timeline.add(phases)
        sequence.timeline.enter(Phase.DECODE, now)
        sequence.append(first_token.token_id)
        finish = sequence.stop.check(first_token.token_id, sequence.num_tokens)
        if finish is not None:
            self._end(sequence, finish, now)

    def abort(self, attempt_id: AttemptId) -> None:
        """Stop computing. Exported and reserved blocks stay until `release`. Unknown: no-op."""
        sequence = self._sequences.get(attempt_id)
        if sequence is None:
            return
        self.idle = False
        if sequence.purpose is Purpose.GENERATE:
            self._end(sequence, FinishReason.CANCELLED, Moment.now(self._clock))
        elif sequence.stage is Stage.WAITING:
            self._withdraw(sequence)
        else:
            self._scheduler.hold(sequence)

    def release(self, attempt_id: AttemptId) -> None:
        """Free an exported or reserved sequence's blocks, and forget it, in whatever stage it is.

        No-op for an unknown one and, since then the engine owns the blocks, for an admitted one.
        """
        sequence = self._sequences.get(attempt_id)
        if sequence is None or sequence.purpose is Purpose.GENERATE:
            return
        self.idle = False
        if sequence.stage is Stage.WAITING:
            self._withdraw(sequence)
        else:
            self._forget(sequence)

    def step(self) -> StepResult:
        """Compute one batch, if there is anything to compute. At most one forward.

        A model that raises fails the sequences of its batch; a row without a token, only its own.
        """
        started = Moment.now(self._clock)
        self._expire(started)
        plan = self._scheduler.schedule()
        self._note(plan, started)
        self.idle = not plan.chunks
        if plan.chunks:
            try:
                tokens = self._run(plan)
            except Exception as error:
                logger.exception("a step with %d sequences failed", len(plan.chunks))
                self._fail([sequence for sequence, _ in plan.chunks], error)
            else:
                self._advance(plan, tokens)
        return self._outbox.collect()

    def fail_all(self, error: Exception) -> StepResult:
        """End every sequence that waits or runs; held and reserved blocks stay for their users."""
        self._fail([s for s in self._sequences.values() if s.stage in (Stage.WAITING, Stage.RUNNING)], error)
        return self._outbox.collect()

    # Inside a step

    def _add(self, spec: SequenceSpec, purpose: Purpose) -> None:
        if spec.attempt_id in self._sequences:
            raise Refused(f"attempt {spec.attempt_id} is here already; draw a new id for every try")
        num_tokens = len(spec.token_ids)
        if not 1 <= spec.num_prompt_tokens <= num_tokens:
            raise InvalidRequest(
                "num_prompt_tokens", f"must be between 1 and {num_tokens}, not {spec.num_prompt_tokens}"
            )
        stop = StopRule.of(spec, self.settings.eos_token_ids, self.settings.limit_tokens)
        if num_tokens >= stop.limit_tokens:
            num_blocks = self._pool.num_blocks_for(num_tokens)
            if num_blocks > self._pool.num_blocks:
                raise OutOfBlocks(wanted=num_blocks, free=self._pool.num_free)
            raise InvalidRequest(
                "token_ids", f"{num_tokens} tokens leave no room to generate; at most {stop.limit_tokens} fit"
            )
        timeline = Timeline(Moment.now(self._clock))
        sequence = Sequence(spec, purpose, self._num_arrivals, stop, timeline)
        self._scheduler.add(sequence)
        self._num_arrivals += 1
        self._sequences[spec.attempt_id] = sequence
        self.idle = False

    def _expire(self, now: Moment) -> None:
        late = [
            s
            for s in self._sequences.values()
            if s.spec.deadline is not None
            and s.spec.deadline.at_s <= now.monotonic_s
            and s.stage in (Stage.WAITING, Stage.RUNNING)
        ]
        for sequence in late:
            late_by = DeadlineExceeded(f"the deadline of attempt {sequence.spec.attempt_id} passed")
            self._end(sequence, FinishReason.ERROR, now, error=late_by)

    def _note(self, plan: Plan, now: Moment) -> None:
        for sequence in plan.started:
            if sequence.timeline.phase is Phase.QUEUE:
                self._note_wait(sequence.timeline.enter(Phase.PREFILL, now))
        for sequence in plan.reserved:
            self._note_wait(sequence.timeline.enter(None, now))
            self._outbox.reservations.append(
                Reservation(
                    sequence.spec.attempt_id, sequence.positioned_blocks(), sequence.num_computed_tokens
                )
            )

    def _note_wait(self, wait_s: float) -> None:
        usual_s = self._scheduler.retry_after_s
        smoothed_s = usual_s + _QUEUE_SMOOTHING * (wait_s - usual_s)
        self._scheduler.retry_after_s = max(_MIN_RETRY_AFTER_S, smoothed_s)

    def _run(self, plan: Plan) -> SequenceOf[TokenOutput | TandemError]:
        rows = [s.sampling_row() for s, n in plan.chunks if n == s.num_pending_tokens]
        tokens = self._compute(assemble(plan.chunks, self.settings.block_size_tokens), rows)
        if len(tokens) != len(rows):
            raise InternalError(f"the sampler drew {len(tokens)} tokens for {len(rows)} rows")
        return tokens

    def _advance(self, plan: Plan, tokens: SequenceOf[TokenOutput | TandemError]) -> None:
        now = Moment.now(self._clock)
        drawn = iter(tokens)
        for sequence, num_tokens in plan.chunks:
            token = next(drawn) if num_tokens == sequence.num_pending_tokens else None
            if isinstance(token, TandemError):
                self._fail([sequence], token)  # before the commit: what it computed is never shared
                continue
            self._scheduler.commit(sequence, num_tokens)
            if sequence.purpose is Purpose.EXPORT:
                self._advance_export(sequence, token, now)
            elif token is not None:
                self._advance_output(sequence, token, now)

    def _advance_output(self, sequence: Sequence, token: TokenOutput, now: Moment) -> None:
        if sequence.timeline.phase is Phase.PREFILL:
            self._close_phase(sequence, Phase.DECODE, now)
        sequence.append(token.token_id)
        finish = sequence.stop.check(token.token_id, sequence.num_tokens)
        if finish is not None:
            self._end(sequence, finish, now, tokens=(token,))
        else:
            self._outbox.outputs.append(
                SequenceOutput(
                    sequence.spec.attempt_id, (token,), num_cached_tokens=sequence.num_cached_tokens or 0
                )
            )

    def _advance_export(self, sequence: Sequence, token: TokenOutput | None, now: Moment) -> None:
        if token is not None:
            self._close_phase(sequence, None, now)
            self._scheduler.hold(sequence)
        self._outbox.exports.append(
            ExportProgress(
                sequence.spec.attempt_id,
                sequence.positioned_blocks(),
                sequence.num_computed_tokens,
                sequence.num_cached_tokens or 0,
                token,
                sequence.timeline.phases() if token is not None else (),
            )
        )

    # Ends

    def _fail(self, sequences: SequenceOf[Sequence], error: Exception) -> None:
        told = error if isinstance(error, TandemError) else InternalError(_describe(error))
        now = Moment.now(self._clock)
        for sequence in sequences:
            self._end(sequence, FinishReason.ERROR, now, error=told)

    def _end(
        self,
        sequence: Sequence,
        finish: FinishReason,
        now: Moment,
        *,
        tokens: tuple[TokenOutput, ...] = (),
        error: TandemError | None = None,
    ) -> None:
        """End a waiting or running sequence, and tell whoever listens for its purpose."""
        attempt_id, num_cached_tokens = sequence.spec.attempt_id, sequence.num_cached_tokens or 0
        if sequence.purpose is Purpose.RECEIVE:
            self._withdraw(sequence, error)
            return
        message = DEADLINE_ERROR if isinstance(error, DeadlineExceeded) else str(error) if error else None
        self._close_phase(sequence, None, now)
        phases = sequence.timeline.phases()
        if sequence.purpose is Purpose.GENERATE:
            self._forget(sequence)
            self._outbox.outputs.append(
                SequenceOutput(attempt_id, tokens, finish, num_cached_tokens, phases, message)
            )
            return
        blocks = sequence.positioned_blocks()
        if sequence.stage is Stage.RUNNING:
            # A sender may be reading the blocks computed so far: they stay until it releases them.
            self._scheduler.hold(sequence)
        else:
            self._forget(sequence)
        self._outbox.exports.append(
            ExportProgress(
                attempt_id,
                blocks,
                sequence.num_computed_tokens,
                num_cached_tokens,
                phases=phases,
                error=message or finish.value,
            )
        )

    def _withdraw(self, sequence: Sequence, error: TandemError | None = None) -> None:
        """Take a sequence without blocks out of the queue; a waiting `reserve` call is answered."""
        self._forget(sequence)
        if sequence.purpose is Purpose.RECEIVE:
            attempt_id = sequence.spec.attempt_id
            aborted = Cancelled(f"attempt {attempt_id} was aborted while it waited for KV blocks")
            self._outbox.refusals.append(Refusal(attempt_id, error or aborted))

    def _forget(self, sequence: Sequence) -> None:
        self._scheduler.drop(sequence)
        del self._sequences[sequence.spec.attempt_id]

    def _close_phase(self, sequence: Sequence, phase: Phase | None, now: Moment) -> None:
        attributes = {}
        if sequence.timeline.phase is Phase.PREFILL:
            attributes = {
                "num_tokens": sequence.num_computed_tokens,
                "num_cached_tokens": sequence.num_cached_tokens or 0,
            }
        elif sequence.timeline.phase is Phase.DECODE:
            attributes = {"num_tokens": len(sequence.output_ids)}
        sequence.timeline.enter(phase, now, **attributes)


def _describe(error: Exception) -> str:
    # A foreign message might hold what was computed on; its kind doesn't. The log has the rest.
    return f"the engine failed ({type(error).__name__}); the worker's log says more, and a retry may succeed"
