from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.ids import WorkerId
from tandem.routing.profiles import PREFILL_PRIOR, Line, LinearFit, Profiles

FAST, SLOW, NEW = WorkerId("fast"), WorkerId("slow"), WorkerId("new")
SAMPLES = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e3)), max_size=50)


def test_it_starts_from_the_prior() -> None:
    fit = LinearFit(Line(0.5, 0.25), 512.0)
    assert fit.predict_s(0) == 0.5
    assert fit.predict_s(2) == pytest.approx(1.0)


def test_it_finds_the_line() -> None:
    fit = LinearFit(PREFILL_PRIOR, 512.0)
    for amount in (16, 100, 2000, 700, 48, 1500, 333, 900) * 5:
        fit.observe(amount, 0.02 + 0.0007 * amount)
    assert fit.line.base_s == pytest.approx(0.02, rel=0.05)
    assert fit.line.slope_s == pytest.approx(0.0007, rel=0.05)


def test_it_follows_a_change() -> None:
    fit = LinearFit(PREFILL_PRIOR, 512.0)
    for slope_s in (0.001, 0.004):
        for _ in range(100):
            for amount in (100, 1000):
                fit.observe(amount, slope_s * amount)
    assert fit.predict_s(1000) == pytest.approx(4.0, rel=0.05)


def test_always_the_same_amount_does_not_wind_it_up() -> None:
    fit = LinearFit(PREFILL_PRIOR, 512.0)
    for _ in range(20_000):
        fit.observe(256, 0.3)
    assert fit.predict_s(256) == pytest.approx(0.3, rel=0.01)
    fit.observe(1024, 1.0)
    assert 0.0 <= fit.predict_s(1024) < 2.0


@pytest.mark.parametrize(("amount", "seconds"), [(math.nan, 1), (1, math.inf), (-1, 1), (1, -1)])
def test_nonsense_is_ignored(amount: float, seconds: float) -> None:
    fit = LinearFit(PREFILL_PRIOR, 512.0)
    before = fit.line
    fit.observe(amount, seconds)
    assert fit.line == before
    assert fit.num_samples == 0


@given(SAMPLES, st.floats(0, 1e7), st.floats(0, 1e7))
def test_predictions_are_finite_not_negative_and_never_fall(
    samples: list[tuple[float, float]], one: float, other: float
) -> None:
    fit = LinearFit(PREFILL_PRIOR, 512.0)
    for amount, seconds in samples:
        fit.observe(amount, seconds)
    low, high = fit.predict_s(min(one, other)), fit.predict_s(max(one, other))
    assert math.isfinite(high)
    assert 0.0 <= low <= high


def test_each_worker_learns_by_itself_and_a_new_one_from_all() -> None:
    profiles = Profiles()
    for _ in range(30):
        for amount in (100, 1000):
            profiles.observe_prefill(FAST, amount, 0.001 * amount)
            profiles.observe_prefill(SLOW, amount, 0.003 * amount)
    assert profiles.prefill_s(FAST, 500) == pytest.approx(0.5, rel=0.1)
    assert profiles.prefill_s(SLOW, 500) == pytest.approx(1.5, rel=0.1)
    assert 0.5 < profiles.prefill_s(NEW, 500) < 1.5
    profiles.keep_only(frozenset([FAST]))
    assert profiles.num_workers == 1
    assert profiles.prefill_s(SLOW, 500) == profiles.prefill_s(NEW, 500)


def test_p40_a_worker_counts_on_its_own_from_the_third_sample() -> None:
    profiles = Profiles()
    for num_samples in (1, 2, 3):
        profiles.observe_decode_step(FAST, 1, 0.001)
        profiles.observe_decode_step(SLOW, 1, 5.0)
        alone = profiles.decode_step_s(FAST, 1) != profiles.decode_step_s(NEW, 1)
        assert alone == (num_samples >= 3)


def test_nothing_takes_no_time() -> None:
    profiles = Profiles()
    assert profiles.prefill_s(FAST, 0) == 0.0
    assert profiles.transfer_s(FAST, 0) == 0.0
    assert profiles.transfer_s(FAST, 1 << 30) > profiles.transfer_s(FAST, 1 << 20) > 0.0
