"""Identities. A client's own request id is shown, never used as a key."""

from __future__ import annotations

from typing import NewType, Protocol

AttemptId = NewType("AttemptId", str)
"""128 random bits in hex, drawn by the gateway for one try at one choice of one request."""

TransferId = NewType("TransferId", str)
"""128 random bits in hex, drawn by the receiving worker for one transfer; single use."""

WorkerId = NewType("WorkerId", str)
"""A worker's stable name, e.g. ``decode-0``. Survives a restart; its epoch does not."""

GatewayId = NewType("GatewayId", str)
"""One life of one gateway process."""

Epoch = NewType("Epoch", int)
"""One life of one worker: larger after every restart of the same worker id."""

BlockHash = NewType("BlockHash", bytes)
"""16 bytes: the hash chain up to and including one full block."""

BlockId = NewType("BlockId", int)
"""Index of a block in one worker's KV storage."""


class IdSource(Protocol):
    """Where random identities come from; injected, so that simulations replay."""

    def hex128(self) -> str:
        """32 lower-case hex digits, unguessable outside tests."""
        ...
