"""The receiving end: nothing wrong is admitted, nothing is freed early, nothing is kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.support.engine_fakes import make_spec, true_answer
from tests.support.transfer_sides import LAYOUT, pair

from tandem.errors import Cancelled, LayoutMismatch, TicketRefused
from tandem.generation import CallContext
from tandem.ids import Epoch, TransferId
from tandem.kv.ticket import FinalWord, Hello, TransferOutcome
from tandem.transfer.plan import PROTOCOL_VERSION

A, B = "a" * 32, "b" * 32
PROMPT = list(range(1, 23))
CONTEXT = CallContext()


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (lambda w: replace(w, checksums=(w.checksums[0] ^ 1, *w.checksums[1:])), "checksum of block 0"),
        (lambda w: replace(w, checksums=(*w.checksums[:-1], w.checksums[-1] ^ 1)), "checksum of block 5"),
        (lambda w: replace(w, checksums=w.checksums[:-1]), "5 blocks were sent and 6 promised"),
        (lambda w: replace(w, num_tokens=21), "21 tokens were sent and 22 promised"),
        (lambda w: replace(w, first_token=None), "first token is missing"),
        (lambda w: replace(w, outcome=TransferOutcome.FAILED, detail="disk on fire"), "disk on fire"),
        (lambda w: replace(w, outcome=TransferOutcome.CANCELLED), "told to stop"),
    ],
)
async def test_p13_a_transfer_that_is_not_right_becomes_no_token(tamper, says):
    async with pair() as (p, d):
        d.tamper = tamper
        spec = make_spec(A, PROMPT)
        await p.sender.send(spec, await d.receiver.open(spec), CONTEXT)
        await asyncio.wait_for(d.ended.wait(), 10)
        assert [attempt for attempt, _ in d.failures] == [A]
        assert says in str(d.failures[0][1])
        assert d.outputs == []
        # The blocks it would have shared are not in the prefix cache.
        again = await d.receiver.open(make_spec(B, PROMPT))
        assert again.num_cached_tokens == 0
        await d.receiver.cancel(B)


@pytest.mark.parametrize(
    "change",
    [{"receiver_epoch": Epoch(9)}, {"attempt_id": B}, {"transfer_id": TransferId("f" * 32)}],
    ids=str,
)
async def test_p3_a_word_that_is_not_this_tickets_is_refused_and_harms_nothing(change):
    async with pair() as (p, d):
        spec = make_spec(A, PROMPT)
        ticket = await d.receiver.open(spec)
        word = FinalWord(ticket.transfer_id, ticket.attempt_id, Epoch(1), TransferOutcome.FAILED)
        with pytest.raises(TicketRefused):
            await d.receiver.finish(replace(word, **change))
        result = await p.sender.send(spec, ticket, CONTEXT)
        await asyncio.wait_for(d.ended.wait(), 10)
        tokens = [result.first_token, *(token for output in d.outputs for token in output.tokens)]
        assert [token.token_id for token in tokens] == true_answer(PROMPT, 4)


async def test_p3_a_ticket_is_used_once():
    async with pair() as (p, d):
        spec = make_spec(A, PROMPT)
        await p.sender.send(spec, await d.receiver.open(spec), CONTEXT)
        await asyncio.wait_for(d.ended.wait(), 10)
        with pytest.raises(TicketRefused):
            await d.receiver.finish(d.words[0])


async def test_p15_a_hello_from_another_layout_or_release_is_refused():
    async with pair() as (p, d):
        hello = Hello(PROTOCOL_VERSION, p.me, LAYOUT.fingerprint)
        assert d.receiver.answer(hello).peer == d.me
        with pytest.raises(LayoutMismatch, match="same model"):
            d.receiver.answer(replace(hello, layout_fingerprint="0" * 16))
        with pytest.raises(LayoutMismatch, match="same release"):
            d.receiver.answer(replace(hello, protocol_version=PROTOCOL_VERSION + 1))


async def test_p36_an_unknown_lease_is_told_and_a_known_one_lives_on_while_renewed():
    async with pair(lease_s=0.3) as (_, d):
        ticket = await d.receiver.open(make_spec(A, PROMPT))
        for _ in range(6):
            await asyncio.sleep(0.1)  # time is what a lease is about
            assert d.receiver.renew([ticket.transfer_id, TransferId("f" * 32)]) == ("f" * 32,)
        assert d.failures == []
        await asyncio.wait_for(d.ended.wait(), 10)
        assert d.receiver.renew([ticket.transfer_id]) == (ticket.transfer_id,)


async def test_p2_cancelling_twice_or_nothing_is_a_no_op():
    async with pair() as (_, d):
        await d.receiver.open(make_spec(A, PROMPT))
        for attempt in (A, A, B):
            await d.receiver.cancel(attempt)
        assert d.failures == []


async def test_p1_one_that_waits_for_blocks_can_be_cancelled_or_abandoned():
    async with pair(num_blocks=6) as (_, d):
        await d.receiver.open(make_spec(A, PROMPT))
        told = asyncio.ensure_future(d.receiver.open(make_spec(B, PROMPT)))
        left = asyncio.ensure_future(d.receiver.open(make_spec("c" * 32, PROMPT)))
        while d.loop.load().num_waiting < 2:
            await d.loop.flush()
        await d.receiver.cancel(B)
        with pytest.raises(Cancelled):
            await told
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert d.receiver.num_open == 1


async def test_p33_blocks_that_are_cached_here_are_not_sent_and_shift_nothing():
    async with pair() as (p, d):
        for attempt, prompt in ((A, PROMPT), (B, [*PROMPT[:17], 90, 91, 92, 93, 94, 95, 96])):
            spec = make_spec(attempt, prompt)
            ticket = await d.receiver.open(spec)
            d.ended.clear()
            d.outputs.clear()
            result = await p.sender.send(spec, ticket, CONTEXT)
            await asyncio.wait_for(d.ended.wait(), 10)
            tokens = [result.first_token, *(token for output in d.outputs for token in output.tokens)]
            assert [token.token_id for token in tokens] == true_answer(prompt, 4)
        assert (ticket.first_block, ticket.num_blocks) == (4, 2)
        assert len(d.words[-1].checksums) == 2
