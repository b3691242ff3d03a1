from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import InternalError
from tandem.ids import AttemptId, WorkerId
from tandem.routing.load_book import BookedLoad, Booking, LoadBook

P, D = WorkerId("p"), WorkerId("d")


def booking(attempt: str, *, prefill: WorkerId = P, tokens: int = 100, blocks: int = 7) -> Booking:
    return Booking(AttemptId(attempt), D, prefill, tokens, blocks)


def test_both_workers_are_booked_and_the_prompt_is_taken_off_first() -> None:
    book = LoadBook()
    book.book(booking("x"))
    assert book.load_of(P) == BookedLoad(0, 100, 0)
    assert book.load_of(D) == BookedLoad(1, 0, 7)
    for _ in range(2):
        book.prompt_done(AttemptId("x"))
        assert book.load_of(P) == BookedLoad()
        assert book.load_of(D) == BookedLoad(1, 0, 7)
    assert book.settle(AttemptId("x"))
    assert book.load_of(D) == BookedLoad()


def test_settling_twice_or_the_unknown_does_nothing() -> None:
    book = LoadBook()
    book.book(booking("x"))
    book.book(booking("y", prefill=D))
    assert book.settle(AttemptId("x"))
    assert not book.settle(AttemptId("x"))
    assert not book.settle(AttemptId("never"))
    book.prompt_done(AttemptId("x"))
    assert book.load_of(D) == BookedLoad(1, 100, 7)


def test_an_open_attempt_cannot_be_booked_again() -> None:
    book = LoadBook()
    book.book(booking("x"))
    with pytest.raises(InternalError, match="draw a new"):
        book.book(booking("x"))
    assert book.load_of(D) == BookedLoad(1, 0, 7)


def test_a_negative_load_is_refused() -> None:
    book = LoadBook()
    with pytest.raises(InternalError, match="negative"):
        book.book(booking("x", tokens=-1))
    assert book.num_open == 0


ATTEMPTS = st.sampled_from("abcdef")
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("book"),
            ATTEMPTS,
            st.sampled_from([P, D]),
            st.integers(0, 5000),
            st.integers(0, 500),
        ),
        st.tuples(st.sampled_from(["prompt_done", "settle"]), ATTEMPTS),
    ),
    max_size=40,
)


@given(STEPS)
def test_p6_bookings_return_to_zero_whatever_happens(steps: list[tuple[object, ...]]) -> None:
    book = LoadBook()
    open_attempts: set[str] = set()
    for step in steps:
        attempt = str(step[1])
        match step:
            case ("book", _, prefill, tokens, blocks):
                if attempt not in open_attempts:
                    book.book(booking(attempt, prefill=prefill, tokens=tokens, blocks=blocks))  # type: ignore[arg-type]
                    open_attempts.add(attempt)
            case ("prompt_done", _):
                book.prompt_done(AttemptId(attempt))
            case _:
                assert book.settle(AttemptId(attempt)) == (attempt in open_attempts)
                open_attempts.discard(attempt)
        assert book.num_open == len(open_attempts)
        for worker_id in (P, D):
            load = book.load_of(worker_id)
            assert min(load.num_sequences, load.num_prefill_tokens, load.num_blocks) >= 0
        assert book.load_of(D).num_sequences == len(open_attempts)
    for attempt in list(open_attempts):
        assert book.settle(AttemptId(attempt))
    assert book.num_open == 0
    assert book._loads == {}
    assert book._open == {}
