"""Phases measured in the engine's thread, told to the tracer under the caller's span."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tandem.generation import DEADLINE_ERROR, PhaseTiming, SequenceOutput
from tandem.ids import AttemptId, WorkerId
from tandem.request import FinishReason
from tandem.telemetry import names
from tandem.telemetry.names import Outcome
from tandem.telemetry.spans import Tracer, record_phase


class PhaseSpans:
    """Remembers each open attempt's trace context. Mutable; holds exactly the open attempts."""

    def __init__(self, tracer: Tracer, worker_id: WorkerId) -> None:
        self._tracer = tracer
        self._worker_id = worker_id
        self._parents: dict[AttemptId, Mapping[str, str]] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def begin(self, attempt_id: AttemptId, parent: Mapping[str, str]) -> None:
        """The attempt's spans hang under these W3C headers."""
        self._parents[attempt_id] = parent

    def forget(self, attempt_id: AttemptId) -> None:
        """The attempt has ended. Unknown: no-op."""
        self._parents.pop(attempt_id, None)

    def signed(self, phases: Iterable[PhaseTiming]) -> tuple[PhaseTiming, ...]:
        """The same phases, with this worker's name on each."""
        return tuple(
            replace(phase, attributes={**phase.attributes, names.WORKER: self._worker_id}) for phase in phases
        )

    def record(self, attempt_id: AttemptId, phases: tuple[PhaseTiming, ...], outcome: Outcome) -> None:
        """One span a phase; `outcome` is how the last of them ended. Unknown attempt: no-op."""
        parent = self._parents.get(attempt_id)
        if parent is None:
            return
        for phase in phases[:-1]:
            record_phase(self._tracer, phase, parent)
        for phase in phases[-1:]:
            record_phase(self._tracer, phase, parent, outcome)


def outcome_of_output(output: SequenceOutput) -> Outcome:
    """The word for a sequence's end."""
    if output.finish is FinishReason.CANCELLED:
        return Outcome.CANCELLED
    if output.finish is FinishReason.ERROR:
        return Outcome.DEADLINE if output.error == DEADLINE_ERROR else Outcome.ERROR
    return Outcome.OK
