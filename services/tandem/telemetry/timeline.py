"""From timestamps to the numbers that people speak of: TTFT, TPOT, ITL, E2E and the phase table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tandem.generation import Phase, PhaseTiming
from tandem.telemetry import names


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a request began, when each token came, when it ended: seconds on one monotonic clock.

    Tokens of one chunk share a time. Raises `ValueError` when time runs backwards.
    """

    start_s: float
    token_times_s: tuple[float, ...]
    end_s: float

    def __post_init__(self) -> None:
        moments = (self.start_s, *self.token_times_s, self.end_s)
        if any(later < earlier for earlier, later in pairwise(moments)):
            raise ValueError("a timeline's moments must not decrease: use one monotonic clock")

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None if none came."""
        return self.token_times_s[0] - self.start_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token, ``(last - first) / (n - 1)``; None for fewer than two tokens."""
        count = len(self.token_times_s)
        return (self.token_times_s[-1] - self.token_times_s[0]) / (count - 1) if count > 1 else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Inter-token latencies, one fewer than tokens; 0 within a chunk, never negative."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_times_s))

    @property
    def e2e_s(self) -> float:
        """From the first moment to the last."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One line of the phase table: all timings of one phase on one worker.

    `offset_s` counts from the request's first phase. `busy_s` is the time during which at least one
    of the timings ran, so that choices computed side by side don't count twice. Counts are sums.
    """

    phase: Phase
    worker: str
    offset_s: float
    busy_s: float
    num_timings: int
    num_tokens: int | None
    num_cached_tokens: int | None
    num_bytes: int | None
    moving_s: float
    """The part of `busy_s` during which bytes were on their way, where it is known; else all of it."""

    @property
    def gigabytes_per_s(self) -> float | None:
        """10^9 bytes a second; None when no bytes were counted or no time passed."""
        return None if not self.num_bytes or self.moving_s <= 0 else self.num_bytes / self.moving_s / 1e9


def phase_rows(phases: Iterable[PhaseTiming]) -> tuple[PhaseRow, ...]:
    """Merge timings from all processes into rows, by the order of their start."""
    groups: dict[tuple[Phase, str], list[PhaseTiming]] = {}
    for timing in sorted(phases, key=lambda timing: timing.start_ns):
        worker = str(timing.attributes.get(names.WORKER, ""))
        groups.setdefault((timing.phase, worker), []).append(timing)
    if not groups:
        return ()
    origin_ns = min(timings[0].start_ns for timings in groups.values())
    return tuple(
        PhaseRow(
            phase=phase,
            worker=worker,
            offset_s=(timings[0].start_ns - origin_ns) / 1e9,
            busy_s=covered_s(timings),
            num_timings=len(timings),
            num_tokens=_total(timings, names.NUM_TOKENS),
            num_cached_tokens=_total(timings, names.NUM_CACHED_TOKENS),
            num_bytes=_total(timings, names.NUM_BYTES),
            moving_s=sum(float(t.attributes.get(names.BUSY_S, 0.0)) for t in timings) or covered_s(timings),
        )
        for (phase, worker), timings in groups.items()
    )


def covered_s(phases: Iterable[PhaseTiming]) -> float:
    """Seconds during which at least one of the timings ran; overlaps count once.

    Over all phases of a request this is what its latency must add up to, although transfer and
    prefill overlap.
    """
    spans = sorted((t.start_ns, t.start_ns + round(t.duration_s * 1e9)) for t in phases)
    covered_ns = 0
    reached_ns = 0
    for start_ns, end_ns in spans:
        covered_ns += max(0, end_ns - max(start_ns, reached_ns))
        reached_ns = max(reached_ns, end_ns)
    return covered_ns / 1e9


TABLE_HEADER = ("phase", "worker", "start", "time", "detail")


def table_rows(phases: Iterable[PhaseTiming]) -> list[tuple[str, str, str, str, str]]:
    """The phase table as text cells under `TABLE_HEADER`, for whatever draws it."""
    return [
        (row.phase.value, row.worker, f"+{_ms(row.offset_s)}", _ms(row.busy_s), _detail(row))
        for row in phase_rows(phases)
    ]


def _detail(row: PhaseRow) -> str:
    parts: list[str] = []
    if row.num_tokens is not None:
        parts.append(f"{row.num_tokens} tokens")
        if row.phase is Phase.DECODE and row.busy_s > 0:
            parts.append(f"{row.num_tokens / row.busy_s:.1f} tok/s")
    if row.num_cached_tokens is not None:
        parts.append(f"{row.num_cached_tokens} from the prefix cache")
    if row.num_bytes is not None:
        parts.append(f"{row.num_bytes / 1e6:.2f} MB")
    if row.gigabytes_per_s is not None:
        parts.append(f"{row.gigabytes_per_s:.2f} GB/s")
    return ", ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _total(timings: Sequence[PhaseTiming], key: str) -> int | None:
    found = [int(timing.attributes[key]) for timing in timings if key in timing.attributes]
    return sum(found) if found else None
