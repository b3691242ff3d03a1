from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest
from tests.support.engine_fakes import Rig, make_spec, true_answer, true_next

from tandem.clock import Deadline
from tandem.engine.loop import EngineLoop
from tandem.engine.results import ExportProgress, StepResult
from tandem.errors import Cancelled, DeadlineExceeded, Draining, InternalError, OutOfBlocks, Refused
from tandem.generation import SequenceOutput, TokenOutput
from tandem.ids import AttemptId
from tandem.kv.events import BlocksStored, CacheCleared
from tandem.request import FinishReason

PROMPT = list(range(10))


class RealClock:
    """The real one: the loop's thread waits in real time."""

    def monotonic_s(self) -> float:
        import time

        return time.monotonic()

    def wall_ns(self) -> int:
        import time

        return time.time_ns()


class Bench(Rig):
    """A rig in its thread. `gate` closed: the next forward blocks inside the engine's thread."""

    def __init__(self, **changes: int | frozenset[int]) -> None:
        super().__init__(**changes)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.runner.on_forward = self._pass_gate
        self.outputs: dict[str, list[SequenceOutput]] = {}
        self.exports: dict[str, list[ExportProgress]] = {}
        self.changed = asyncio.Event()
        self.loop = EngineLoop(self.engine, self.hear)

    def _pass_gate(self) -> None:
        self.entered.set()
        assert self.gate.wait(10)

    def hear(self, result: StepResult) -> None:
        assert threading.current_thread() is threading.main_thread()
        for output in result.outputs:
            self.outputs.setdefault(output.attempt_id, []).append(output)
        for progress in result.exports:
            self.exports.setdefault(progress.attempt_id, []).append(progress)
        self.changed.set()

    async def until_end(self, name: str) -> SequenceOutput:
        async with asyncio.timeout(10):
            while not (self.outputs.get(name) and self.outputs[name][-1].finish):
                self.changed.clear()
                await self.changed.wait()
        return self.outputs[name][-1]

    async def until_exported(self, name: str) -> ExportProgress:
        async with asyncio.timeout(10):
            while not (self.exports.get(name) and self.exports[name][-1].first_token):
                self.changed.clear()
                await self.changed.wait()
        return self.exports[name][-1]

    def tokens(self, name: str) -> list[int]:
        return [token.token_id for output in self.outputs.get(name, ()) for token in output.tokens]

    async def hold_inside_forward(self) -> None:
        """Return when the engine's thread is inside a forward that won't end until `gate.set()`."""
        self.entered.clear()
        self.gate.clear()
        await self.loop.submit(make_spec("blocker", [1, 2, 3], max_tokens=3))
        assert await asyncio.to_thread(self.entered.wait, 10)

    async def barrier(self) -> None:
        """Return when all that was sent before has been applied."""
        await self.loop.abort(AttemptId("nobody"))


@asynccontextmanager
async def running(**changes: int | frozenset[int]) -> AsyncIterator[Bench]:
    bench = Bench(**changes)
    await bench.loop.start()
    try:
        yield bench
    finally:
        bench.gate.set()
        await bench.loop.stop()


async def test_outputs_of_a_sequence_come_in_order_on_the_event_loop():
    async with running() as bench:
        await bench.loop.submit(make_spec("a", PROMPT, max_tokens=6))
        end = await bench.until_end("a")
        assert end.finish is FinishReason.LENGTH
        assert bench.tokens("a") == true_answer(PROMPT, 6)


async def test_export_fill_and_admit_across_two_loops():
    async with running() as decode, running() as prefill:
        spec = make_spec("a", PROMPT, max_tokens=6)
        grant = await decode.loop.reserve(spec)
        await prefill.loop.export(spec)
        last = await prefill.until_exported("a")
        assert last.first_token is not None
        tokens = [prefill.runner.read(last.block_ids, p) for p in range(last.num_computed_tokens)]
        decode.runner.fill(grant.block_ids, tokens, grant.num_cached_tokens)
        await prefill.loop.release(spec.attempt_id)
        await decode.loop.admit(spec.attempt_id, last.first_token)
        await decode.until_end("a")
        assert [last.first_token.token_id, *decode.tokens("a")] == true_answer(PROMPT, 6)
        assert prefill.loop.drain_kv_events() != []
        assert decode.loop.drain_kv_events() != []


async def test_an_error_of_a_verb_reaches_its_caller_and_the_engine_lives_on():
    async with running() as bench:
        with pytest.raises(Refused):
            await bench.loop.admit(AttemptId("nobody"), TokenOutput(1))
        with pytest.raises(OutOfBlocks):
            await bench.loop.reserve(make_spec("a", range(190)))
        await bench.loop.submit(make_spec("a", PROMPT))
        await bench.until_end("a")


