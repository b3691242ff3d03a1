"""The KV plane's nouns. A transport moves block bytes between two memories and nothing else.

A message is matched by a 64-bit tag on the receiving worker; receives are posted before the sender
learns the tag, so bytes land straight in the KV storage. After dask's comm layer, with tags.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from tandem.clock import Deadline

Buffer = object
"""Contiguous memory: a writable `memoryview`, or an object with an array interface (GPU)."""


class Receive(Protocol):
    """One posted receive. The transport may write into its buffer until `settled` is true."""

    @property
    def settled(self) -> bool:
        """True once no byte can be written any more, whatever the outcome."""
        ...

    async def wait(self) -> None:
        """Return when the bytes are there; raise `TransferFailed` if they never will be.

        Cancelling the awaiting task does not cancel the receive.
        """
        ...

    def cancel(self) -> None:
        """Ask the transport to give the buffer back. Idempotent; `settled` turns true soon after."""
        ...

    async def wait_settled(self) -> None:
        """Return when `settled` is true, whatever the outcome; never raises for a failed receive."""
        ...


class Endpoint(Protocol):
    """A one-way connection to one peer's transport."""

    @property
    def closed(self) -> bool:
        """True once the peer is known to be gone or `aclose` was called."""
        ...

    async def send(self, tag: int, data: Buffer) -> None:
        """Send `data`; return when it may be overwritten, which is no proof of its arrival.

        A message that finds no receive of its tag and size is dropped. A cancelled call returns once
        the send has ended, or the endpoint of a peer that hangs has been closed: that peer may then
        see other bytes, so it must never be told that they are right. Raises `PeerLost`.
        """
        ...

    async def aclose(self) -> None:
        """Fail what is in flight and free the connection. Idempotent."""
        ...


class Transport(Protocol):
    """One worker's end of the KV plane."""

    @property
    def name(self) -> str:
        """What moves the bytes, for spans and logs, e.g. ``ucx``."""
        ...

    @property
    def address(self) -> bytes:
        """What a peer passes to `connect`."""
        ...

    async def connect(self, address: bytes, deadline: Deadline) -> Endpoint:
        """Open an endpoint to the transport with that address, once it has answered. Raises `PeerLost`."""
        ...

    def post_receive(self, tag: int, into: Buffer) -> Receive:
        """Post a receive; bytes sent with `tag` land in `into`. The size must match exactly."""
        ...

    async def aclose(self) -> None:
        """Cancel every receive, close every endpoint, free all memory. Idempotent."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
