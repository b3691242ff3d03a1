"""What one engine is asked to generate, and what it answers: the words between gateway and workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tandem.clock import Deadline
from tandem.ids import AttemptId
from tandem.request import FinishReason, SamplingParams

DEADLINE_ERROR = "deadline"
"""`SequenceOutput.error` of a sequence whose caller's time was up."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate token and its natural-log probability under the raw model distribution."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token. `logprob` and `top` are set only when logprobs were asked for.

    `top` holds the most likely candidates, best first, as many as were asked for.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """All that a worker must know to compute one sequence, on whichever worker it lands.

    `token_ids` is the prompt, followed by already generated tokens when a sequence is continued
    elsewhere; `num_prompt_tokens` says where the prompt ends. Sampling is a function of
    (`seed`, position), so a continued sequence goes on identically. `chain_root` starts the block
    hash chain (`kv.hashing.chain_root`): sequences with different roots never share a block.
    """

    attempt_id: AttemptId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    chain_root: bytes
    priority: int = 0
    deadline: Deadline | None = None


class Phase(Enum):
    """The phases of a request, in order. Every span, metric and table uses these words."""

    TOKENISE = "tokenise"
    ROUTE = "route"
    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class PhaseTiming:
    """When one phase ran on one worker: wall-clock start, and length in seconds."""

    phase: Phase
    start_ns: int
    duration_s: float
    attributes: dict[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one engine step brought for one sequence.

    `tokens` may be empty when the sequence ends without one (abort, error). `finish` is set once,
    on the last output; `phases` comes with it. `num_cached_tokens` counts prompt tokens that the
    worker's prefix cache held. `error` explains `FinishReason.ERROR`.
    """

    attempt_id: AttemptId
    tokens: tuple[TokenOutput, ...] = ()
    finish: FinishReason | None = None
    num_cached_tokens: int = 0
    phases: tuple[PhaseTiming, ...] = ()
    error: str | None = None

    def then(self, later: SequenceOutput) -> SequenceOutput:
        """Both as one, for a reader who was not there in between."""
        return SequenceOutput(
            self.attempt_id,
            self.tokens + later.tokens,
            later.finish,
            max(self.num_cached_tokens, later.num_cached_tokens),
            later.phases,
            later.error,
        )


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What the gateway learns from a sender: the first token, to stream at once."""

    first_token: TokenOutput
    num_cached_tokens: int
    phases: tuple[PhaseTiming, ...]


@dataclass(frozen=True, slots=True)
class CallContext:
    """What travels beside every call: the caller's deadline and its W3C trace context.

    `trace_headers` holds ``traceparent`` and ``tracestate``; empty starts a new trace.
    """

    deadline: Deadline | None = None
    trace_headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's own account of its load at one moment."""

    num_free_blocks: int
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