async def test_p1_abort_takes_effect_after_the_step_in_progress():
    async with running() as bench:
        await bench.hold_inside_forward()
        aborting = asyncio.create_task(bench.loop.abort(AttemptId("blocker")))
        await asyncio.sleep(0)
        assert not aborting.done()
        bench.gate.set()
        await aborting
        assert (await bench.until_end("blocker")).finish is FinishReason.CANCELLED
        await bench.barrier()
        assert len(bench.runner.batches) == 1
        assert bench.loop.load().num_free_blocks == bench.settings.num_blocks


async def test_calls_do_not_block_the_event_loop_while_a_step_runs():
    async with running() as bench:
        await bench.hold_inside_forward()
        assert bench.loop.load().num_free_blocks <= bench.settings.num_blocks
        submitting = asyncio.create_task(bench.loop.submit(make_spec("a", PROMPT)))
        await asyncio.sleep(0)
        assert bench.loop.drain_kv_events() == []
        bench.gate.set()
        await submitting
        await bench.until_end("a")


async def test_reservations_are_granted_first_come_first_served():
    async with running(num_blocks=4) as bench:
        first = await bench.loop.reserve(make_spec("a", PROMPT))
        waiting = [asyncio.create_task(bench.loop.reserve(make_spec(name, PROMPT))) for name in "bc"]
        await bench.barrier()
        assert not any(task.done() for task in waiting)
        await bench.loop.release(first.attempt_id)
        second = await waiting[0]
        assert second.attempt_id == "b"
        await bench.barrier()
        assert not waiting[1].done()
        await bench.loop.release(second.attempt_id)
        assert (await waiting[1]).attempt_id == "c"


async def test_p1_cancelling_a_waiting_reservation_leaves_nothing():
    async with running(num_blocks=4) as bench:
        holder = await bench.loop.reserve(make_spec("a", PROMPT))
        waiting = asyncio.create_task(bench.loop.reserve(make_spec("b", PROMPT)))
        await bench.barrier()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await bench.loop.release(holder.attempt_id)
        await bench.barrier()
        assert bench.engine.num_sequences == 0
        assert bench.loop.load().num_free_blocks == 4


async def test_p1_a_grant_that_crosses_its_cancellation_is_given_back():
    async with running() as bench:
        await bench.hold_inside_forward()
        asking = asyncio.create_task(bench.loop.reserve(make_spec("a", PROMPT)))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        bench.gate.set()
        await bench.until_end("blocker")
        await bench.barrier()
        assert bench.engine.num_sequences == 0
        assert bench.loop.load().num_free_blocks == bench.settings.num_blocks


@pytest.mark.parametrize("verb", ["submit", "export"])
async def test_p1_a_cancelled_call_leaves_no_sequence_behind(verb: str):
    async with running() as bench:
        await bench.hold_inside_forward()
        calling = asyncio.create_task(getattr(bench.loop, verb)(make_spec("a", PROMPT, max_tokens=100)))
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        bench.gate.set()
        await bench.until_end("blocker")
        await bench.barrier()
        assert bench.engine.num_sequences == 0


async def test_aborting_a_waiting_reservation_answers_its_call():
    async with running(num_blocks=4) as bench:
        await bench.loop.reserve(make_spec("a", PROMPT))
        waiting = asyncio.create_task(bench.loop.reserve(make_spec("b", PROMPT)))
        await bench.barrier()
        await bench.loop.abort(AttemptId("b"))
        with pytest.raises(Cancelled):
            await waiting


async def test_p5_a_deadline_ends_a_waiting_reservation_without_any_traffic():
    bench = Bench(num_blocks=4)
    bench.engine._clock = RealClock()
    await bench.loop.start()
    try:
        await bench.loop.reserve(make_spec("a", PROMPT))
        late = make_spec("b", PROMPT, deadline=Deadline.after(RealClock(), 0.05))
        with pytest.raises(DeadlineExceeded):
            async with asyncio.timeout(10):
                await bench.loop.reserve(late)
    finally:
        await bench.loop.stop()


async def test_p30_a_step_that_raises_ends_its_sequences_and_the_engine_lives_on():
    async with running() as bench:
        bench.runner.fail_next = MemoryError()
        await bench.loop.submit(make_spec("a", PROMPT))
        end = await bench.until_end("a")
        assert end.finish is FinishReason.ERROR
        assert "MemoryError" in str(end.error)
        await bench.loop.submit(make_spec("b", PROMPT))
        await bench.until_end("b")
        assert bench.tokens("b") == true_answer(PROMPT, 4)


async def test_a_bug_outside_the_model_ends_the_sequences_and_the_engine_lives_on(
    monkeypatch: pytest.MonkeyPatch,
):
    async with running() as bench:
        await bench.hold_inside_forward()
        schedule = bench.engine._scheduler.schedule

        def broken() -> object:
            monkeypatch.setattr(bench.engine._scheduler, "schedule", schedule)
            raise ZeroDivisionError

        monkeypatch.setattr(bench.engine._scheduler, "schedule", broken)
        bench.gate.set()
        assert (await bench.until_end("blocker")).finish is FinishReason.ERROR
        await bench.loop.submit(make_spec("b", PROMPT))
        await bench.until_end("b")
        assert bench.loop.alive


