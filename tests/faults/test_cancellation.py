"""P1 to P6 on a whole cluster: whatever is abandoned, whenever, gives everything back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import pytest
from tests.support.engine_fakes import make_spec
from tests.support.local import ask, assert_remote, local_cluster, local_settings
from tests.support.models import VOCAB_SIZE, Tiny, tiny_model
from tests.support.reference import greedy, random_prompt
from tests.support.staging import Stage

from tandem.clock import Deadline
from tandem.cluster.local import LocalCluster
from tandem.errors import DeadlineExceeded, TandemError, TicketRefused
from tandem.generation import CallContext
from tandem.ids import AttemptId, Epoch, TransferId
from tandem.kv.ticket import FinalWord, TransferOutcome
from tandem.request import Request, SamplingParams
from tandem.rpc.services import GenerateChunk

PREFILL, DECODE = 0, 1
FOLDER = tiny_model(Tiny.LLAMA)
LONG = random_prompt(300, VOCAB_SIZE, seed=1)
Stream = AsyncGenerator[GenerateChunk]


def request(prompt=LONG, max_tokens: int = 40) -> Request:
    return Request(token_ids=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens))


async def first_token(stream: Stream) -> None:
    while not (await anext(stream)).tokens:
        pass


class Scene:
    """A request brought to one state, and the task that reads it there."""

    def __init__(self, cluster: LocalCluster, stage: Stage) -> None:
        self.cluster = cluster
        self.stage = stage
        self.stream = cluster.gateway.generate(request(), CallContext())
        self.reader: asyncio.Future | None = None
        self.blocker: asyncio.Future | None = None

    def read(self) -> None:
        """Wait for the next chunk in a task, as a client does."""
        self.reader = asyncio.ensure_future(anext(self.stream))

    async def read_on(self) -> None:
        """Read until the stream ends by an error."""
        while True:
            await (self.reader or anext(self.stream))
            self.reader = None

    async def abandon(self) -> None:
        """The client goes away."""
        if self.reader is not None:
            self.reader.cancel()
            await asyncio.gather(self.reader, return_exceptions=True)
        await self.stream.aclose()


async def queued_on_p(scene: Scene) -> None:
    scene.stage.steps[PREFILL].allow(0)
    blocker = asyncio.ensure_future(ask(scene.cluster, random_prompt(50, VOCAB_SIZE, seed=2)))
    await scene.stage.steps[PREFILL].wait_held()
    scene.read()
    await asyncio.sleep(0.05)
    scene.blocker = blocker


async def between_chunks(scene: Scene) -> None:
    scene.stage.steps[PREFILL].allow(1)
    scene.read()
    await scene.stage.steps[PREFILL].wait_held()


async def sending(scene: Scene) -> None:
    scene.stage.hold_messages()
    await first_token(scene.stream)
    assert scene.stage.num_messages_held


async def before_d_starts(scene: Scene) -> None:
    scene.stage.steps[DECODE].allow(0)
    await first_token(scene.stream)
    scene.read()
    await scene.stage.steps[DECODE].wait_held()


async def in_decode(scene: Scene) -> None:
    scene.stage.steps[DECODE].allow(3)
    await first_token(scene.stream)
    scene.read()
    await scene.stage.steps[DECODE].wait_held()


async def in_the_last_step(scene: Scene) -> None:
    scene.stage.steps[DECODE].allow(38)
    for _ in range(30):
        await anext(scene.stream)
    await scene.stage.steps[DECODE].wait_held()


STATES = (queued_on_p, between_chunks, sending, before_d_starts, in_decode, in_the_last_step)


@pytest.fixture
async def cluster(stage: Stage):
    async with local_cluster(local_settings(FOLDER)) as cluster:
        yield cluster


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
async def test_p1_abandoned_in_any_state_everything_comes_back_and_computing_stops(cluster, stage, state):
    scene = Scene(cluster, stage)
    await state(scene)
    await scene.abandon()
    passed = [gate.num_passed for gate in stage.steps]
    for gate in stage.steps:
        gate.open()
    await stage.release_messages()
    if scene.blocker is not None:
        await scene.blocker
        return
    answer = await ask(cluster, random_prompt(20, VOCAB_SIZE, seed=3), max_tokens=2)
    assert_remote(answer)
    # One step was under way on each worker, and the new request takes one on each.
    assert all(gate.num_passed - before <= 3 for gate, before in zip(stage.steps, passed, strict=True))


@pytest.mark.parametrize("state", STATES[1:], ids=lambda state: state.__name__)
async def test_p1_at_the_deadline_everything_comes_back(cluster, stage, state):
    scene = Scene(cluster, stage)
    clock = cluster.gateway._clock
    scene.stream = cluster.gateway.generate(request(), CallContext(Deadline.after(clock, 0.6)))
    await state(scene)
    with pytest.raises(DeadlineExceeded):
        await scene.read_on()
    for gate in stage.steps:
        gate.open()
    await stage.release_messages()


@pytest.mark.parametrize("state", STATES[1:], ids=lambda state: state.__name__)
async def test_p2_cancelling_again_and_cancelling_nothing_are_no_ops(cluster, stage, state):
    scene = Scene(cluster, stage)
    await state(scene)
    workers = list(cluster.workers.values())
    open_attempts = {a for worker in workers for a in worker._spans._parents} | {AttemptId("unknown")}
    for gate in stage.steps:
        gate.open()
    for _ in range(2):
        await asyncio.gather(*(worker.cancel(a) for worker in workers for a in open_attempts))
    await stage.release_messages()
    with suppress(TandemError, StopAsyncIteration):  # some had ended before the cancel came
        await scene.read_on()
    prompt = random_prompt(20, VOCAB_SIZE, seed=3)
    assert (await ask(cluster, prompt)).tokens == greedy(FOLDER, prompt, 8)


async def test_p3_a_ticket_is_single_use_and_a_forged_one_is_refused(cluster, stage):
    decode = cluster.workers["decode-0"]
    spec_words: list[FinalWord] = []
    finish = decode.receiver.finish

    async def overhear(word: FinalWord) -> None:
        spec_words.append(word)
        await finish(word)

    decode.receiver.finish = overhear
    await ask(cluster, random_prompt(20, VOCAB_SIZE, seed=4))
    (word,) = spec_words
    with pytest.raises(TicketRefused):
        await finish(word)
    forged = FinalWord(TransferId("f" * 32), AttemptId("a" * 32), Epoch(1), TransferOutcome.OK)
    with pytest.raises(TicketRefused):
        await finish(forged)


async def test_p4_blocks_stay_in_quarantine_while_messages_are_on_their_way(cluster, stage):
    """The client leaves amid the sending; late messages must find nobody else's blocks."""
    scene = Scene(cluster, stage)
    await sending(scene)
    await scene.abandon()
    await stage.release_messages()
    prompt = random_prompt(200, VOCAB_SIZE, seed=5)
    assert (await ask(cluster, prompt)).tokens == greedy(FOLDER, prompt, 8)


