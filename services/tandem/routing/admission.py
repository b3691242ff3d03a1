"""How many requests a gateway has open at once: a bound, and an honest word on when to come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tandem.clock import Clock
from tandem.errors import ConfigError, Draining, Overloaded

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 30.0
_WEIGHT = 0.1


class Admission:
    """Counts open requests. Mutable; one thread. Nothing waits here: the workers have the queues."""

    def __init__(self, max_open: int, clock: Clock) -> None:
        if max_open < 1:
            raise ConfigError(f"gateway.max_requests must be at least 1, not {max_open}")
        self._max_open = max_open
        self._clock = clock
        self._num_open = 0
        self._draining = False
        self._last_end_s: float | None = None
        self._between_ends_s = 1.0

    @property
    def num_open(self) -> int:
        """Requests admitted and not ended."""
        return self._num_open

    def drain(self) -> None:
        """Admit nobody any more."""
        self._draining = True

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold one place for the block's duration. Raises `Overloaded` or `Draining` at once."""
        if self._draining:
            raise Draining("this gateway is shutting down; call another one")
        if self._num_open >= self._max_open:
            raise Overloaded(
                f"{self._num_open} requests are open, the most this gateway takes; "
                "retry later, or raise gateway.max_requests",
                retry_after_s=self.retry_after_s(),
            )
        if self._num_open == 0:
            self._last_end_s = None  # an idle time says nothing about how long requests take
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._note_end()

    def retry_after_s(self) -> float:
        """The usual time between two requests' ends: when the next place should fall free."""
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, self._between_ends_s))

    def _note_end(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._last_end_s is not None:
            self._between_ends_s += _WEIGHT * (now_s - self._last_end_s - self._between_ends_s)
        self._last_end_s = now_s