async def test_a_thread_that_dies_answers_everyone_and_says_so(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> object:
        raise ZeroDivisionError

    async with running(num_blocks=4) as bench:
        await bench.hold_inside_forward()
        waiting = asyncio.create_task(bench.loop.reserve(make_spec("b", range(13))))
        await asyncio.sleep(0)
        monkeypatch.setattr(bench.engine._scheduler, "schedule", broken)
        monkeypatch.setattr(bench.engine, "fail_all", broken)
        bench.gate.set()
        with pytest.raises(InternalError, match="restart the worker"):
            await waiting
        assert not bench.loop.alive
        with pytest.raises(Draining):
            await bench.loop.submit(make_spec("c", PROMPT))


async def test_stop_ends_sequences_and_answers_every_call():
    async with running(num_blocks=8) as bench:
        await bench.loop.reserve(make_spec("holder", PROMPT))
        waiting = asyncio.create_task(bench.loop.reserve(make_spec("b", range(24))))
        await bench.barrier()
        bench.entered.clear()
        bench.gate.clear()
        # A higher priority takes it past the reservation that waits for blocks.
        await bench.loop.submit(make_spec("runs", [1, 2, 3], max_tokens=3, priority=9))
        assert await asyncio.to_thread(bench.entered.wait, 10)
        late = asyncio.create_task(bench.loop.submit(make_spec("late", PROMPT)))
        await asyncio.sleep(0)
        stopping = [asyncio.create_task(bench.loop.stop()) for _ in range(2)]
        await asyncio.sleep(0)
        bench.gate.set()
        await asyncio.gather(*stopping)
        with pytest.raises(Draining):
            await waiting
        with pytest.raises(Draining):
            await late
        assert bench.outputs["runs"][-1].finish is FinishReason.ERROR
        with pytest.raises(Draining):
            await bench.loop.submit(make_spec("after", PROMPT))
        with pytest.raises(Draining):
            await bench.loop.reserve(make_spec("after", PROMPT))
        assert not [thread for thread in threading.enumerate() if thread.name == "tandem-engine"]


async def test_a_loop_that_was_never_started_takes_nothing_and_can_be_stopped():
    bench = Bench()
    with pytest.raises(Draining):
        await bench.loop.submit(make_spec("a", PROMPT))
    await bench.loop.stop()
    await bench.loop.start()
    with pytest.raises(InternalError, match="started before"):
        await bench.loop.start()
    await bench.loop.stop()


async def test_the_snapshot_tells_all_that_is_cached():
    async with running() as bench:
        await bench.loop.submit(make_spec("a", PROMPT))
        await bench.until_end("a")
        assert len(bench.loop.drain_kv_events()) == 1
        cleared, stored = bench.loop.snapshot_kv_events()
        assert cleared == CacheCleared()
        assert isinstance(stored, BlocksStored)
        assert len(stored.hashes) == 3


@pytest.mark.parametrize("seed", range(3))
async def test_p6_random_traffic_with_cancellations_leaves_nothing(seed: int):
    random = Random(seed)
    async with running(num_blocks=16, max_num_sequences=4, max_waiting=200) as bench:

        async def monolithic(name: str, tokens: list[int]) -> None:
            await bench.loop.submit(make_spec(name, tokens, max_tokens=5))
            try:
                await bench.until_end(name)
            except asyncio.CancelledError:
                await bench.loop.abort(AttemptId(name))
                raise
            assert bench.tokens(name) == true_answer(tokens, 5)

        async def received(name: str, tokens: list[int]) -> None:
            spec = make_spec(name, tokens, max_tokens=5)
            grant = await bench.loop.reserve(spec)
            try:
                await asyncio.sleep(0)
                bench.runner.fill(grant.block_ids, tokens, grant.num_cached_tokens)
                await bench.loop.admit(spec.attempt_id, TokenOutput(true_next(tokens)))
                await bench.until_end(name)
            except asyncio.CancelledError:
                await bench.loop.release(spec.attempt_id)
                await bench.loop.abort(spec.attempt_id)
                raise

        async def exported(name: str, tokens: list[int]) -> None:
            spec = make_spec(name, tokens)
            await bench.loop.export(spec)
            try:
                last = await bench.until_exported(name)
                assert [bench.runner.read(last.block_ids, p) for p in range(len(tokens))] == tokens
            finally:
                await bench.loop.release(spec.attempt_id)

        tasks: list[asyncio.Task[None]] = []
        for number in range(150):
            tokens = [random.randrange(2)] * random.randrange(1, 9) + [random.randrange(9)] * 3
            kind = random.choice((monolithic, received, exported))
            tasks.append(asyncio.create_task(kind(f"s{number}", tokens)))
            for _ in range(random.randrange(4)):
                await asyncio.sleep(0)
            if random.random() < 0.4:
                random.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if result is not None]
        assert all(isinstance(error, asyncio.CancelledError) for error in errors), errors
        await bench.barrier()
        await bench.barrier()
        assert bench.engine.num_sequences == 0
        assert bench.loop.load().num_free_blocks == 16
