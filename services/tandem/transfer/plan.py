"""What a transfer moves and when: pure functions of a ticket, a sequence and how far it is computed."""

from __future__ import annotations

from typing import Protocol

from tandem.errors import InvalidRequest, LayoutMismatch, TicketRefused
from tandem.generation import SequenceSpec
from tandem.ids import BlockId
from tandem.kv.layout import KvLayout
from tandem.kv.ticket import POSITION_BITS, FinalWord, Hello, Ticket

PROTOCOL_VERSION = 1
"""Of the hand-off between workers: tickets, tags, checksums and the final word."""

_HEX_DIGITS = frozenset("0123456789abcdef")


class BlockMemory(Protocol):
    """The memory that blocks live in, as `kv.storage.KvStorage` has it."""

    @property
    def layout(self) -> KvLayout:
        """The shape of each block."""
        ...

    def block(self, block_id: BlockId) -> memoryview:
        """The bytes of one block, writable. No copy."""
        ...

    def checksum(self, block_id: BlockId) -> int:
        """XXH3-64 of one block's bytes. May run in any thread."""
        ...


def check_hello(hello: Hello, fingerprint: str) -> None:
    """Raise `LayoutMismatch` unless blocks can be exchanged with whoever says `hello` (P15)."""
    who = f"worker {hello.peer.worker_id}"
    if hello.protocol_version != PROTOCOL_VERSION:
        raise LayoutMismatch(
            f"{who} speaks version {hello.protocol_version} of the hand-off and this one "
            f"{PROTOCOL_VERSION}; run the same release on both"
        )
    if hello.layout_fingerprint != fingerprint:
        raise LayoutMismatch(
            f"{who} has KV layout {hello.layout_fingerprint!r} and this one {fingerprint!r}; "
            "give both the same model, weights, dtype and block size"
        )


def check_length(spec: SequenceSpec, layout: KvLayout) -> None:
    """Raise `InvalidRequest` for a sequence with more blocks than a tag can count."""
    num_blocks = layout.num_blocks_for(len(spec.token_ids))
    if num_blocks > 1 << POSITION_BITS:
        raise InvalidRequest(
            "token_ids", f"{num_blocks} blocks are more than one transfer can carry ({1 << POSITION_BITS})"
        )


def check_ticket(ticket: Ticket, spec: SequenceSpec, layout: KvLayout) -> None:
    """Raise `TicketRefused` or `LayoutMismatch` unless `ticket` asks for exactly what `spec` makes.

    The wanted blocks must be a tail of the sequence's, and the rest what the receiver has cached.
    """
    if ticket.layout_fingerprint != layout.fingerprint:
        raise LayoutMismatch(
            f"the ticket is for KV layout {ticket.layout_fingerprint!r} and this worker has "
            f"{layout.fingerprint!r}; give both the same model, weights, dtype and block size"
        )
    check_length(spec, layout)
    num_tokens = len(spec.token_ids)
    end = ticket.first_block + ticket.num_blocks
    for ok, problem in (
        (ticket.attempt_id == spec.attempt_id, f"is for attempt {ticket.attempt_id}, not {spec.attempt_id}"),
        (
            len(ticket.transfer_id) == 32 and _HEX_DIGITS.issuperset(ticket.transfer_id),
            "has a malformed id",
        ),
        (ticket.num_tokens == num_tokens, f"covers {ticket.num_tokens} tokens, not {num_tokens}"),
        (ticket.first_block >= 0 and ticket.num_blocks >= 0, "has negative block counts"),
        (end == layout.num_blocks_for(num_tokens), f"ends at block {end}, not where the sequence does"),
        (
            ticket.num_cached_tokens == ticket.first_block * layout.block_size_tokens,
            f"starts at block {ticket.first_block} though {ticket.num_cached_tokens} tokens are cached",
        ),
    ):
        if not ok:
            raise TicketRefused(f"the ticket {problem}; reserve anew and send again")


def check_word(word: FinalWord, ticket: Ticket) -> str | None:
    """What an OK word says otherwise than the ticket, in words; None when it agrees (P13)."""
    if word.num_tokens != ticket.num_tokens:
        return f"{word.num_tokens} tokens were sent and {ticket.num_tokens} promised"
    if len(word.checksums) != ticket.num_blocks:
        return f"{len(word.checksums)} blocks were sent and {ticket.num_blocks} promised"
    if word.first_token is None:
        return "the first token is missing"
    return None


def due_blocks(ticket: Ticket, next_position: int, num_computed_tokens: int, block_size_tokens: int) -> range:
    """Positions from `next_position` on whose KV is complete and wanted.

    Positions count from the start of the sequence, whatever either side has cached (P33). The last
    block is complete, though perhaps part full, when all tokens are computed.
    """
    end = ticket.first_block + ticket.num_blocks
    complete = end if num_computed_tokens >= ticket.num_tokens else num_computed_tokens // block_size_tokens
    return range(max(next_position, ticket.first_block), min(complete, end))