async def test_p5_a_lease_ends_without_traffic(stage):
    settings = local_settings(FOLDER, transfer={"lease_s": 0.3})
    async with local_cluster(settings) as cluster:
        decode = cluster.workers["decode-0"]
        gateway = cluster.links.gateway_id
        await cluster.links.link(decode.record()).wait_attached()
        await decode.reserve(make_spec("abandoned", LONG), gateway, CallContext())
        assert decode.receiver.num_open == 1
        # Nobody sends, renews or cancels; `local_cluster` waits until all is free.


@pytest.mark.parametrize("seed", range(3))
async def test_p6_after_many_random_aborts_nothing_is_left(seed):
    rng = random.Random(seed)
    settings = local_settings(FOLDER, engine={"num_blocks": 60, "max_batch_tokens": 64})
    async with local_cluster(settings) as cluster:

        async def one(number: int) -> None:
            prompt = random_prompt(rng.choice((5, 16, 40, 100)), VOCAB_SIZE, seed=number % 7)
            stream = cluster.gateway.generate(request(prompt, max_tokens=12), CallContext())
            num_chunks = rng.choice((0, 1, 2, 5, 100))
            task = asyncio.ensure_future(read(stream, num_chunks))
            if rng.random() < 0.5:
                for _ in range(rng.randrange(200)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for _ in range(70):
            await asyncio.gather(*(one(rng.randrange(1000)) for _ in range(15)))
        prompt = random_prompt(30, VOCAB_SIZE, seed=6)
        assert (await ask(cluster, prompt)).tokens == greedy(FOLDER, prompt, 8)


async def read(stream: Stream, num_chunks: int) -> None:
    async with aclosing(stream):
        for _ in range(num_chunks):
            if (await anext(stream)).finish is not None:
                return


async def test_p11_a_burst_over_every_pair_straight_after_start_completes():
    settings = local_settings(FOLDER, cluster={"num_prefill": 3, "num_decode": 3})
    async with local_cluster(settings) as cluster:
        prompts = [random_prompt(20 + at, VOCAB_SIZE, seed=at) for at in range(36)]
        answers = await asyncio.gather(*(ask(cluster, prompt) for prompt in prompts))
    assert [answer.tokens for answer in answers] == [greedy(FOLDER, prompt, 8) for prompt in prompts]
    for answer in answers:
        assert_remote(answer)
