from __future__ import annotations

from contextlib import ExitStack

import pytest
from tests.support.directory_fakes import ManualClock

from tandem.errors import ConfigError, Draining, Overloaded
from tandem.routing.admission import Admission


@pytest.mark.parametrize(("num_open", "admitted"), [(2, True), (3, False), (4, False)])
def test_p40_the_bound_is_exact(num_open: int, admitted: bool) -> None:
    admission = Admission(3, ManualClock())
    with ExitStack() as places:
        for _ in range(min(num_open, 3)):
            places.enter_context(admission.admit())
        if admitted:
            places.enter_context(admission.admit())
        else:
            with pytest.raises(Overloaded, match=r"gateway\.max_requests") as caught:
                places.enter_context(admission.admit())
            assert caught.value.retry_after_s > 0
        assert admission.num_open == 3
    assert admission.num_open == 0


def test_a_failed_request_gives_its_place_back() -> None:
    admission = Admission(1, ManualClock())
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), admission.admit():
            raise ZeroDivisionError
    assert admission.num_open == 0


def test_the_word_on_when_to_come_back_follows_how_fast_places_fall_free() -> None:
    clock = ManualClock()
    admission = Admission(2, clock)
    with admission.admit():
        for _ in range(100):
            with admission.admit():
                clock.now_s += 0.25
        assert admission.retry_after_s() == pytest.approx(0.25, rel=0.01)
        for _ in range(300):
            with admission.admit():
                clock.now_s += 1000.0
        assert admission.retry_after_s() == 30.0


def test_an_idle_night_is_not_taken_for_slowness() -> None:
    clock = ManualClock()
    admission = Admission(1, clock)
    for _ in range(2):
        with admission.admit():
            clock.now_s += 0.5
        clock.now_s += 40_000.0
    assert admission.retry_after_s() == 1.0


def test_draining_admits_nobody_and_lets_the_open_ones_end() -> None:
    admission = Admission(2, ManualClock())
    with admission.admit():
        admission.drain()
        with pytest.raises(Draining), admission.admit():
            pass
        assert admission.num_open == 1
    assert admission.num_open == 0


def test_a_senseless_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Admission(0, ManualClock())
