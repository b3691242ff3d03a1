"""The tables, walked: every short sequence of events that the shells can bring about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.errors import InternalError
from tandem.transfer.handoff import (
    RECEIVER,
    SENDER,
    ReceiverEffect,
    ReceiverEvent,
    ReceiverState,
    SenderEffect,
    SenderEvent,
    SenderState,
    Table,
    mermaid,
)

LENGTH = 6


def walks(table: Table, state, events=(), effects=()) -> Iterator[tuple]:
    """Every path of up to LENGTH possible events, with the effects of each event."""
    yield state, events, effects
    if len(events) == LENGTH:
        return
    for possible_state, event in [*table.moves, *table.ignored]:
        if possible_state is state:
            after, brought = table.step(state, event)
            yield from walks(table, after, (*events, event), (*effects, brought))


def test_p4_receiver_frees_or_commits_once_and_never_while_bytes_may_land() -> None:
    num_walked = 0
    for state, events, brought in walks(RECEIVER, RECEIVER.start):
        num_walked += 1
        effects = [effect for batch in brought for effect in batch]
        refused = events.count(ReceiverEvent.REFUSED)
        released, admitted = effects.count(ReceiverEffect.RELEASE), effects.count(ReceiverEffect.ADMIT)
        assert released <= 1
        assert admitted <= 1
        assert effects.count(ReceiverEffect.REPORT) <= 1
        assert not (released and admitted) or refused == 1
        assert (state is ReceiverState.RELEASED) == (released == 1)
        assert (state is ReceiverState.COMMITTED) <= (admitted == 1 and released == 0)
        for i, batch in enumerate(brought):
            if ReceiverEffect.RELEASE in batch or ReceiverEffect.ADMIT in batch:
                assert {ReceiverEvent.LANDED, ReceiverEvent.SETTLED} & set(events[: i + 1]), events
    assert num_walked > 1000


def test_p13_nothing_is_admitted_without_word_bytes_and_checksums() -> None:
    needed = {ReceiverEvent.WORD_OK, ReceiverEvent.LANDED, ReceiverEvent.CHECKED}
    for _, events, brought in walks(RECEIVER, RECEIVER.start):
        if any(ReceiverEffect.ADMIT in batch for batch in brought):
            assert needed <= set(events)


def test_p34_sender_has_one_last_word_and_frees_once_when_nothing_reads() -> None:
    for state, events, brought in walks(SENDER, SENDER.start):
        effects = [effect for batch in brought for effect in batch]
        words = effects.count(SenderEffect.TELL_OK) + effects.count(SenderEffect.TELL_BAD)
        assert (
            words == effects.count(SenderEffect.RELEASE) == (state in (SenderState.TELLING, SenderState.DONE))
        )
        if words:
            assert {SenderEvent.ALL_SENT, SenderEvent.SETTLED} & set(events)
        if SenderEffect.TELL_OK in effects:
            assert SenderEffect.STOP not in effects


def test_unlisted_pair_is_a_bug() -> None:
    with pytest.raises(InternalError, match="can't happen"):
        RECEIVER.step(ReceiverState.OPEN, ReceiverEvent.ADMITTED)


def test_every_state_is_drawn() -> None:
    for table, states in ((RECEIVER, ReceiverState), (SENDER, SenderState)):
        assert all(state.value in mermaid(table) for state in states)


def test_document_shows_the_tables_as_they_are() -> None:
    text = (Path(__file__).parents[3] / "docs" / "handoff.md").read_text()
    for table in (RECEIVER, SENDER):
        assert mermaid(table) in text, f"copy mermaid({table.name}) into docs/handoff.md"
