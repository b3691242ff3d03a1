"""The ticket: a receiver's promise of memory to one sender, and the sender's final word."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tandem.generation import TokenOutput
from tandem.ids import AttemptId, Epoch, TransferId, WorkerId

POSITION_BITS = 20


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """How to reach a worker: its control port (gRPC ``host:port``) and its KV endpoint."""

    worker_id: WorkerId
    epoch: Epoch
    control: str
    transport: bytes


@dataclass(frozen=True, slots=True)
class Ticket:
    """The receiver has reserved and posted blocks `[first_block, first_block + num_blocks)`.

    Positions count blocks of the sequence from 0, so a prefix hit on the receiver never shifts
    what the sender sends. `num_tokens` is how many tokens the blocks must cover when done.
    """

    transfer_id: TransferId
    attempt_id: AttemptId
    receiver: PeerAddress
    layout_fingerprint: str
    first_block: int
    num_blocks: int
    num_tokens: int
    num_cached_tokens: int
    lease_s: float

    def tag(self, position: int) -> int:
        """The 64-bit transport tag of the block at `position` of the sequence."""
        return (int(self.transfer_id[:11], 16) << POSITION_BITS) | position


class TransferOutcome(Enum):
    """How a sender ended."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class FinalWord:
    """The sender's last message about a transfer; after it no byte of it is written any more.

    With OK: `checksums[i]` is XXH3-64 of block `first_block + i`, `num_tokens` what was computed,
    `first_token` what the sender sampled, `busy_s` how long blocks were on their way.
    """

    transfer_id: TransferId
    attempt_id: AttemptId
    receiver_epoch: Epoch
    outcome: TransferOutcome
    num_tokens: int = 0
    checksums: tuple[int, ...] = ()
    first_token: TokenOutput | None = None
    detail: str = ""
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Hello:
    """What two workers tell each other before any transfer; a mismatch is refused."""

    protocol_version: int
    peer: PeerAddress
    layout_fingerprint: str
