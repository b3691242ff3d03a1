"""Load that this router has sent out and not yet seen end: booked at route time, settled once."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import InternalError
from tandem.ids import AttemptId, WorkerId


@dataclass(frozen=True, slots=True)
class Booking:
    """What one attempt asks of its workers. `prefill` is who computes the prompt: it may be `decode`."""

    attempt_id: AttemptId
    decode: WorkerId
    prefill: WorkerId
    num_prefill_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class BookedLoad:
    """The open bookings of one worker, summed up."""

    num_sequences: int = 0
    num_prefill_tokens: int = 0
    num_blocks: int = 0


@dataclass(slots=True)
class _Open:
    booking: Booking
    prompt_pending: bool = True


class LoadBook:
    """Mutable; holds exactly the open attempts. Settling all of them brings every sum back to zero."""

    def __init__(self) -> None:
        self._open: dict[AttemptId, _Open] = {}
        self._loads: dict[WorkerId, BookedLoad] = {}

    @property
    def num_open(self) -> int:
        """Attempts booked and not settled."""
        return len(self._open)

    def load_of(self, worker_id: WorkerId) -> BookedLoad:
        """What is booked on this worker; zeros if nothing is."""
        return self._loads.get(worker_id, BookedLoad())

    def book(self, booking: Booking) -> None:
        """Add an attempt to both its workers. Raises `InternalError` if the attempt is open already."""
        if booking.attempt_id in self._open:
            raise InternalError(f"attempt {booking.attempt_id} is already booked; draw a new attempt id")
        if booking.num_prefill_tokens < 0 or booking.num_blocks < 0:
            raise InternalError(f"attempt {booking.attempt_id} would book a negative load: {booking}")
        self._open[booking.attempt_id] = _Open(booking)
        self._add(booking.decode, 1, 0, booking.num_blocks)
        self._add(booking.prefill, 0, booking.num_prefill_tokens, 0)

    def prompt_done(self, attempt_id: AttemptId) -> None:
        """The prompt is computed: take its tokens off. No-op when done before, settled or unknown."""
        entry = self._open.get(attempt_id)
        if entry is not None and entry.prompt_pending:
            entry.prompt_pending = False
            self._add(entry.booking.prefill, 0, -entry.booking.num_prefill_tokens, 0)

    def settle(self, attempt_id: AttemptId) -> bool:
        """The attempt has ended, however: take all of it off. False when settled before or unknown."""
        self.prompt_done(attempt_id)
        entry = self._open.pop(attempt_id, None)
        if entry is None:
            return False
        self._add(entry.booking.decode, -1, 0, -entry.booking.num_blocks)
        return True

    def _add(self, worker_id: WorkerId, sequences: int, prefill_tokens: int, blocks: int) -> None:
        old = self.load_of(worker_id)
        new = BookedLoad(
            old.num_sequences + sequences,
            old.num_prefill_tokens + prefill_tokens,
            old.num_blocks + blocks,
        )
        if new == BookedLoad():
            self._loads.pop(worker_id, None)
        else:
            self._loads[worker_id] = new
