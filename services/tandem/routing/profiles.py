"""How long things take on each worker: straight lines, fitted while serving.

Recursive least squares with forgetting (Haykin, *Adaptive Filter Theory*, ch. 10), started from a
prior, so that a worker never seen has a sensible prediction. Each worker learns by itself; one new
to us starts from what its kind has learnt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.ids import WorkerId

_FORGETTING = 0.98
_FIRST_DOUBT = 100.0  # the prior weighs as a hundredth of one sample
_MAX_DOUBT = 1000.0
_MIN_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds = `base_s` + `slope_s` * amount."""

    base_s: float
    slope_s: float


class LinearFit:
    """Online fit of a `Line`. `unit` is a usual amount: it scales the numbers."""

    def __init__(self, prior: Line, unit: float) -> None:
        self._unit = unit
        self._base = prior.base_s
        self._slope = prior.slope_s * unit
        self._p00, self._p01, self._p11 = _FIRST_DOUBT, 0.0, _FIRST_DOUBT
        self._mean_x = self._mean_y = 0.0
        self.num_samples = 0

    @property
    def line(self) -> Line:
        """The fit as it stands; where it would fall or start below zero, the nearest line through
        the mean that doesn't."""
        if self._slope < 0.0:
            return Line(self._mean_y, 0.0)
        if self._base < 0.0 and self._mean_x > 0.0:
            return Line(0.0, self._mean_y / self._mean_x / self._unit)
        return Line(max(0.0, self._base), self._slope / self._unit)

    def predict_s(self, amount: float) -> float:
        """Predicted seconds; finite, not negative, and never less for a larger amount."""
        line = self.line
        return line.base_s + line.slope_s * max(0.0, amount)

    def observe(self, amount: float, seconds: float) -> None:
        """Learn from one measurement. Nonsense (negative, not finite) is ignored."""
        if not (math.isfinite(amount) and math.isfinite(seconds)) or amount < 0 or seconds < 0:
            return
        x = amount / self._unit
        gain0 = self._p00 + self._p01 * x
        gain1 = self._p01 + self._p11 * x
        scale = _FORGETTING + gain0 + gain1 * x
        error = seconds - (self._base + self._slope * x)
        self._base += gain0 / scale * error
        self._slope += gain1 / scale * error
        p00 = max(0.0, self._p00 - gain0 * gain0 / scale)
        p01 = self._p01 - gain0 * gain1 / scale
        p11 = max(0.0, self._p11 - gain1 * gain1 / scale)
        # Always the same amount says nothing of the other direction: forgetting would wind it up.
        forget = 1.0 if max(p00, p11) > _MAX_DOUBT else _FORGETTING
        self._p00, self._p01, self._p11 = p00 / forget, p01 / forget, p11 / forget
        self.num_samples += 1
        weight = max(1.0 / self.num_samples, 1.0 - _FORGETTING)
        self._mean_x += weight * (x - self._mean_x)
        self._mean_y += weight * (seconds - self._mean_y)


PREFILL_PRIOR = Line(0.005, 0.002)
DECODE_PRIOR = Line(0.010, 0.0005)
TRANSFER_PRIOR = Line(0.002, 1e-9)


@dataclass(slots=True)
class WorkerProfile:
    """One worker's lines: prefill by tokens, decode step by sequences, transfer into it by bytes."""

    prefill: LinearFit = field(default_factory=lambda: LinearFit(PREFILL_PRIOR, 512.0))
    decode_step: LinearFit = field(default_factory=lambda: LinearFit(DECODE_PRIOR, 8.0))
    transfer: LinearFit = field(default_factory=lambda: LinearFit(TRANSFER_PRIOR, float(64 << 20)))


class Profiles:
    """Every worker's profile, and one of them all for those not measured yet. Mutable."""

    def __init__(self) -> None:
        self._common = WorkerProfile()
        self._workers: dict[WorkerId, WorkerProfile] = {}

    def observe_prefill(self, worker_id: WorkerId, num_tokens: int, seconds: float) -> None:
        """`num_tokens` uncached tokens took `seconds` of computing, without queueing."""
        for profile in self._learners(worker_id):
            profile.prefill.observe(num_tokens, seconds)

    def observe_decode_step(self, worker_id: WorkerId, num_running: int, seconds: float) -> None:
        """One step with `num_running` sequences took `seconds`."""
        for profile in self._learners(worker_id):
            profile.decode_step.observe(num_running, seconds)

    def observe_transfer(self, worker_id: WorkerId, num_bytes: int, seconds: float) -> None:
        """`num_bytes` into this worker took `seconds`."""
        for profile in self._learners(worker_id):
            profile.transfer.observe(num_bytes, seconds)

    def prefill_s(self, worker_id: WorkerId, num_tokens: int) -> float:
        """Predicted seconds to compute `num_tokens`; none for no tokens."""
        if num_tokens <= 0:
            return 0.0
        return self._fit(worker_id, lambda profile: profile.prefill).predict_s(num_tokens)

    def decode_step_s(self, worker_id: WorkerId, num_running: int) -> float:
        """Predicted seconds of one step."""
        return self._fit(worker_id, lambda profile: profile.decode_step).predict_s(num_running)

    def transfer_s(self, worker_id: WorkerId, num_bytes: int) -> float:
        """Predicted seconds to bring `num_bytes` into this worker; none for no bytes."""
        if num_bytes <= 0:
            return 0.0
        return self._fit(worker_id, lambda profile: profile.transfer).predict_s(num_bytes)

    def keep_only(self, worker_ids: frozenset[WorkerId]) -> None:
        """Forget workers that are gone."""
        for worker_id in self._workers.keys() - worker_ids:
            del self._workers[worker_id]

    @property
    def num_workers(self) -> int:
        """Workers with a profile of their own."""
        return len(self._workers)

    def _learners(self, worker_id: WorkerId) -> tuple[WorkerProfile, WorkerProfile]:
        return self._common, self._workers.setdefault(worker_id, WorkerProfile())

    def _fit(self, worker_id: WorkerId, part: Callable[[WorkerProfile], LinearFit]) -> LinearFit:
        """The worker's own fit once it has some samples, else the common one."""
        own = part(self._workers.get(worker_id, self._common))
        return own if own.num_samples >= _MIN_SAMPLES else part(self._common)
