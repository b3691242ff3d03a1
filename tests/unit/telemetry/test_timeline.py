from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.generation import Phase, PhaseTiming
from tandem.telemetry import names
from tandem.telemetry.timeline import Timeline, covered_s, phase_rows, table_rows

MS = 1_000_000


def timing(phase: Phase, start_ms: int, length_ms: float, **attributes: int | float | str) -> PhaseTiming:
    return PhaseTiming(phase, start_ms * MS, length_ms / 1000, attributes)


def test_the_four_numbers() -> None:
    timeline = Timeline(1.0, (1.5, 1.7, 2.1), 2.2)
    assert timeline.ttft_s == pytest.approx(0.5)
    assert timeline.tpot_s == pytest.approx(0.3)
    assert timeline.itl_s == pytest.approx((0.2, 0.4))
    assert timeline.e2e_s == pytest.approx(1.2)


def test_without_enough_tokens_a_number_is_none_not_zero() -> None:
    nothing, single = Timeline(0.0, (), 1.0), Timeline(0.0, (0.5,), 1.0)
    assert nothing.ttft_s is None
    assert nothing.tpot_s is None
    assert single.ttft_s == 0.5
    assert single.tpot_s is None
    assert nothing.itl_s == single.itl_s == ()


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=30))
def test_p40_inter_token_latencies_are_never_negative_and_add_up(moments: list[float]) -> None:
    ordered = sorted(moments)
    timeline = Timeline(ordered[0], tuple(ordered), ordered[-1])
    assert all(itl >= 0 for itl in timeline.itl_s)
    assert timeline.tpot_s == pytest.approx(sum(timeline.itl_s) / len(timeline.itl_s), abs=1e-6)


@pytest.mark.parametrize(
    ("start", "tokens", "end"), [(1.0, (0.9,), 2.0), (0.0, (2.0, 1.0), 3.0), (0.0, (1.0,), 0.5)]
)
def test_time_that_runs_backwards_is_refused(start: float, tokens: tuple[float, ...], end: float) -> None:
    with pytest.raises(ValueError, match="monotonic"):
        Timeline(start, tokens, end)


def test_rows_merge_by_phase_and_worker_and_count_overlap_once() -> None:
    rows = phase_rows(
        [
            timing(Phase.DECODE, 30, 10, num_tokens=4, worker="decode-0"),
            timing(Phase.PREFILL, 10, 10, worker="prefill-0", num_tokens=100),
            timing(Phase.DECODE, 35, 10, num_tokens=6, worker="decode-0"),
            timing(Phase.TOKENISE, 0, 5),
            timing(Phase.DECODE, 30, 2, worker="decode-1"),
        ]
    )
    assert [(row.phase, row.worker) for row in rows] == [
        (Phase.TOKENISE, ""),
        (Phase.PREFILL, "prefill-0"),
        (Phase.DECODE, "decode-0"),
        (Phase.DECODE, "decode-1"),
    ]
    decode = rows[2]
    assert decode.offset_s == pytest.approx(0.030)
    assert decode.busy_s == pytest.approx(0.015)
    assert (decode.num_timings, decode.num_tokens) == (2, 10)
    assert rows[3].num_tokens is None


def test_bytes_make_a_speed() -> None:
    (row,) = phase_rows([timing(Phase.TRANSFER, 0, 100, num_bytes=10**9)])
    assert row.gigabytes_per_s == pytest.approx(10.0)
    (instant,) = phase_rows([timing(Phase.TRANSFER, 0, 0, num_bytes=10**9)])
    assert instant.gigabytes_per_s is None


def test_p27_disjoint_phases_add_up_and_overlapping_ones_count_once() -> None:
    assert covered_s([timing(Phase.QUEUE, 0, 5), timing(Phase.PREFILL, 5, 20)]) == pytest.approx(0.025)
    overlapping = [timing(Phase.PREFILL, 0, 20), timing(Phase.TRANSFER, 10, 15), timing(Phase.ROUTE, 2, 1)]
    assert covered_s(overlapping) == pytest.approx(0.025)
    assert covered_s([timing(Phase.QUEUE, 0, 5), timing(Phase.PREFILL, 10, 5)]) == pytest.approx(0.010)
    assert covered_s([]) == 0.0


def test_the_table_reads_well() -> None:
    rows = table_rows(
        [
            timing(Phase.PREFILL, 1, 40, worker="prefill-0", num_tokens=64, num_cached_tokens=32),
            timing(Phase.TRANSFER, 10, 20, worker="prefill-0", num_bytes=20_000_000),
            timing(Phase.DECODE, 41, 100, worker="decode-0", num_tokens=10),
        ]
    )
    assert rows == [
        ("prefill", "prefill-0", "+0.0 ms", "40.0 ms", "64 tokens, 32 from the prefix cache"),
        ("transfer", "prefill-0", "+9.0 ms", "20.0 ms", "20.00 MB, 1.00 GB/s"),
        ("decode", "decode-0", "+40.0 ms", "100.0 ms", "10 tokens, 100.0 tok/s"),
    ]
    assert table_rows([]) == []
    assert names.NUM_BYTES == "num_bytes"
