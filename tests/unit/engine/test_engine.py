from __future__ import annotations

from collections import defaultdict

import pytest
from tests.support.engine_fakes import Rig, make_spec, true_answer, true_next

from tandem.clock import Deadline
from tandem.engine.results import ExportProgress, Reservation, StepResult
from tandem.errors import Cancelled, DeadlineExceeded, InvalidRequest, OutOfBlocks, Refused
from tandem.generation import DEADLINE_ERROR, Phase, SequenceOutput, SequenceSpec, TokenOutput
from tandem.ids import AttemptId
from tandem.request import FinishReason

BLOCK = 4


class Bench(Rig):
    """A rig that remembers what the engine said."""

    def __init__(self, **changes: int | frozenset[int]) -> None:
        super().__init__(**changes)
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, SequenceOutput] = {}
        self.exports: defaultdict[str, list[ExportProgress]] = defaultdict(list)
        self.grants: dict[str, Reservation] = {}
        self.refused: dict[str, Exception] = {}

    def step(self) -> StepResult:
        result = self.engine.step()
        for output in result.outputs:
            assert output.attempt_id not in self.ends, "spoke after its end"
            self.tokens[output.attempt_id] += [token.token_id for token in output.tokens]
            if output.finish is not None:
                self.ends[output.attempt_id] = output
        for progress in result.exports:
            self.exports[progress.attempt_id].append(progress)
        for reservation in result.reservations:
            self.grants[reservation.attempt_id] = reservation
        for refusal in result.refusals:
            self.refused[refusal.attempt_id] = refusal.error
        return result

    def run(self) -> None:
        """Step until idle."""
        for _ in range(1000):
            self.step()
            if self.engine.idle:
                return
        raise AssertionError("the engine never came to rest")

    def answer(self, spec: SequenceSpec) -> list[int]:
        self.engine.submit(spec)
        self.run()
        return self.tokens[spec.attempt_id]

    def hand_over(self, spec: SequenceSpec, sender: Bench) -> list[int]:
        """Prefill on `sender`, fill the blocks here as a transfer would, decode here."""
        self.engine.reserve(spec)
        self.step()
        grant = self.grants[spec.attempt_id]
        sender.engine.export(spec)
        sender.run()
        last = sender.exports[spec.attempt_id][-1]
        assert last.first_token is not None
        tokens = [sender.runner.read(last.block_ids, p) for p in range(last.num_computed_tokens)]
        sender.engine.release(spec.attempt_id)
        self.runner.fill(grant.block_ids, tokens, grant.num_cached_tokens)
        self.engine.admit(spec.attempt_id, last.first_token)
        self.run()
        return [last.first_token.token_id, *self.tokens[spec.attempt_id]]

    def assert_empty(self) -> None:
        assert self.engine.num_sequences == 0
        load = self.engine.load()
        assert load.num_free_blocks == self.settings.num_blocks
        assert (load.num_running, load.num_waiting, load.queued_prefill_tokens) == (0, 0, 0)


def prompt(num_tokens: int, first: int = 1) -> list[int]:
    return [(first * 31 + position * 7) % 997 for position in range(num_tokens)]


def aid(name: str) -> AttemptId:
    return AttemptId(name)


# Whole sequences


def test_many_sequences_together_each_get_their_own_answer():
    bench = Bench(num_blocks=64)
    specs = [make_spec(f"s{n}", prompt(n, n), max_tokens=n, seed=n) for n in range(1, 13)]
    for spec in specs:
        bench.engine.submit(spec)
    bench.run()
    for n, spec in enumerate(specs, start=1):
        assert bench.tokens[spec.attempt_id] == true_answer(spec.token_ids, n, seed=n)
        assert bench.ends[spec.attempt_id].finish is FinishReason.LENGTH
    bench.assert_empty()


def test_one_forward_a_step():
    bench = Bench()
    bench.engine.submit(make_spec("a", prompt(40), max_tokens=3))
    for num_steps in range(1, 6):
        bench.step()
        assert len(bench.runner.batches) == num_steps
    assert [batch.num_tokens for batch in bench.runner.batches] == [16, 16, 8, 1, 1]


