"""A process at the other end of UCX. Run as a script; `Peer` starts it and talks to it by lines."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from types import TracebackType

from tandem.clock import Deadline
from tandem.system import SystemClock
from tandem.transport.ucx import UcxTransport


def pattern(size: int, seed: int) -> bytearray:
    """Random bytes, the same for the same seed in every process."""
    return bytearray(random.Random(seed).randbytes(size))


class Peer:
    """`async with Peer("receive", "4", "1000") as peer`: killed at the end, if it still runs."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments

    async def __aenter__(self) -> Peer:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.ucx_peer",
            *self._arguments,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.returncode is None:
            self.signal(signal.SIGKILL)
        await self._process.wait()

    async def line(self) -> str:
        """What it says next."""
        assert self._process.stdout is not None
        raw = await asyncio.wait_for(self._process.stdout.readline(), 30)
        assert raw, "the peer ended without a word"
        return raw.decode().strip()

    def signal(self, number: int) -> None:
        """Stop, continue or kill it."""
        self._process.send_signal(number)

    async def wait(self) -> int:
        """Its exit status."""
        return await asyncio.wait_for(self._process.wait(), 30)


async def _receive(num: int, size: int) -> None:
    async with UcxTransport() as transport:
        landed = [bytearray(size) for _ in range(num)]
        receives = [transport.post_receive(tag, memoryview(buffer)) for tag, buffer in enumerate(landed)]
        print(transport.address.hex(), flush=True)
        await asyncio.gather(*(receive.wait() for receive in receives))
        good = all(buffer == pattern(size, tag) for tag, buffer in enumerate(landed))
        print("good" if good else "bad", flush=True)


async def _send(address: bytes, num: int, size: int) -> None:
    async with UcxTransport() as transport:
        endpoint = await transport.connect(address, Deadline.after(SystemClock(), 10.0))
        messages = [pattern(size, tag) for tag in range(num)]
        print("sending", flush=True)
        await asyncio.gather(*(endpoint.send(tag, memoryview(data)) for tag, data in enumerate(messages)))
        print("sent", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["receive", num, size]:
            asyncio.run(_receive(int(num), int(size)))
        case ["send", address, num, size]:
            asyncio.run(_send(bytes.fromhex(address), int(num), int(size)))
