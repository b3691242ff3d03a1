"""What every transport must do, asked of all of them: posted receives, exact sizes, clean ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest

from tandem.clock import Deadline
from tandem.errors import PeerLost, TransferFailed
from tandem.system import SystemClock
from tandem.transport.base import Endpoint, Transport
from tandem.transport.inproc import InprocTransport
from tandem.transport.ucx import UcxTransport

SOON = Deadline.after(SystemClock(), 3600.0)
BLOCK = 737_280
KINDS: dict[str, Callable[[], Transport]] = {"inproc": InprocTransport, "ucx": UcxTransport}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Callable[[], Transport]:
    return KINDS[request.param]


@pytest.fixture
async def pair(make: Callable[[], Transport]) -> AsyncIterator[tuple[Transport, Endpoint]]:
    """A receiving transport, and a sender's endpoint to it."""
    async with make() as receiver, make() as sender:
        yield receiver, await sender.connect(receiver.address, SOON)


def pattern(size: int, seed: int = 0) -> bytearray:
    return bytearray(random.Random(seed).randbytes(size))


@pytest.mark.parametrize("size", [1, 100, 8191, 8192, 65_536, BLOCK, 8 << 20])
async def test_bytes_land_in_the_posted_buffer(pair, size):
    receiver, endpoint = pair
    sent, landed = pattern(size), bytearray(size)
    receive = receiver.post_receive(7, memoryview(landed))
    await endpoint.send(7, memoryview(sent))
    await receive.wait()
    assert landed == sent
    assert receive.settled


async def test_tags_decide_not_the_order(pair):
    receiver, endpoint = pair
    landed = {tag: bytearray(1000) for tag in range(50)}
    receives = [receiver.post_receive(tag, memoryview(buffer)) for tag, buffer in landed.items()]
    order = list(landed)
    random.Random(1).shuffle(order)
    await asyncio.gather(*(endpoint.send(tag, memoryview(pattern(1000, tag))) for tag in order))
    await asyncio.gather(*(receive.wait() for receive in receives))
    assert all(buffer == pattern(1000, tag) for tag, buffer in landed.items())


async def test_all_64_bits_of_a_tag_count(pair):
    receiver, endpoint = pair
    tags = [2**64 - 1, 2**63, 2**20, 0]
    landed = [bytearray(100) for _ in tags]
    receives = [receiver.post_receive(tag, memoryview(b)) for tag, b in zip(tags, landed, strict=True)]
    for tag in tags:
        await endpoint.send(tag, memoryview(pattern(100, tag)))
    await asyncio.gather(*(receive.wait() for receive in receives))
    assert landed == [pattern(100, tag) for tag in tags]


async def test_many_large_messages_at_once(pair):
    receiver, endpoint = pair
    sent, landed = pattern(40 * BLOCK), bytearray(40 * BLOCK)

    def part(of: bytearray, at: int) -> memoryview:
        return memoryview(of)[at * BLOCK : (at + 1) * BLOCK]

    receives = [receiver.post_receive(at, part(landed, at)) for at in range(40)]
    await asyncio.gather(*(endpoint.send(at, part(sent, at)) for at in range(40)))
    await asyncio.gather(*(receive.wait() for receive in receives))
    assert landed == sent


@pytest.mark.parametrize("size", [99, 101, BLOCK])
@pytest.mark.parametrize("wanted", [100, BLOCK - 1])
async def test_p13_a_message_of_the_wrong_size_fails_and_writes_nothing(pair, size, wanted):
    receiver, endpoint = pair
    landed = bytearray(wanted)
    receive = receiver.post_receive(1, memoryview(landed))
    await endpoint.send(1, memoryview(pattern(size)))
    with pytest.raises(TransferFailed, match="bytes"):
        await receive.wait()
    assert receive.settled
    assert not any(landed)


async def test_p4_after_a_cancel_nothing_is_written_and_the_sender_is_not_held_up(pair):
    receiver, endpoint = pair
    landed = bytearray(BLOCK)
    receive = receiver.post_receive(1, memoryview(landed))
    receive.cancel()
    receive.cancel()
    await receive.wait_settled()
    with pytest.raises(TransferFailed):
        await receive.wait()
    await endpoint.send(1, memoryview(pattern(BLOCK)))
    assert not any(landed)


