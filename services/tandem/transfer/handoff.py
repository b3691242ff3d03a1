"""The hand-off as two tables: who owns the blocks, and who may still touch them. No I/O, no time.

Each side is a mapping from (state, event) to (next state, effects); the shells `receiver` and
`sender` turn what happens into events, and carry effects out in order. A pair that is in neither
`moves` nor `ignored` cannot happen: `Table.step` raises `InternalError`.

**When a receiver's block may be freed.** Receives are posted straight into KV blocks, so freeing
one early would let a late message overwrite another sequence. The only proof that no byte is
written any more is the transport's own: `transport.base.Receive.settled` of *every* receive, which
turns true when the bytes have landed, after a `cancel` that the transport has confirmed, or when
the transport has closed. Not a timeout, and not the sender's final word either: a message may still
be on its way when the word, which travels elsewhere, arrives. So RELEASE and ADMIT follow LANDED or
SETTLED and nothing else; a block whose receive never settles stays in quarantine.

**When a sender's block may be freed.** Sends read it. RELEASE therefore follows ALL_SENT, or
SETTLED: every task that reads the block has ended. Exactly one final word leaves, after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Generic, TypeVar

from tandem.errors import InternalError

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)
Effect = TypeVar("Effect", bound=Enum)


@dataclass(frozen=True, slots=True)
class Table(Generic[State, Event, Effect]):
    """One side of the hand-off."""

    name: str
    start: State
    moves: Mapping[tuple[State, Event], tuple[State, tuple[Effect, ...]]]
    ignored: frozenset[tuple[State, Event]]
    """What may come late, and then changes nothing."""

    def step(self, state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
        """Where `event` leads, and what to do about it. Raises `InternalError` if it can't happen."""
        move = self.moves.get((state, event))
        if move is not None:
            return move
        if (state, event) in self.ignored:
            return state, ()
        raise InternalError(f"hand-off, {self.name}: {event.value!r} can't happen in state {state.value!r}")

    @property
    def final(self) -> frozenset[State]:
        """States that nothing leads out of."""
        leads_on = {state for (state, _), (after, _) in self.moves.items() if after is not state}
        return frozenset(after for after, _ in self.moves.values()) - leads_on


class ReceiverState(Enum):
    """A transfer as its receiver sees it."""

    OPEN = "open"
    """Blocks are reserved, receives posted; bytes may land."""
    FILLED = "filled"
    """All blocks have landed; the sender's word is missing."""
    LANDING = "landing"
    """The sender said OK; some blocks are still on their way."""
    CHECKING = "checking"
    """All is here; checksums are being compared."""
    ADMITTING = "admitting"
    """All is right; the engine is being told."""
    SETTLING = "settling"
    """Given up; bytes may still land, so the blocks are in quarantine."""
    COMMITTED = "committed"
    """The blocks are the engine's."""
    RELEASED = "released"
    """The blocks are free."""


class ReceiverEvent(Enum):
    """What can happen to a receiver."""

    WORD_OK = "word ok"
    WORD_BAD = "word bad"
    """The sender failed, gave up, or promised something else than the ticket says."""
    LANDED = "landed"
    LOST = "lost"
    """A receive ended without its bytes."""
    CHECKED = "checked"
    CORRUPT = "corrupt"
    ADMITTED = "admitted"
    REFUSED = "refused"
    """The engine doesn't take the sequence any more."""
    CANCEL = "cancel"
    EXPIRED = "expired"
    """The lease has ended."""
    SETTLED = "settled"
    """No receive can write any more."""


class ReceiverEffect(Enum):
    """What a receiver does about it."""

    CHECK = "check"
    ADMIT = "admit"
    CANCEL_RECEIVES = "cancel receives"
    RELEASE = "release"
    REPORT = "report"
    """Tell the attempt's reader that it failed."""
    REFUSE = "refuse"
    """Tell the sender that its ticket is used up."""


class SenderState(Enum):
    """A transfer as its sender sees it."""

    OPENING = "opening"
    """Ticket, peer and connection are being checked."""
    COMPUTING = "computing"
    """The engine computes; blocks leave as they fill."""
    SENDING = "sending"
    """The first token is known; the last blocks leave."""
    SETTLING = "settling"
    """Given up; sends may still read the blocks."""
    TELLING = "telling"
    """The blocks are free; the final word is on its way."""
    DONE = "done"


class SenderEvent(Enum):
    """What can happen to a sender."""

    OPENED = "opened"
    OPEN_FAILED = "open failed"
    COMPUTED = "computed"
    COMPUTE_FAILED = "compute failed"
    SEND_FAILED = "send failed"
    DISOWNED = "disowned"
    """The receiver says that it doesn't know the ticket."""
    CANCEL = "cancel"
    ALL_SENT = "all sent"
    SETTLED = "settled"
    """Nothing reads the blocks any more."""
    TOLD = "told"
    """The final word was taken, or could not be delivered in time."""


class SenderEffect(Enum):
    """What a sender does about it."""

    EXPORT = "export"
    ANSWER = "answer"
    """Give the first token to whoever asked."""
    STOP = "stop"
    """Stop computing and sending, and answer with the error if nothing was answered yet."""
    RELEASE = "release"
    TELL_OK = "tell ok"
    TELL_BAD = "tell bad"


