"""Time as a value: code below the services never asks the operating system for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """A source of time; `system.SystemClock` is the real one."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary point of this process; never goes back."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch, for spans and records seen by others."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """A moment on one process's monotonic clock. Only the remaining time crosses a wire."""

    at_s: float

    @classmethod
    def after(cls, clock: Clock, seconds: float) -> Deadline:
        """The moment `seconds` from now."""
        return cls(clock.monotonic_s() + seconds)

    def remaining_s(self, clock: Clock) -> float:
        """Seconds left; zero once passed, never negative."""
        return max(0.0, self.at_s - clock.monotonic_s())

    def passed(self, clock: Clock) -> bool:
        """True from the moment itself on."""
        return clock.monotonic_s() >= self.at_s