def test_preempted_sequences_answer_as_if_nothing_had_happened():
    bench = Bench(num_blocks=8, max_num_sequences=4)
    specs = [make_spec(f"s{n}", prompt(5, n), max_tokens=20, seed=n) for n in range(4)]
    for spec in specs:
        bench.engine.submit(spec)
    bench.run()
    computed = sum(batch.num_tokens for batch in bench.runner.batches)
    assert computed > sum(5 + 19 for _ in specs), "nothing was preempted, so this test tests nothing"
    for n, spec in enumerate(specs):
        assert bench.tokens[spec.attempt_id] == true_answer(spec.token_ids, 20, seed=n)
        told = [timing.phase for timing in bench.ends[spec.attempt_id].phases]
        assert told == [Phase.QUEUE, Phase.PREFILL, Phase.DECODE]
    bench.assert_empty()


@pytest.mark.parametrize("num_tokens", [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("num_shared", [0, BLOCK, 2 * BLOCK, 3 * BLOCK])
def test_p14_block_borders_with_no_partial_and_full_prefix_hit(num_tokens: int, num_shared: int):
    """Monolithic and handed over, under load, equal to the truth; the hit is really there."""
    tokens = prompt(num_tokens)
    warm = [*(tokens + prompt(40, 5))[:num_shared], *prompt(2, 9)]
    for remote in (False, True):
        decode, prefill = Bench(num_blocks=64), Bench(num_blocks=64)
        decode.answer(make_spec("warm", warm, max_tokens=1))
        prefill.answer(make_spec("warm", warm, max_tokens=1))
        for other in range(3):
            decode.engine.submit(make_spec(f"load{other}", prompt(9, 20 + other), max_tokens=30))
            prefill.engine.submit(make_spec(f"load{other}", prompt(9, 20 + other), max_tokens=30))
        spec = make_spec("a", tokens, max_tokens=9)
        got = decode.hand_over(spec, prefill) if remote else decode.answer(spec)
        assert got == true_answer(tokens, 9)
        hit = min(num_shared, (num_tokens - 1) // BLOCK * BLOCK)
        assert decode.ends["a"].num_cached_tokens == hit
        if remote:
            assert prefill.exports["a"][-1].num_cached_tokens == hit
            prefill.run()
            prefill.assert_empty()
        decode.assert_empty()


def test_p17_another_chain_root_never_shares():
    bench = Bench()
    bench.answer(make_spec("a", prompt(9), root=b"tenant-a"))
    bench.answer(make_spec("b", prompt(9), root=b"tenant-b"))
    bench.answer(make_spec("c", prompt(9), root=b"tenant-a"))
    assert [bench.ends[name].num_cached_tokens for name in "abc"] == [0, 0, 8]


def test_generated_blocks_are_shared_too():
    bench = Bench()
    first = bench.answer(make_spec("a", prompt(6), max_tokens=6))
    follow_up = [*prompt(6), *first, 5]
    assert bench.answer(make_spec("b", follow_up)) == true_answer(follow_up, 4)
    assert bench.ends["b"].num_cached_tokens == 8


# Ends


def test_end_of_sequence_ends_it_and_is_part_of_the_output():
    answer = true_answer(prompt(5), 4)
    bench = Bench(eos_token_ids=frozenset({answer[2]}))
    assert bench.answer(make_spec("a", prompt(5), max_tokens=9)) == answer[:3]
    assert bench.ends["a"].finish is FinishReason.STOP
    bench.assert_empty()


def test_min_tokens_reaches_the_sampler_as_suppressed_ids():
    bench = Bench(eos_token_ids=frozenset({999}))
    bench.answer(make_spec("a", prompt(5), max_tokens=4, min_tokens=2, stop_token_ids=(998,)))
    assert [set(row.suppress_token_ids) for row in bench.sampler.rows] == [
        {998, 999},
        {998, 999},
        set(),
        set(),
    ]


def test_without_max_tokens_it_ends_with_the_context():
    bench = Bench(max_context_tokens=20)
    assert len(bench.answer(make_spec("a", prompt(5), max_tokens=None))) == 15
    assert bench.ends["a"].finish is FinishReason.LENGTH


def test_p10_a_sequence_that_fills_the_pool_ends_instead_of_preempting_itself_for_ever():
    bench = Bench(num_blocks=3)
    answer = bench.answer(make_spec("a", prompt(5), max_tokens=None))
    assert answer == true_answer(prompt(5), 3 * BLOCK + 1 - 5)
    assert bench.ends["a"].finish is FinishReason.LENGTH
    bench.assert_empty()


def test_a_continued_sequence_goes_on_identically_and_counts_what_was_generated():
    whole = true_answer(prompt(7), 8, seed=3)
    spec = make_spec("b", [*prompt(7), *whole[:3]], num_prompt_tokens=7, max_tokens=8, seed=3)
    bench = Bench()
    assert bench.answer(spec) == whole[3:]
    assert bench.sampler.rows[0].position == 10
    assert list(bench.sampler.rows[0].prompt_ids) == prompt(7)
    assert bench.ends["b"].finish is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
@pytest.mark.parametrize("eos_at", [None, 0, 1])
def test_p26_handed_over_equals_monolithic(max_tokens: int, eos_at: int | None):
    tokens = prompt(11)
    answer = true_answer(tokens, 9)
    eos = frozenset() if eos_at is None else frozenset({answer[eos_at]})
    whole, decode, prefill = (Bench(eos_token_ids=eos) for _ in range(3))
    spec = make_spec("a", tokens, max_tokens=max_tokens)
    expected = whole.answer(spec)
    assert decode.hand_over(spec, prefill) == expected
    assert len(expected) == (max_tokens if eos_at is None else min(max_tokens, eos_at + 1))
    assert decode.ends["a"].finish is whole.ends["a"].finish
    decode.assert_empty()
    prefill.assert_empty()


def test_p26_a_first_token_that_ends_it_finishes_in_the_same_step():
    bench = Bench()
    bench.engine.reserve(make_spec("a", prompt(5), max_tokens=1))
    bench.step()
    bench.engine.admit(aid("a"), TokenOutput(5))
    (output,) = bench.step().outputs
    assert output.tokens == ()
    assert output.finish is FinishReason.LENGTH
    assert bench.runner.batches == []
    bench.assert_empty()


# Export


def test_an_export_tells_of_each_chunk_and_holds_its_blocks():
    bench = Bench()
    bench.engine.export(make_spec("a", prompt(40)))
    bench.run()
    told = bench.exports["a"]
    assert [progress.num_computed_tokens for progress in told] == [16, 32, 40]
    assert {progress.block_ids for progress in told} == {told[0].block_ids}
    assert [progress.first_token is not None for progress in told] == [False, False, True]
    assert told[-1].first_token == TokenOutput(true_next(prompt(40)))
    assert [timing.phase for timing in told[-1].phases] == [Phase.QUEUE, Phase.PREFILL]
    assert [bench.runner.read(told[-1].block_ids, p) for p in range(40)] == prompt(40)
    assert bench.engine.load().num_free_blocks == 32 - 10
    assert bench.engine.load().num_running == 0
    bench.engine.release(aid("a"))
    bench.assert_empty()


def test_exported_blocks_can_be_shared_while_they_are_held():
    bench = Bench()
    bench.engine.export(make_spec("a", prompt(9)))
    bench.run()
    bench.engine.export(make_spec("b", prompt(9)))
    bench.run()
    assert bench.exports["b"][-1].num_cached_tokens == 8
    assert bench.exports["b"][-1].block_ids[:2] == bench.exports["a"][-1].block_ids[:2]


# Reserve


def test_a_reservation_waits_for_blocks_and_gets_them_in_order():
    bench = Bench(num_blocks=4)
    for name in "abc":
        bench.engine.reserve(make_spec(name, prompt(10)))
    bench.run()
    assert list(bench.grants) == ["a"]
    bench.engine.release(aid("a"))
    bench.run()
    assert list(bench.grants) == ["a", "b"]
    bench.engine.release(aid("b"))
    bench.run()
    assert list(bench.grants) == ["a", "b", "c"]


def test_p13_received_blocks_are_shared_only_after_admit():
    bench = Bench()
    bench.engine.reserve(make_spec("a", prompt(9)))
    bench.step()
    bench.answer(make_spec("b", prompt(9)))
    assert bench.ends["b"].num_cached_tokens == 0
    bench.engine.kv_events.drain()
    bench.runner.fill(bench.grants["a"].block_ids, prompt(9), 0)
    bench.engine.admit(aid("a"), TokenOutput(true_next(prompt(9))))
    bench.run()
    assert bench.tokens["a"] == true_answer(prompt(9), 4)[1:]


def test_received_blocks_are_shared_from_admit_on_even_if_nothing_is_computed():
    decode, prefill = Bench(), Bench()
    decode.hand_over(make_spec("a", prompt(9), max_tokens=1), prefill)
    assert decode.runner.batches == []
    decode.answer(make_spec("b", prompt(9)))
    assert decode.ends["b"].num_cached_tokens == 8


def test_a_reservation_that_can_never_fit_is_refused_at_once():
    bench = Bench(num_blocks=4)
    with pytest.raises(OutOfBlocks):
        bench.engine.reserve(make_spec("a", prompt(18)))
    assert bench.engine.num_sequences == 0


def test_admit_needs_a_reservation():
    bench = Bench()
    with pytest.raises(Refused, match="no reservation"):
        bench.engine.admit(aid("nobody"), TokenOutput(1))
    bench.engine.reserve(make_spec("a", prompt(5)))
    with pytest.raises(Refused, match="no reservation"):
        bench.engine.admit(aid("a"), TokenOutput(1))
    bench.step()
    bench.engine.admit(aid("a"), TokenOutput(1))
    with pytest.raises(Refused, match="no reservation"):
        bench.engine.admit(aid("a"), TokenOutput(1))


# Abort, release, deadline


def test_p1_abort_while_queued_and_between_chunks_and_in_decode():
    bench = Bench(max_num_sequences=1)
    for name in "ab":
        bench.engine.submit(make_spec(name, prompt(40, ord(name)), max_tokens=100))
    bench.step()
    bench.engine.abort(aid("b"))
    bench.engine.abort(aid("a"))
    bench.run()
    bench.engine.submit(make_spec("c", prompt(3), max_tokens=100))
    bench.step()
    bench.step()
    bench.engine.abort(aid("c"))
    bench.run()
    assert {name: end.finish for name, end in bench.ends.items()} == dict.fromkeys(
        "abc", FinishReason.CANCELLED
    )
    assert len(bench.runner.batches) == 3
    bench.assert_empty()


def test_p1_an_aborted_export_computes_no_more_and_keeps_its_blocks_until_released():
    bench = Bench()
    bench.engine.export(make_spec("a", prompt(40)))
    bench.step()
    bench.engine.abort(aid("a"))
    bench.run()
    assert len(bench.runner.batches) == 1
    assert bench.engine.load().num_free_blocks == 22
    bench.engine.release(aid("a"))
    bench.assert_empty()


def test_p1_an_aborted_reservation_keeps_its_blocks_and_is_never_admitted():
    bench = Bench()
    bench.engine.reserve(make_spec("a", prompt(9)))
    bench.step()
    bench.engine.abort(aid("a"))
    assert bench.engine.load().num_free_blocks == 29
    with pytest.raises(Cancelled):
        bench.engine.admit(aid("a"), TokenOutput(1))
    bench.engine.release(aid("a"))
    bench.assert_empty()


@pytest.mark.parametrize("verb", ["abort", "release"])
def test_a_reservation_withdrawn_while_it_waits_is_answered(verb: str):
    bench = Bench(num_blocks=4)
    bench.engine.reserve(make_spec("holder", prompt(10)))
    bench.engine.reserve(make_spec("a", prompt(10)))
    bench.run()
    getattr(bench.engine, verb)(aid("a"))
    bench.run()
    assert isinstance(bench.refused["a"], Cancelled)
    assert bench.engine.num_sequences == 1


def test_p2_abort_and_release_of_the_unknown_and_the_finished_are_no_ops():
    bench = Bench()
    bench.answer(make_spec("done", prompt(5)))
    for name in ("nobody", "done"):
        for _ in range(2):
            bench.engine.abort(aid(name))
            bench.engine.release(aid(name))
    assert not bench.step()
    bench.assert_empty()


def test_p4_release_after_admit_frees_nothing():
    bench = Bench()
    bench.engine.reserve(make_spec("a", prompt(5)))
    bench.step()
    bench.runner.fill(bench.grants["a"].block_ids, prompt(5), 0)
    bench.engine.admit(aid("a"), TokenOutput(true_next(prompt(5))))
    bench.engine.release(aid("a"))
    bench.run()
    assert bench.tokens["a"] == true_answer(prompt(5), 4)[1:]
    bench.assert_empty()


def test_release_stops_an_export_that_still_computes():
    bench = Bench()
    bench.engine.export(make_spec("a", prompt(40)))
    bench.step()
    bench.engine.release(aid("a"))
    bench.run()
    assert len(bench.runner.batches) == 1
    bench.assert_empty()


def test_a_passed_deadline_ends_what_waits_and_what_runs():
    bench = Bench(max_num_sequences=2, num_blocks=12)
    deadline = Deadline.after(bench.clock, 5.0)
    bench.engine.submit(make_spec("runs", prompt(5), max_tokens=None, deadline=deadline))
    bench.engine.export(make_spec("exports", prompt(20), deadline=deadline))
    bench.engine.submit(make_spec("waits", prompt(5), deadline=deadline))
    bench.engine.reserve(make_spec("reserves", prompt(5), deadline=deadline))
    bench.step()
    assert bench.engine.until_deadline_s() == 5.0
    bench.clock.now_s += 5.0
    bench.run()
    assert bench.ends["runs"].error == bench.ends["waits"].error == DEADLINE_ERROR
    assert bench.ends["runs"].finish is FinishReason.ERROR
    assert bench.exports["exports"][-1].error == DEADLINE_ERROR
    assert bench.exports["exports"][-1].first_token is None
    assert isinstance(bench.refused["reserves"], DeadlineExceeded)
    assert bench.engine.num_sequences == 1
    bench.engine.release(aid("exports"))
    bench.assert_empty()
    assert bench.engine.until_deadline_s() is None


def test_p34_a_deadline_never_takes_blocks_that_others_may_read_or_write():
    bench = Bench()
    deadline = Deadline.after(bench.clock, 5.0)
    bench.engine.export(make_spec("sent", prompt(9), deadline=deadline))
    bench.engine.reserve(make_spec("filled", prompt(9, 3), deadline=deadline))
    bench.run()
    bench.clock.now_s += 9.0
    assert not bench.step()
    assert bench.engine.until_deadline_s() is None
    assert bench.engine.load().num_free_blocks == 32 - 6
    bench.engine.release(aid("sent"))
    bench.engine.release(aid("filled"))
    bench.assert_empty()


# Failures


def test_p30_a_failed_step_fails_its_batch_and_nothing_else():
    bench = Bench(max_num_sequences=2)
    bench.engine.submit(make_spec("a", prompt(5)))
    bench.engine.export(make_spec("b", prompt(5)))
    bench.engine.submit(make_spec("c", prompt(5)))
    bench.runner.fail_next = RuntimeError("token 4711 is secret")
    bench.run()
    assert bench.ends["a"].finish is FinishReason.ERROR
    assert "RuntimeError" in str(bench.ends["a"].error)
    assert "4711" not in str(bench.ends["a"].error)
    assert bench.exports["b"][-1].error is not None
    assert bench.tokens["c"] == true_answer(prompt(5), 4)
    bench.engine.release(aid("b"))
    bench.assert_empty()


def test_p30_a_row_without_a_token_fails_alone_and_its_blocks_are_never_shared():
    bench = Bench()
    bench.sampler.broken_seeds = {13}
    bench.engine.submit(make_spec("a", prompt(5)))
    bench.engine.submit(make_spec("b", prompt(9, 50), seed=13))
    bench.engine.export(make_spec("c", prompt(9, 70), seed=13))
    bench.run()
    assert bench.tokens["a"] == true_answer(prompt(5), 4)
    assert bench.ends["a"].finish is FinishReason.LENGTH
    assert bench.ends["b"].finish is FinishReason.ERROR
    assert "NaN" in str(bench.ends["b"].error)
    assert "NaN" in str(bench.exports["c"][-1].error)
    bench.engine.release(aid("c"))
    bench.answer(make_spec("d", prompt(9, 50)))
    assert bench.ends["d"].num_cached_tokens == 0
    bench.assert_empty()


def test_p13_blocks_of_a_failed_step_are_never_shared():
    bench = Bench()
    bench.runner.fail_next = MemoryError()
    bench.answer(make_spec("a", prompt(9)))
    assert bench.engine.kv_events.drain() == []
    bench.answer(make_spec("b", prompt(9)))
    assert bench.ends["b"].num_cached_tokens == 0


def test_an_id_that_is_here_already_is_refused():
    bench = Bench()
    bench.engine.submit(make_spec("a", prompt(5)))
    for verb in (bench.engine.submit, bench.engine.export, bench.engine.reserve):
        with pytest.raises(Refused, match="draw a new id"):
            verb(make_spec("a", prompt(5)))


@pytest.mark.parametrize(
    ("num_tokens", "num_prompt", "max_tokens", "field"),
    [(0, 0, 4, "num_prompt_tokens"), (5, 6, 4, "num_prompt_tokens"), (9, 5, 4, "token_ids")],
)
def test_a_spec_that_makes_no_sense_is_refused_by_field(
    num_tokens: int, num_prompt: int, max_tokens: int, field: str
):
    bench = Bench()
    with pytest.raises(InvalidRequest) as caught:
        bench.engine.submit(
            make_spec("a", prompt(num_tokens), num_prompt_tokens=num_prompt, max_tokens=max_tokens)
        )
    assert caught.value.field == field
    bench.assert_empty()


# Times


def test_p27_phases_are_back_to_back_and_add_up():
    bench = Bench(max_num_sequences=1)
    clock = bench.clock
    bench.engine.submit(make_spec("first", prompt(5, 9), max_tokens=1))
    bench.engine.submit(make_spec("a", prompt(20), max_tokens=3))
    clock.now_s += 2.0
    bench.step()
    clock.now_s += 1.0
    durations_s = iter((0.5, 0.25, 0.125, 0.125))

    def take_time() -> None:
        clock.now_s += next(durations_s)

    bench.runner.on_forward = take_time
    bench.run()
    end = bench.ends["a"]
    assert [(timing.phase, timing.duration_s) for timing in end.phases] == [
        (Phase.QUEUE, 3.0),
        (Phase.PREFILL, 0.75),
        (Phase.DECODE, 0.25),
    ]
    for before, after in zip(end.phases, end.phases[1:], strict=False):
        assert after.start_ns == before.start_ns + int(before.duration_s * 1e9)
    assert end.phases[1].attributes == {"num_tokens": 20, "num_cached_tokens": 0}
    assert end.phases[2].attributes == {"num_tokens": 3}


def test_the_load_counts_prompt_tokens_that_nobody_has_computed():
    bench = Bench(max_num_sequences=1)
    bench.engine.submit(make_spec("a", prompt(40)))
    bench.engine.submit(make_spec("b", prompt(10)))
    bench.step()
    load = bench.engine.load()
    assert (load.num_running, load.num_waiting, load.queued_prefill_tokens) == (1, 1, 24 + 10)
