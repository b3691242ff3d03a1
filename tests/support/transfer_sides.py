"""Two workers' ends of transfers: engines on the fakes, the reference transport, and seams to tamper with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import xxhash
from tests.support.engine_fakes import Rig

from tandem.engine.loop import EngineLoop
from tandem.engine.results import StepResult
from tandem.generation import SequenceOutput
from tandem.ids import AttemptId, BlockId, Epoch, WorkerId
from tandem.kv.layout import KvDtype, KvLayout
from tandem.kv.ticket import FinalWord, Hello, PeerAddress
from tandem.system import SystemClock, SystemIds
from tandem.transfer.receiver import Receiver
from tandem.transfer.sender import Sender
from tandem.transport.inproc import InprocTransport

LAYOUT = KvLayout("rev", 1, 1, 1, KvDtype.FLOAT32, 4)  # 32 bytes a block: 4 slots of int64


class SlotMemory:
    """The fake runner's slots as block memory."""

    layout = LAYOUT

    def __init__(self, slots: np.ndarray) -> None:
        self._bytes = memoryview(slots.view(np.uint8)).cast("B")

    def block(self, block_id: BlockId) -> memoryview:
        return self._bytes[block_id * 32 : block_id * 32 + 32]

    def checksum(self, block_id: BlockId) -> int:
        return xxhash.xxh3_64_intdigest(self.block(block_id))


class Side:
    """One worker with both ends; also serves as the transfer service of its peers."""

    def __init__(
        self,
        name: str,
        peers: Callable[[PeerAddress], Side],
        lease_s: float = 5.0,
        layout: KvLayout = LAYOUT,
        handshake_timeout_s: float = 5.0,
        **engine: int,
    ) -> None:
        self.rig = Rig(**engine)
        self.outputs: list[SequenceOutput] = []
        self.failures: list[tuple[AttemptId, Exception]] = []
        self.ended = asyncio.Event()
        self.words: list[FinalWord] = []
        self.hellos: list[Hello] = []
        self.greeted = asyncio.Event()
        self.told = asyncio.Semaphore(0)
        self.tamper: Callable[[FinalWord], FinalWord] = lambda word: word
        self.hold_handshake: asyncio.Event | None = None
        self.refuse_handshake: Exception | None = None
        self.forget_leases = False
        self.transport = InprocTransport()
        self.me = me = PeerAddress(WorkerId(name), Epoch(1), name, self.transport.address)
        memory, clock, fingerprint = SlotMemory(self.rig.runner.slots), SystemClock(), layout.fingerprint
        self.loop = EngineLoop(self.rig.engine, self.on_step)
        self.receiver = Receiver(
            self.loop, memory, self.transport, lambda: me, fingerprint=fingerprint, clock=clock,
            ids=SystemIds(), lease_s=lease_s, on_failed=self.on_failed,
        )  # fmt: skip
        self.sender = Sender(
            self.loop, memory, self.transport, lambda: me, fingerprint=fingerprint, clock=clock,
            peers=peers, handshake_timeout_s=handshake_timeout_s, send_timeout_s=5.0,
        )  # fmt: skip

    def on_step(self, result: StepResult) -> None:
        self.outputs.extend(result.outputs)
        if any(output.finish for output in result.outputs):
            self.ended.set()
        for progress in result.exports:
            self.sender.on_progress(progress)

    def on_failed(self, attempt_id: AttemptId, error: Exception) -> None:
        self.failures.append((attempt_id, error))
        self.ended.set()

    async def handshake(self, hello, context):
        self.hellos.append(hello)
        self.greeted.set()
        if self.hold_handshake is not None:
            await self.hold_handshake.wait()
        if self.refuse_handshake is not None:
            raise self.refuse_handshake
        return self.receiver.answer(hello)

    async def finish(self, word, context):
        self.words.append(word)
        self.told.release()
        await self.receiver.finish(self.tamper(word))

    async def renew(self, transfer_ids, context):
        return tuple(transfer_ids) if self.forget_leases else self.receiver.renew(transfer_ids)

    async def aclose(self) -> None:
        await self.sender.aclose()
        await self.receiver.aclose()
        await self.loop.stop()
        await self.transport.aclose()


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[Side, Side]]:
    """A sender's and a receiver's worker. At the end nothing may be left of anything (P6)."""
    sides: dict[str, Side] = {}
    p = sides["p"] = Side("p", lambda peer: sides[peer.control])
    d = sides["d"] = Side("d", lambda peer: sides[peer.control], **options)
    for side in (p, d):
        await side.loop.start()
    try:
        yield p, d
    finally:
        for side in (p, d):
            await side.aclose()
    for side in (p, d):
        assert side.sender.num_open == side.receiver.num_open == 0
        assert side.rig.engine.num_sequences == 0
