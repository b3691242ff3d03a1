"""Receiver and sender against each other: two engines on the fakes, the reference transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import xxhash
from tests.support.engine_fakes import Rig, make_spec, true_answer

from tandem.engine.loop import EngineLoop
from tandem.engine.results import StepResult
from tandem.generation import CallContext, Phase, SequenceOutput
from tandem.ids import AttemptId, BlockId, Epoch, WorkerId
from tandem.kv.layout import KvDtype, KvLayout
from tandem.kv.ticket import PeerAddress
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

    def __init__(self, name: str, peers: Callable[[PeerAddress], Side], lease_s: float = 5.0) -> None:
        self.rig = Rig()
        self.outputs: list[SequenceOutput] = []
        self.failures: list[tuple[AttemptId, Exception]] = []
        self.ended = asyncio.Event()
        self.transport = InprocTransport()
        me = PeerAddress(WorkerId(name), Epoch(1), name, self.transport.address)
        memory, clock, fingerprint = SlotMemory(self.rig.runner.slots), SystemClock(), LAYOUT.fingerprint
        self.loop = EngineLoop(self.rig.engine, self.on_step)
        self.receiver = Receiver(
            self.loop, memory, self.transport, lambda: me, fingerprint=fingerprint, clock=clock,
            ids=SystemIds(), lease_s=lease_s, on_failed=self.on_failed,
        )  # fmt: skip
        self.sender = Sender(
            self.loop, memory, self.transport, lambda: me, fingerprint=fingerprint, clock=clock,
            peers=peers, handshake_timeout_s=5.0, send_timeout_s=5.0,
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
        return self.receiver.answer(hello)

    async def finish(self, word, context):
        await self.receiver.finish(word)

    async def renew(self, transfer_ids, context):
        return self.receiver.renew(transfer_ids)

    async def aclose(self) -> None:
        await self.sender.aclose()
        await self.receiver.aclose()
        await self.loop.stop()
        await self.transport.aclose()


async def test_p13_prompt_computed_there_decodes_here_as_if_alone() -> None:
    sides: dict[str, Side] = {}
    p, d = (sides.setdefault(name, Side(name, lambda peer: sides[peer.control])) for name in "pd")
    for side in (p, d):
        await side.loop.start()
    spec = make_spec("a" * 32, list(range(1, 23)))
    ticket = await d.receiver.open(spec)
    result = await p.sender.send(spec, ticket, CallContext())
    await asyncio.wait_for(d.ended.wait(), 10)
    told = [result.first_token, *(token for output in d.outputs for token in output.tokens)]
    assert not d.failures
    assert [token.token_id for token in told] == true_answer(spec.token_ids, 4)
    assert [timing.phase for timing in d.outputs[-1].phases] == [Phase.QUEUE, Phase.TRANSFER, Phase.DECODE]
    for side in (p, d):
        await side.aclose()
        assert side.sender.num_open == side.receiver.num_open == 0
        assert side.loop.load().num_free_blocks == 32


async def test_p5_silent_sender_loses_its_lease_without_traffic() -> None:
    d = Side("d", lambda peer: d, lease_s=0.05)
    await d.loop.start()
    await d.receiver.open(make_spec("b" * 32, list(range(9))))
    await asyncio.wait_for(d.ended.wait(), 10)
    await d.aclose()
    assert [attempt for attempt, _ in d.failures] == ["b" * 32]
    assert d.receiver.num_open == 0
    assert d.rig.engine.num_sequences == 0


async def test_p1_cancel_after_reserve_frees_at_once_and_refuses_the_sender() -> None:
    sides: dict[str, Side] = {}
    p, d = (sides.setdefault(name, Side(name, lambda peer: sides[peer.control])) for name in "pd")
    for side in (p, d):
        await side.loop.start()
    spec = make_spec("c" * 32, list(range(1, 23)))
    ticket = await d.receiver.open(spec)
    await d.receiver.cancel(spec.attempt_id)
    await d.receiver.cancel(spec.attempt_id)
    sending = asyncio.create_task(p.sender.send(spec, ticket, CallContext()))
    await asyncio.wait([sending], timeout=10)
    await p.sender.cancel(spec.attempt_id)
    for side in (p, d):
        await side.aclose()
        assert side.sender.num_open == side.receiver.num_open == 0
        assert side.rig.engine.num_sequences == 0
    assert not d.failures
    assert not d.outputs
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
