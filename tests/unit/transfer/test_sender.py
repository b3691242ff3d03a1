"""The sending end: one greeting a peer, one final word a transfer, and blocks that come back."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
from tests.support.engine_fakes import make_spec
from tests.support.transfer_sides import LAYOUT, Side, pair

from tandem.errors import LayoutMismatch, PeerLost, TicketRefused, TransferFailed
from tandem.generation import CallContext
from tandem.ids import Epoch
from tandem.kv.ticket import TransferOutcome
from tandem.transport.inproc import InprocEndpoint

A, B = "a" * 32, "b" * 32
PROMPT = list(range(1, 23))
CONTEXT = CallContext()


async def told(d: Side, num_words: int = 1) -> None:
    """Return once so many final words have come."""
    async with asyncio.timeout(10):
        for _ in range(num_words):
            await d.told.acquire()


async def test_p35_all_who_send_to_one_peer_share_one_greeting():
    async with pair() as (p, d):
        specs = [make_spec(f"{n:032x}", [n + 1, *PROMPT[:8]]) for n in range(5)]
        tickets = [await d.receiver.open(spec) for spec in specs]
        d.hold_handshake = asyncio.Event()
        sends = [
            asyncio.ensure_future(p.sender.send(s, t, CONTEXT)) for s, t in zip(specs, tickets, strict=True)
        ]
        await asyncio.wait_for(d.greeted.wait(), 10)
        d.hold_handshake.set()
        await asyncio.gather(*sends)
        assert len(d.hellos) == 1
        await told(d, 5)


async def test_p35_a_peer_that_hangs_in_the_greeting_delays_no_other_and_is_bounded():
    sides: dict[str, Side] = {}
    p = sides["p"] = Side("p", lambda peer: sides[peer.control], handshake_timeout_s=0.2)
    hung = sides["hung"] = Side("hung", lambda peer: sides[peer.control])
    well = sides["well"] = Side("well", lambda peer: sides[peer.control])
    for side in sides.values():
        await side.loop.start()
    hung.hold_handshake = asyncio.Event()
    first, second = make_spec(A, PROMPT), make_spec(B, PROMPT)
    stuck = asyncio.ensure_future(p.sender.send(first, await hung.receiver.open(first), CONTEXT))
    await p.sender.send(second, await well.receiver.open(second), CONTEXT)
    with pytest.raises(PeerLost, match="hung did not answer"):
        await stuck
    for side in sides.values():
        await side.aclose()
        assert side.sender.num_open == side.receiver.num_open == 0
        assert side.rig.engine.num_sequences == 0


async def test_a_greeting_that_failed_is_tried_anew_by_the_next():
    async with pair() as (p, d):
        d.refuse_handshake = PeerLost("starting")
        spec = make_spec(A, PROMPT)
        with pytest.raises(PeerLost):
            await p.sender.send(spec, await d.receiver.open(spec), CONTEXT)
        d.refuse_handshake = None
        spec = make_spec(B, PROMPT)
        await p.sender.send(spec, await d.receiver.open(spec), CONTEXT)
        assert len(d.hellos) == 2
        await told(d, 2)


async def test_p15_a_peer_with_another_layout_gets_nothing_and_both_are_free():
    other = replace(LAYOUT, model_revision="other")
    async with pair(layout=other) as (p, d):
        spec = make_spec(A, PROMPT)
        ticket = await d.receiver.open(spec)
        with pytest.raises(LayoutMismatch):
            await p.sender.send(spec, ticket, CONTEXT)
        with pytest.raises(LayoutMismatch):
            await p.sender.send(
                replace(spec, attempt_id=B),
                replace(ticket, attempt_id=B, layout_fingerprint=LAYOUT.fingerprint),
                CONTEXT,
            )
        assert p.rig.runner.batches == []
        await d.receiver.cancel(A)


@pytest.mark.parametrize(
    "change",
    [{"num_tokens": 21}, {"num_blocks": 5}, {"first_block": 1}, {"attempt_id": B}, {"transfer_id": "short"}],
    ids=str,
)
async def test_p3_a_ticket_that_asks_for_something_else_is_refused(change):
    async with pair() as (p, d):
        spec = make_spec(A, PROMPT)
        ticket = await d.receiver.open(spec)
        with pytest.raises(TicketRefused):
            await p.sender.send(spec, replace(ticket, **change), CONTEXT)
        await d.receiver.cancel(A)


async def test_p9_another_life_of_the_peer_is_not_taken_for_the_one_that_promised():
    async with pair() as (p, d):
        spec = make_spec(A, PROMPT)
        ticket = await d.receiver.open(spec)
        stale = replace(ticket, receiver=replace(ticket.receiver, epoch=Epoch(7)))
        with pytest.raises(TicketRefused, match="epoch 7"):
            await p.sender.send(spec, stale, CONTEXT)
        await d.receiver.cancel(A)


async def test_p34_one_final_word_when_all_is_well():
    async with pair() as (p, d):
        spec = make_spec(A, PROMPT)
        await p.sender.send(spec, await d.receiver.open(spec), CONTEXT)
        await asyncio.wait_for(d.ended.wait(), 10)
    assert [word.outcome for word in d.words] == [TransferOutcome.OK]
    assert d.words[0].busy_s > 0


async def test_p34_one_final_word_when_the_model_fails():
    async with pair() as (p, d):
        p.rig.runner.fail_next = MemoryError()
        spec = make_spec(A, PROMPT)
        with pytest.raises(TransferFailed, match="could not be computed"):
            await p.sender.send(spec, await d.receiver.open(spec), CONTEXT)
        await asyncio.wait_for(d.ended.wait(), 10)
    assert [word.outcome for word in d.words] == [TransferOutcome.FAILED]
    assert d.failures


async def test_p34_one_final_word_when_a_send_fails(monkeypatch):
    async def torn(self, tag, data):
        raise PeerLost("the wire is cut")

    monkeypatch.setattr(InprocEndpoint, "send", torn)
    async with pair() as (p, d):
        spec = make_spec(A, PROMPT)
        with suppress(PeerLost):  # before the first token it is the caller's answer
            await p.sender.send(spec, await d.receiver.open(spec), CONTEXT)
        await asyncio.wait_for(d.ended.wait(), 10)
    assert [(word.outcome, word.detail) for word in d.words] == [(TransferOutcome.FAILED, "the wire is cut")]


async def test_p34_one_final_word_when_cancelled_amid_the_sending(monkeypatch):
    entered = asyncio.Event()

    async def hang(self, tag, data):
        entered.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(InprocEndpoint, "send", hang)
    async with pair() as (p, d):
        spec = make_spec(A, PROMPT)
        await p.sender.send(spec, await d.receiver.open(spec), CONTEXT)
        await asyncio.wait_for(entered.wait(), 10)
        await p.sender.cancel(A)
        await p.sender.cancel(A)
        await asyncio.wait_for(d.ended.wait(), 10)
    assert [word.outcome for word in d.words] == [TransferOutcome.CANCELLED]


async def test_p36_a_ticket_that_the_receiver_forgot_is_given_up(monkeypatch):
    async def hang(self, tag, data):
        await asyncio.Event().wait()

    monkeypatch.setattr(InprocEndpoint, "send", hang)
    async with pair(lease_s=0.15) as (p, d):
        d.forget_leases = True
        spec = make_spec(A, PROMPT)
        await p.sender.send(spec, await d.receiver.open(spec), CONTEXT)
        await told(d)
    assert d.words[0].outcome is TransferOutcome.FAILED
    assert "does not know" in d.words[0].detail


async def test_p3_a_receiver_that_gave_up_frees_the_sender_at_once():
    async with pair() as (p, d):
        spec = make_spec(A, PROMPT)
        ticket = await d.receiver.open(spec)
        await d.receiver.cancel(A)
        await p.sender.send(spec, ticket, CONTEXT)  # its bytes are dropped, its word is refused
        await told(d)
        await p.loop.flush()
        assert p.rig.engine.num_sequences == 0


async def test_closing_amid_everything_leaves_nothing(monkeypatch):
    async def hang(self, tag, data):
        await asyncio.Event().wait()

    monkeypatch.setattr(InprocEndpoint, "send", hang)
    async with pair() as (p, d):
        for n in range(4):
            spec = make_spec(f"{n:032x}", [n + 1, *PROMPT[:8]])
            await p.sender.send(spec, await d.receiver.open(spec), CONTEXT)
        assert p.sender.num_open == d.receiver.num_open == 4
