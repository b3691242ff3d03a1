"""UCX between processes: what a killed, a frozen and an idle one do to the others."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from tests.support.ucx_peer import Peer, pattern

from tandem.clock import Deadline
from tandem.errors import ConfigError, PeerLost
from tandem.system import SystemClock
from tandem.transport import ucx
from tandem.transport.ucx import UcxTransport

SOON = Deadline.after(SystemClock(), 3600.0)
BLOCK = 737_280


async def test_blocks_cross_from_another_process():
    async with UcxTransport() as transport:
        landed = [bytearray(BLOCK) for _ in range(8)]
        receives = [transport.post_receive(tag, memoryview(buffer)) for tag, buffer in enumerate(landed)]
        async with Peer("send", transport.address.hex(), "8", str(BLOCK)) as peer:
            await asyncio.gather(*(receive.wait() for receive in receives))
            assert [await peer.line(), await peer.line()] == ["sending", "sent"]
            assert await peer.wait() == 0
        assert landed == [pattern(BLOCK, tag) for tag in range(8)]


async def test_blocks_cross_to_another_process():
    async with UcxTransport() as transport, Peer("receive", "8", str(BLOCK)) as peer:
        endpoint = await transport.connect(bytes.fromhex(await peer.line()), SOON)
        messages = [pattern(BLOCK, tag) for tag in range(8)]
        await asyncio.gather(*(endpoint.send(tag, memoryview(data)) for tag, data in enumerate(messages)))
        assert await peer.line() == "good"
        assert await peer.wait() == 0


async def test_p7_a_killed_receiver_is_lost_within_seconds():
    async with UcxTransport() as transport, Peer("receive", "8", str(BLOCK)) as peer:
        endpoint = await transport.connect(bytes.fromhex(await peer.line()), SOON)
        peer.signal(signal.SIGSTOP)  # so that the sends are still under way when it dies
        sends = [
            asyncio.ensure_future(endpoint.send(tag, memoryview(pattern(BLOCK, tag)))) for tag in range(8)
        ]
        await asyncio.sleep(0)
        peer.signal(signal.SIGKILL)
        outcomes = await asyncio.wait_for(asyncio.gather(*sends, return_exceptions=True), 10)
        assert {type(outcome) for outcome in outcomes} == {PeerLost}
        assert endpoint.closed
        with pytest.raises(PeerLost):
            await endpoint.send(1, memoryview(bytearray(10)))


async def test_p8_a_frozen_receiver_holds_up_neither_a_cancel_nor_another_peer():
    async with (
        UcxTransport() as transport,
        Peer("receive", "1", str(BLOCK)) as frozen,
        Peer("receive", "1", str(BLOCK)) as healthy,
    ):
        to_frozen = await transport.connect(bytes.fromhex(await frozen.line()), SOON)
        to_healthy = await transport.connect(bytes.fromhex(await healthy.line()), SOON)
        frozen.signal(signal.SIGSTOP)
        data = pattern(BLOCK, 0)
        stuck = asyncio.ensure_future(to_frozen.send(0, memoryview(data)))
        await asyncio.wait_for(to_healthy.send(0, memoryview(data)), 5)
        assert await healthy.line() == "good"
        assert not stuck.done()
        stuck.cancel()
        await asyncio.wait_for(asyncio.gather(stuck, return_exceptions=True), 10)
        assert to_frozen.closed


async def test_p34_once_a_cancelled_receive_has_settled_a_frozen_sender_can_write_no_more():
    async with UcxTransport() as transport:
        landed = [bytearray(BLOCK) for _ in range(64)]
        receives = [transport.post_receive(tag, memoryview(buffer)) for tag, buffer in enumerate(landed)]
        async with Peer("send", transport.address.hex(), "64", str(BLOCK)) as peer:
            assert await peer.line() == "sending"
            peer.signal(signal.SIGSTOP)  # some of its messages are here, some are not
            for receive in receives:
                receive.cancel()
            settled = [tag for tag, receive in enumerate(receives) if receive.settled]
            assert settled
            frozen = {tag: bytes(landed[tag]) for tag in settled}
            peer.signal(signal.SIGCONT)
            assert await peer.line() == "sent"
            await asyncio.wait_for(asyncio.gather(*(r.wait_settled() for r in receives)), 10)
            assert all(bytes(landed[tag]) == before for tag, before in frozen.items())


async def test_p34_a_sender_that_dies_amid_a_message_settles_the_receive():
    async with UcxTransport() as transport:
        landed = [bytearray(8 << 20) for _ in range(16)]
        receives = [transport.post_receive(tag, memoryview(buffer)) for tag, buffer in enumerate(landed)]
        async with Peer("send", transport.address.hex(), "16", str(8 << 20)) as peer:
            await receives[0].wait()
            peer.signal(signal.SIGKILL)
            await peer.wait()
        for receive in receives:
            receive.cancel()
        await asyncio.wait_for(asyncio.gather(*(receive.wait_settled() for receive in receives)), 10)


async def test_an_idle_transport_uses_no_cpu():
    async with UcxTransport() as transport:
        transport.post_receive(1, memoryview(bytearray(10)))
        await asyncio.sleep(0.1)
        before = time.process_time()
        await asyncio.sleep(1.0)
        assert time.process_time() - before < 0.2  # a busy loop would take the whole second


def test_without_the_library_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ucxx._lib", None)
    with pytest.raises(ConfigError, match="pip install ucxx-cu12"):
        ucx._load()
