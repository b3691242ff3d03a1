"""The real clock and the real randomness: handed down from the composition root, never imported below."""

from __future__ import annotations

import secrets
import time


class SystemClock:
    """`clock.Clock` over the operating system."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary point of this machine's uptime; never goes back."""
        return time.monotonic()

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        return time.time_ns()


class SystemIds:
    """`ids.IdSource` over the operating system's entropy."""

    def hex128(self) -> str:
        """32 lower-case hex digits that nobody can guess."""
        return secrets.token_hex(16)
