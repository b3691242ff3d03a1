"""Attempts against workers that follow a script: who is asked, what is told, and what is cleaned up."""

import asyncio
from contextlib import aclosing

import pytest
from tests.support.engine_fakes import ManualClock
from tests.support.scripted_worker import FINGERPRINT, ScriptedPeers, ScriptedWorker, output, record_of

from tandem.clock import Deadline
from tandem.config.choices import DisaggregationMode
from tandem.directory.base import Role
from tandem.directory.memory import MemoryDirectory
from tandem.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoWorker,
    OutOfBlocks,
    PeerLost,
    TransferFailed,
    Unavailable,
)
from tandem.gateway.dispatch import Dispatcher, Job
from tandem.gateway.links import WorkerLinks
from tandem.gateway.prompt import Prompt
from tandem.generation import CallContext, Phase, SequenceOutput
from tandem.ids import GatewayId
from tandem.request import FinishReason, SamplingParams
from tandem.routing.query import RouterPolicy
from tandem.routing.router import Router

PROMPT = Prompt(tuple(range(40)), b"root", ())


class CountingIds:
    def __init__(self) -> None:
        self.num = 0

    def hex128(self) -> str:
        self.num += 1
        return f"{self.num:032x}"


class Bench:
    """A dispatcher over scripted workers."""

    def __init__(self, mode: DisaggregationMode, *workers: ScriptedWorker) -> None:
        self.workers = workers
        self.clock = ManualClock()
        self.directory = MemoryDirectory(self.clock)
        self.router = Router(RouterPolicy(mode=mode), lambda n: 0)
        self.links = WorkerLinks(GatewayId("g"), ScriptedPeers(*workers))
        self.dispatcher = Dispatcher(
            self.router,
            self.directory,
            self.links,
            layout_fingerprint=FINGERPRINT,
            block_bytes=1000,
            clock=self.clock,
            ids=CountingIds(),
        )

    async def __aenter__(self) -> "Bench":
        for worker in self.workers:
            await self.directory.membership.announce(worker.record, 60.0)
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.links.aclose()
        self.assert_empty()

    def job(self, deadline: Deadline | None = None) -> Job:
        return Job(PROMPT, SamplingParams(), 0, CallContext(deadline))

    async def run(self, job: Job | None = None) -> list[int]:
        outputs = [o async for o in self.dispatcher.run(job or self.job())]
        assert outputs[-1].finish is not None
        return [token.token_id for o in outputs for token in o.tokens]

    def assert_empty(self) -> None:
        assert self.router.book.num_open == 0
        assert self.links.num_listening == 0


def answering(record, *tokens: int) -> ScriptedWorker:
    """Answers every sequence with `tokens` and an end."""
    worker = ScriptedWorker(record)
    worker.on_submit = worker.on_reserve = lambda spec: worker.say(
        output(spec, *tokens, finish=FinishReason.STOP)
    )
    return worker


def prefill(name: str = "prefill-0", **rest) -> ScriptedWorker:
    return ScriptedWorker(record_of(name, Role.PREFILL), **rest)


def decode(name: str = "decode-0", *tokens: int) -> ScriptedWorker:
    return answering(record_of(name, Role.DECODE), *(tokens or (101, 102)))


async def test_a_local_answer_comes_whole():
    worker = decode()
    async with Bench(DisaggregationMode.NEVER, worker) as bench:
        assert await bench.run() == [101, 102]
    assert [call for call, _ in worker.calls] == ["submit"]
    assert worker.cancelled == []


async def test_p38_a_remote_prompt_is_reserved_then_prefilled_under_one_attempt():
    p, d = prefill(), decode()
    async with Bench(DisaggregationMode.ALWAYS, p, d) as bench:
        assert await bench.run() == [100, 101, 102]
    assert [call for call, _ in d.calls] == ["reserve"]
    assert [call for call, _ in p.calls] == ["prefill"]
    assert d.calls[0][1] == p.calls[0][1]


