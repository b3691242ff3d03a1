"""What the phases that really ran teach the router's predictions."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.generation import Phase, PhaseTiming
from tandem.ids import WorkerId
from tandem.routing.router import Router
from tandem.telemetry import names


def learn(router: Router, phases: Iterable[PhaseTiming]) -> None:
    """Feed the router's profiles. Phases without a worker's name, or without work done, say nothing."""
    for timing in phases:
        worker_id = WorkerId(str(timing.attributes.get(names.WORKER, "")))
        num_tokens = _count(timing, names.NUM_TOKENS)
        if not worker_id or timing.duration_s <= 0:
            continue
        if timing.phase is Phase.PREFILL:
            num_computed = num_tokens - _count(timing, names.NUM_CACHED_TOKENS)
            if num_computed > 0:
                router.profiles.observe_prefill(worker_id, num_computed, timing.duration_s)
        elif timing.phase is Phase.DECODE and num_tokens > 1:
            num_running = max(1, router.book.load_of(worker_id).num_sequences)
            router.profiles.observe_decode_step(worker_id, num_running, timing.duration_s / num_tokens)
        elif timing.phase is Phase.TRANSFER:
            num_bytes = _count(timing, names.NUM_BYTES)
            if num_bytes > 0:
                router.profiles.observe_transfer(worker_id, num_bytes, timing.duration_s)


def _count(timing: PhaseTiming, key: str) -> int:
    return int(timing.attributes.get(key, 0))