async def test_a_cancel_amid_the_message_settles_one_way_or_the_other(pair):
    receiver, endpoint = pair
    for turn in range(20):
        landed = bytearray(BLOCK)
        receive = receiver.post_receive(turn, memoryview(landed))
        sending = asyncio.ensure_future(endpoint.send(turn, memoryview(pattern(BLOCK, turn))))
        for _ in range(turn):
            await asyncio.sleep(0)
        receive.cancel()
        await receive.wait_settled()
        frozen = bytes(landed)
        await sending
        assert landed == frozen
        try:
            await receive.wait()
        except TransferFailed:
            continue
        assert landed == pattern(BLOCK, turn)


async def test_a_cancel_after_the_end_changes_nothing(pair):
    receiver, endpoint = pair
    landed = bytearray(100)
    receive = receiver.post_receive(1, memoryview(landed))
    await endpoint.send(1, memoryview(pattern(100)))
    await receive.wait()
    receive.cancel()
    await receive.wait()


async def test_a_waiter_that_is_cancelled_does_not_cancel_the_receive(pair):
    receiver, endpoint = pair
    landed = bytearray(100)
    receive = receiver.post_receive(1, memoryview(landed))
    waiter = asyncio.ensure_future(receive.wait())
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    await endpoint.send(1, memoryview(pattern(100)))
    await receive.wait()
    assert landed == pattern(100)


async def test_a_cancelled_send_returns_and_its_buffer_is_free(pair):
    receiver, endpoint = pair
    sent, landed = pattern(BLOCK), bytearray(BLOCK)
    receive = receiver.post_receive(1, memoryview(landed))
    sending = asyncio.ensure_future(endpoint.send(1, memoryview(sent)))
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    sent[:] = bytes(BLOCK)
    receive.cancel()
    await receive.wait_settled()
    assert bytes(landed) in (bytes(BLOCK), bytes(pattern(BLOCK)))


async def test_a_message_that_nobody_waits_for_is_dropped(pair):
    receiver, endpoint = pair
    await endpoint.send(5, memoryview(pattern(BLOCK)))
    landed = bytearray(100)
    receive = receiver.post_receive(6, memoryview(landed))
    await endpoint.send(6, memoryview(pattern(100)))
    await receive.wait()
    assert landed == pattern(100)


async def test_closing_a_transport_ends_its_receives(make):
    async with make() as transport:
        receive = transport.post_receive(1, memoryview(bytearray(10)))
    assert receive.settled
    with pytest.raises(TransferFailed, match="closed"):
        await receive.wait()
    await transport.aclose()
    with pytest.raises(PeerLost):
        transport.post_receive(2, memoryview(bytearray(10)))
    with pytest.raises(PeerLost):
        await transport.connect(transport.address, SOON)


async def test_a_closed_endpoint_refuses_and_a_new_one_works(pair, make):
    receiver, endpoint = pair
    landed = bytearray(10)
    first = receiver.post_receive(1, memoryview(landed))
    await endpoint.send(1, memoryview(pattern(10)))
    await first.wait()
    await endpoint.aclose()
    await endpoint.aclose()
    assert endpoint.closed
    with pytest.raises(PeerLost):
        await endpoint.send(1, memoryview(pattern(10)))
    async with make() as other:
        again = await other.connect(receiver.address, SOON)
        second = receiver.post_receive(2, memoryview(landed))
        await again.send(2, memoryview(pattern(10, 2)))
        await second.wait()
    assert landed == pattern(10, 2)


async def test_both_ways_and_to_itself(make):
    async with make() as a, make() as b:
        for source, target in ((a, b), (b, a), (a, a)):
            landed = bytearray(BLOCK)
            receive = target.post_receive(3, memoryview(landed))
            endpoint = await source.connect(target.address, SOON)
            await endpoint.send(3, memoryview(pattern(BLOCK)))
            await receive.wait()
            assert landed == pattern(BLOCK)


@pytest.mark.parametrize("address", [b"", b"nonsense", b"\x00" * 217])
async def test_nonsense_is_no_address(make, address):
    async with make() as transport:
        with pytest.raises(PeerLost):
            await transport.connect(address, SOON)