async def test_the_first_token_comes_first_even_if_the_decode_worker_is_quicker():
    p, d = prefill(hold_prefill=asyncio.Event()), decode()
    async with Bench(DisaggregationMode.ALWAYS, p, d) as bench:
        task = asyncio.ensure_future(bench.run())
        await p.prefill_entered.wait()
        p.hold_prefill.set()
        assert await task == [100, 101, 102]


async def test_the_route_is_a_phase_with_its_reason():
    async with Bench(DisaggregationMode.ALWAYS, prefill(), decode()) as bench:
        outputs = [o async for o in bench.dispatcher.run(bench.job())]
    (route,) = outputs[0].phases
    assert route.phase is Phase.ROUTE
    assert route.attributes["reason"] == "mode"
    assert route.attributes["tandem.route.prefill"] == "prefill-0"


@pytest.mark.parametrize("error", [PeerLost("gone"), TransferFailed("torn"), OutOfBlocks(wanted=2, free=1)])
async def test_p37_a_failed_prefill_is_tried_once_more_on_another_worker(error):
    bad, good, d = (
        prefill("prefill-0", on_prefill=lambda spec: error),
        prefill("prefill-1"),
        ScriptedWorker(record_of("decode-0", Role.DECODE)),
    )
    num_reserved = 0

    def answer_second(spec):
        nonlocal num_reserved
        num_reserved += 1
        if num_reserved == 2:
            d.say(output(spec, 101, finish=FinishReason.LENGTH))

    d.on_reserve = answer_second
    async with Bench(DisaggregationMode.ALWAYS, bad, good, d) as bench:
        assert await bench.run() == [100, 101]
    attempts = [attempt_id for _, attempt_id in d.calls]
    assert len(set(attempts)) == 2
    assert d.cancelled == bad.cancelled == attempts[:1]
    assert good.cancelled == []


async def test_p37_a_second_failure_is_the_answer():
    workers = [prefill(f"prefill-{n}", on_prefill=lambda spec: TransferFailed("torn")) for n in range(3)]
    async with Bench(
        DisaggregationMode.ALWAYS, *workers, ScriptedWorker(record_of("d", Role.DECODE))
    ) as bench:
        with pytest.raises(TransferFailed, match="torn"):
            await bench.run()
    assert sum(len(worker.calls) for worker in workers) == 2


async def test_without_another_worker_the_first_failure_is_told_not_the_lack_of_workers():
    p = prefill(on_prefill=lambda spec: TransferFailed("torn"))
    async with Bench(DisaggregationMode.ALWAYS, p, ScriptedWorker(record_of("d", Role.DECODE))) as bench:
        with pytest.raises(TransferFailed, match="torn"):
            await bench.run()


async def test_a_request_error_is_not_tried_again():
    p = prefill(on_prefill=lambda spec: InvalidRequest("token_ids", "too long"))
    async with Bench(
        DisaggregationMode.ALWAYS, p, prefill("prefill-1"), ScriptedWorker(record_of("d", Role.DECODE))
    ) as bench:
        with pytest.raises(InvalidRequest):
            await bench.run()
    assert len(p.calls) == 1


async def test_p12_a_lost_worker_is_avoided_at_once():
    lost, other = decode("decode-0"), decode("decode-1", 7)
    lost.on_submit = lambda spec: lost.say(PeerLost("connection reset"))
    async with Bench(DisaggregationMode.NEVER, lost, other) as bench:
        assert await bench.run() == [7]
        assert await bench.run() == [7]
    assert len(lost.calls) == 1


async def test_a_decode_worker_that_fails_ends_the_wait_for_the_prefill_worker():
    p, d = prefill(hold_prefill=asyncio.Event()), ScriptedWorker(record_of("d", Role.DECODE))
    async with Bench(DisaggregationMode.ALWAYS, p, d) as bench:
        task = asyncio.ensure_future(bench.run())
        await p.prefill_entered.wait()
        d.say(PeerLost("killed"))
        with pytest.raises(PeerLost, match="killed"):
            await task
    assert p.cancelled == [p.calls[0][1]]


