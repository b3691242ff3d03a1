import asyncio

import pytest
from tests.support.engine_fakes import make_spec
from tests.support.scripted_worker import ScriptedPeers, ScriptedWorker, output, record_of

from tandem.directory.base import Role
from tandem.errors import Draining, PeerLost
from tandem.gateway.links import Inbox, WorkerLinks
from tandem.generation import SequenceOutput, TokenOutput
from tandem.ids import AttemptId, GatewayId
from tandem.request import FinishReason

SPEC = make_spec("a", (1, 2, 3))
DECODE = record_of("decode-0", Role.DECODE)


@pytest.fixture
def worker() -> ScriptedWorker:
    return ScriptedWorker(DECODE)


@pytest.fixture
async def links(worker):
    links = WorkerLinks(GatewayId("g"), ScriptedPeers(worker))
    yield links
    await links.aclose()


async def test_outputs_reach_the_attempt_that_listens(links, worker):
    link = links.link(DECODE)
    await link.wait_attached()
    with link.listen(SPEC.attempt_id) as inbox:
        worker.say(output(SPEC, 5))
        worker.say(SequenceOutput(AttemptId("unknown"), (TokenOutput(9),)))
        assert await inbox.get() == output(SPEC, 5)
    assert links.num_listening == 0


async def test_p11_a_burst_of_first_requests_opens_one_stream(links, worker):
    await asyncio.gather(*(links.link(DECODE).wait_attached() for _ in range(50)))
    assert worker.num_streams == 1


async def test_a_lost_stream_fails_those_who_listen_and_the_next_request_opens_a_new_one(links, worker):
    link = links.link(DECODE)
    await link.wait_attached()
    with link.listen(SPEC.attempt_id) as inbox:
        worker.say(PeerLost("connection reset"))
        with pytest.raises(PeerLost, match="decode-0 is lost: connection reset"):
            await inbox.get()
    again = links.link(DECODE)
    assert again is not link
    await again.wait_attached()
    assert worker.num_streams == 2


async def test_what_came_before_the_loss_can_still_be_read(links, worker):
    link = links.link(DECODE)
    await link.wait_attached()
    with link.listen(SPEC.attempt_id) as inbox:
        worker.say(output(SPEC, 5, finish=FinishReason.LENGTH))
        worker.say(PeerLost("gone"))
        await inbox.wait_broken()
        assert (await inbox.get()).finish is FinishReason.LENGTH


async def test_a_worker_that_refuses_the_stream_is_lost_to_all_who_wait(links, worker):
    worker.attach_error = Draining("going")
    outcomes = await asyncio.gather(
        *(links.link(DECODE).wait_attached() for _ in range(3)), return_exceptions=True
    )
    assert {type(outcome) for outcome in outcomes} == {PeerLost}


async def test_links_of_lives_that_are_gone_are_dropped_once_nobody_listens(worker):
    newer = ScriptedWorker(record_of("decode-0", Role.DECODE, epoch=2))
    peers = ScriptedPeers(worker, newer)
    links = WorkerLinks(GatewayId("g"), peers)
    link = links.link(DECODE)
    await link.wait_attached()
    with link.listen(SPEC.attempt_id):
        links.keep_only([newer.record])
        assert worker.num_open_streams == 1
    links.keep_only([newer.record])
    await links.aclose()
    assert worker.num_open_streams == 0
    assert peers.forgotten == ["decode-0"]


async def test_closing_ends_streams_and_tells_those_who_listen(links, worker):
    link = links.link(DECODE)
    with link.listen(SPEC.attempt_id) as inbox:
        await links.aclose()
        with pytest.raises(PeerLost, match="this gateway closed"):
            await inbox.get()
    with pytest.raises(PeerLost):
        await link.wait_attached()
    assert worker.num_open_streams == 0


async def test_an_inbox_merges_what_nobody_reads():
    inbox = Inbox()
    for token in range(100):
        inbox.put(output(SPEC, token))
    merged = await inbox.get()
    assert [token.token_id for token in merged.tokens] == list(range(100))
