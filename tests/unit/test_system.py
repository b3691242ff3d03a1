from __future__ import annotations

import time

from tandem.clock import Clock
from tandem.ids import IdSource
from tandem.system import SystemClock, SystemIds


def test_the_real_clock_moves_on_and_knows_the_date() -> None:
    clock: Clock = SystemClock()
    first, second = clock.monotonic_s(), clock.monotonic_s()
    assert second >= first
    assert abs(clock.wall_ns() - time.time_ns()) < 60 * 10**9


def test_ids_are_128_bits_in_lower_case_hex_and_differ() -> None:
    ids: IdSource = SystemIds()
    drawn = [ids.hex128() for _ in range(100)]
    assert len(set(drawn)) == 100
    assert all(len(text) == 32 and text == text.lower() and int(text, 16) >= 0 for text in drawn)