async def test_after_the_first_token_a_failure_is_told():
    p, d = prefill(), ScriptedWorker(record_of("d", Role.DECODE))
    async with (
        Bench(DisaggregationMode.ALWAYS, p, prefill("prefill-1"), d) as bench,
        aclosing(bench.dispatcher.run(bench.job())) as outputs,
    ):
        await anext(outputs)
        first = await anext(outputs)
        assert [token.token_id for token in first.tokens] == [100]
        d.say(SequenceOutput(first.attempt_id, finish=FinishReason.ERROR, error="it broke"))
        with pytest.raises(Unavailable, match="it broke"):
            await anext(outputs)


async def test_a_deadline_on_the_worker_is_the_callers_deadline():
    d = ScriptedWorker(record_of("d", Role.DECODE))
    d.on_submit = lambda spec: d.say(output(spec, finish=FinishReason.ERROR, error="deadline"))
    async with Bench(DisaggregationMode.NEVER, d) as bench:
        with pytest.raises(DeadlineExceeded, match="allow more time"):
            await bench.run()


async def test_p8_a_worker_that_says_nothing_is_left_at_the_deadline():
    d = ScriptedWorker(record_of("d", Role.DECODE))
    async with Bench(DisaggregationMode.NEVER, d) as bench:
        with pytest.raises(DeadlineExceeded):
            await bench.run(bench.job(Deadline.after(bench.clock, 0.02)))
    assert d.cancelled == [d.calls[0][1]]


@pytest.mark.parametrize("num_read", [1, 2, 3])
async def test_p1_closing_at_any_point_cancels_on_both_workers(num_read):
    p, d = prefill(), ScriptedWorker(record_of("d", Role.DECODE))
    d.on_reserve = lambda spec: d.say(output(spec, 101))
    async with (
        Bench(DisaggregationMode.ALWAYS, p, d) as bench,
        aclosing(bench.dispatcher.run(bench.job())) as outputs,
    ):
        for _ in range(num_read):
            attempt_id = (await anext(outputs)).attempt_id
    assert d.cancelled == [attempt_id]
    assert p.cancelled == [attempt_id]


async def test_p1_a_task_cancelled_amid_the_prefill_cancels_on_both_workers():
    p, d = prefill(hold_prefill=asyncio.Event()), ScriptedWorker(record_of("d", Role.DECODE))
    async with Bench(DisaggregationMode.ALWAYS, p, d) as bench:
        task = asyncio.ensure_future(bench.run())
        await p.prefill_entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert p.cancelled == d.cancelled == [p.calls[0][1]]


async def test_a_reader_who_has_enough_gets_the_workers_phases_and_no_more_tokens():
    d = ScriptedWorker(record_of("d", Role.DECODE))
    d.on_submit = lambda spec: d.say(output(spec, 101))
    async with Bench(DisaggregationMode.NEVER, d) as bench:
        job, seen = bench.job(), []
        async for got in bench.dispatcher.run(job):
            seen.append(got)
            if got.tokens:
                job.stop_early = True
                d.say(SequenceOutput(got.attempt_id, finish=FinishReason.CANCELLED))
    assert seen[-1].finish is FinishReason.STOP
    assert seen[-1].tokens == ()
    assert d.cancelled == [d.calls[0][1]]


async def test_no_worker_at_all_is_said_as_such():
    async with Bench(DisaggregationMode.ALWAYS, prefill()) as bench:
        with pytest.raises(NoWorker, match="decode"):
            await bench.run()


async def test_p6_after_many_closed_runs_nothing_is_left():
    p, d = prefill(), ScriptedWorker(record_of("d", Role.DECODE))
    d.on_reserve = lambda spec: d.say(output(spec, 101))
    async with Bench(DisaggregationMode.ALWAYS, p, d) as bench:
        for turn in range(300):
            async with aclosing(bench.dispatcher.run(bench.job())) as outputs:
                for _ in range(turn % 4):
                    await anext(outputs)
        bench.assert_empty()
