"""Receiver and sender against each other: two engines on the fakes, the reference transport."""

from __future__ import annotations

import asyncio

from tests.support.engine_fakes import make_spec, true_answer
from tests.support.transfer_sides import Side

from tandem.generation import CallContext, Phase


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
