"""What every transport's posted receive has in common: a buffer, and one outcome."""

from __future__ import annotations

import asyncio

from tandem.errors import TransferFailed


class PostedReceive:
    """`Receive` but for `cancel`, which is the transport's own."""

    def __init__(self, into: memoryview) -> None:
        self.into = into
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def settled(self) -> bool:
        """See `Receive`."""
        return self._outcome.done()

    async def wait(self) -> None:
        """See `Receive`."""
        await asyncio.shield(self._outcome)

    async def wait_settled(self) -> None:
        """See `Receive`."""
        await asyncio.wait([self._outcome])

    def complete(self) -> None:
        """The bytes are there."""
        if not self._outcome.done():
            self._outcome.set_result(None)

    def fail(self, why: str) -> None:
        """The bytes will never be there, and nothing is written any more."""
        if not self._outcome.done():
            self._outcome.set_exception(TransferFailed(f"a receive {why}; send the blocks again"))
            self._outcome.exception()  # marks it as seen: perhaps nobody waits