def _pairs(states: Iterable[State], events: Iterable[Event]) -> tuple[tuple[State, Event], ...]:
    return tuple(product(states, events))


def _receiver() -> Table[ReceiverState, ReceiverEvent, ReceiverEffect]:
    s, e, f = ReceiverState, ReceiverEvent, ReceiverEffect
    give_up = (s.SETTLING, (f.CANCEL_RECEIVES, f.REPORT))
    give_up_quietly = (s.SETTLING, (f.CANCEL_RECEIVES,))
    free = (s.RELEASED, (f.RELEASE, f.REPORT))
    free_quietly = (s.RELEASED, (f.RELEASE,))
    moves = {
        (s.OPEN, e.WORD_OK): (s.LANDING, ()),
        (s.OPEN, e.WORD_BAD): give_up,
        (s.OPEN, e.LANDED): (s.FILLED, ()),
        (s.OPEN, e.LOST): give_up,
        (s.OPEN, e.CANCEL): give_up_quietly,
        (s.OPEN, e.EXPIRED): give_up,
        (s.FILLED, e.WORD_OK): (s.CHECKING, (f.CHECK,)),
        (s.FILLED, e.WORD_BAD): free,
        (s.FILLED, e.CANCEL): free_quietly,
        (s.FILLED, e.EXPIRED): free,
        (s.LANDING, e.LANDED): (s.CHECKING, (f.CHECK,)),
        (s.LANDING, e.LOST): give_up,
        (s.LANDING, e.CANCEL): give_up_quietly,
        (s.LANDING, e.EXPIRED): give_up,
        (s.CHECKING, e.CHECKED): (s.ADMITTING, (f.ADMIT,)),
        (s.CHECKING, e.CORRUPT): free,
        (s.CHECKING, e.CANCEL): free_quietly,
        (s.ADMITTING, e.ADMITTED): (s.COMMITTED, ()),
        (s.ADMITTING, e.REFUSED): free,
        (s.SETTLING, e.SETTLED): free_quietly,
    }
    used = (s.LANDING, s.CHECKING, s.ADMITTING, s.SETTLING, s.COMMITTED, s.RELEASED)
    refused = {(state, event): (state, (f.REFUSE,)) for state, event in _pairs(used, (e.WORD_OK, e.WORD_BAD))}
    # Once ADMIT was asked for, a cancel is the engine's business: it stops the running sequence.
    late = _pairs((s.ADMITTING, s.SETTLING, s.COMMITTED, s.RELEASED), (e.CANCEL, e.EXPIRED))
    ended = _pairs((s.SETTLING, s.RELEASED), (e.LANDED, e.LOST))
    checked = _pairs((s.RELEASED,), (e.CHECKED, e.CORRUPT))
    busy = _pairs((s.CHECKING,), (e.EXPIRED,))
    return Table("receiver", s.OPEN, {**moves, **refused}, frozenset(late + ended + checked + busy))


def _sender() -> Table[SenderState, SenderEvent, SenderEffect]:
    s, e, f = SenderState, SenderEvent, SenderEffect
    stop = (s.SETTLING, (f.STOP,))
    failures = (e.SEND_FAILED, e.DISOWNED, e.CANCEL)
    moves = {
        (s.OPENING, e.OPENED): (s.COMPUTING, (f.EXPORT,)),
        (s.OPENING, e.OPEN_FAILED): stop,
        (s.OPENING, e.DISOWNED): stop,
        (s.OPENING, e.CANCEL): stop,
        (s.COMPUTING, e.COMPUTED): (s.SENDING, (f.ANSWER,)),
        (s.COMPUTING, e.COMPUTE_FAILED): stop,
        **dict.fromkeys(_pairs((s.COMPUTING, s.SENDING), failures), stop),
        (s.SENDING, e.ALL_SENT): (s.TELLING, (f.RELEASE, f.TELL_OK)),
        (s.SETTLING, e.SETTLED): (s.TELLING, (f.RELEASE, f.TELL_BAD)),
        (s.TELLING, e.TOLD): (s.DONE, ()),
    }
    # The engine's thread, a peer's answer and a caller may all speak after the end.
    late = _pairs((s.SETTLING, s.TELLING, s.DONE), (e.COMPUTED, e.COMPUTE_FAILED, e.DISOWNED, e.CANCEL))
    ended = _pairs((s.SETTLING,), (e.OPENED, e.OPEN_FAILED, e.SEND_FAILED))
    return Table("sender", s.OPENING, moves, frozenset(late + ended))


RECEIVER = _receiver()
SENDER = _sender()


def mermaid(table: Table[State, Event, Effect]) -> str:
    """The table as a Mermaid state diagram; moves between the same two states share an arrow."""
    arrows: dict[tuple[State, State, tuple[Effect, ...]], list[str]] = {}
    for (state, event), (after, effects) in table.moves.items():
        arrows.setdefault((state, after, effects), []).append(event.value)
    lines = ["stateDiagram-v2", f"    [*] --> {table.start.value}"]
    for (state, after, effects), events in arrows.items():
        if state is after:
            continue  # a refusal changes nothing: the text says it
        label = ", ".join(events)
        if effects:
            label += " / " + ", ".join(effect.value for effect in effects)
        lines.append(f"    {state.value} --> {after.value}: {label}")
    lines += sorted(f"    {state.value} --> [*]" for state in table.final)
    return "\n".join(lines)
