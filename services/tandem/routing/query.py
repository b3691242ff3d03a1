"""What the router is asked and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tandem.config.choices import DisaggregationMode
from tandem.directory.base import WorkerRecord
from tandem.ids import AttemptId, WorkerId


@dataclass(frozen=True, slots=True)
class RouterPolicy:
    """The router's settings; all are safe defaults.

    `max_local_prefill_tokens`: in AUTO, more uncached tokens than this never run on a decode worker,
    for they would hold up its running sequences. `decode_slowdown`: what one running sequence adds
    to the price of a local prefill, as a share of it. `tie_margin`: scores within this share of the
    best one are equal. `inhibit_s`: how long a failed worker is avoided. `block_bytes`: KV bytes of
    a block when a query doesn't say.
    """

    mode: DisaggregationMode = DisaggregationMode.AUTO
    max_local_prefill_tokens: int = 512
    decode_slowdown: float = 0.1
    tie_margin: float = 0.05
    inhibit_s: float = 5.0
    block_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """One attempt that needs workers. `num_hashes` full blocks of the prompt were looked up.

    `excluded` workers are not considered: those that failed an earlier attempt of this request.
    """

    attempt_id: AttemptId
    num_prompt_tokens: int
    num_hashes: int
    layout_fingerprint: str
    priority: int = 0
    session_id: str = ""
    excluded: frozenset[WorkerId] = frozenset()
    block_bytes: int | None = None


class RouteReason(Enum):
    """Why the prompt is computed where it is."""

    REMOTE_FASTER = "remote_faster"
    LOCAL_FASTER = "local_faster"
    TOO_LONG_FOR_LOCAL = "too_long_for_local"
    NOTHING_TO_COMPUTE_REMOTELY = "nothing_to_compute_remotely"
    NO_PREFILL_WORKER = "no_prefill_worker"
    MODE = "mode"


@dataclass(frozen=True, slots=True)
class Route:
    """A whole choice, already booked. `prefill` None: the decode worker computes the prompt too.

    Cached tokens are what each worker is believed to hold. `predicted_remote_s` is None when there
    was no prefill worker to compare with; both are predicted seconds to the first token.
    """

    decode: WorkerRecord
    prefill: WorkerRecord | None
    reason: RouteReason
    num_cached_decode_tokens: int
    num_cached_prefill_tokens: int
    predicted_local_s: float
    predicted_remote_s: float | None

    @property
    def predicted_ttft_s(self) -> float:
        """Predicted seconds from now to the first token, on the way chosen."""
        if self.prefill is None or self.predicted_remote_s is None:
            return self.predicted_local_s
        return self.predicted_remote_s
