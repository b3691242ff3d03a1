import asyncio

import pytest

from tandem.errors import Refused
from tandem.generation import SequenceOutput, TokenOutput
from tandem.ids import AttemptId, GatewayId
from tandem.request import FinishReason
from tandem.worker.attachments import Attachments

A, B = AttemptId("a"), AttemptId("b")
GATEWAY, OTHER = GatewayId("g"), GatewayId("h")


def said(attempt_id: AttemptId, *tokens: int, finish: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(attempt_id, tuple(map(TokenOutput, tokens)), finish)


async def test_outputs_go_to_the_gateway_that_asked():
    attachments = Attachments()
    mine, theirs = attachments.open(GATEWAY).messages(), attachments.open(OTHER).messages()
    attachments.register(A, GATEWAY)
    attachments.register(B, OTHER)
    attachments.deliver(said(A, 1))
    attachments.deliver(said(B, 2))
    assert await anext(mine) == (said(A, 1),)
    assert await anext(theirs) == (said(B, 2),)


async def test_p32_what_a_slow_reader_misses_is_merged_and_nothing_is_lost():
    attachments = Attachments()
    messages = attachments.open(GATEWAY).messages()
    attachments.register(A, GATEWAY)
    attachments.register(B, GATEWAY)
    for token in range(1000):
        attachments.deliver(said(A, token))
        attachments.deliver(said(B, token))
    attachments.deliver(said(A, 1000, finish=FinishReason.LENGTH))
    first, second = await anext(messages)
    assert [token.token_id for token in first.tokens] == list(range(1001))
    assert first.finish is FinishReason.LENGTH
    assert [token.token_id for token in second.tokens] == list(range(1000))
    assert attachments.num_attempts == 1


async def test_a_reader_waits_without_polling_and_wakes():
    attachments = Attachments()
    reader = asyncio.ensure_future(anext(attachments.open(GATEWAY).messages()))
    await asyncio.sleep(0)
    assert not reader.done()
    attachments.register(A, GATEWAY)
    attachments.deliver(said(A, 7))
    assert await reader == (said(A, 7),)


def test_work_without_a_stream_and_ids_in_use_are_refused():
    attachments = Attachments()
    with pytest.raises(Refused, match="attach"):
        attachments.register(A, GATEWAY)
    attachments.open(GATEWAY)
    attachments.register(A, GATEWAY)
    with pytest.raises(Refused, match="new id"):
        attachments.register(A, GATEWAY)


def test_closing_names_exactly_the_attempts_that_lose_their_reader():
    attachments = Attachments()
    attachment = attachments.open(GATEWAY)
    attachments.open(OTHER)
    attachments.register(A, GATEWAY)
    attachments.register(B, OTHER)
    attachments.register(AttemptId("ended"), GATEWAY)
    attachments.deliver(said(AttemptId("ended"), finish=FinishReason.STOP))
    assert attachments.close(GATEWAY, attachment) == {A}
    with pytest.raises(Refused):
        attachments.register(AttemptId("c"), GATEWAY)


async def test_a_second_stream_of_a_gateway_ends_the_first_and_keeps_its_own_attempts():
    attachments = Attachments()
    first = attachments.open(GATEWAY)
    attachments.register(A, GATEWAY)
    second = attachments.open(GATEWAY)
    attachments.register(B, GATEWAY)
    assert [message async for message in first.messages()] == []
    assert attachments.close(GATEWAY, first) == {A}
    attachments.deliver(said(B, 1))
    assert await anext(second.messages()) == (said(B, 1),)


def test_p2_forgetting_twice_and_late_outputs_are_no_ops():
    attachments = Attachments()
    attachments.open(GATEWAY)
    attachments.register(A, GATEWAY)
    attachments.forget(A)
    attachments.forget(A)
    attachments.deliver(said(A, 1))
    assert attachments.num_attempts == 0
