from __future__ import annotations

import pytest
from tests.support.engine_fakes import make_settings, make_spec

from tandem.engine.scheduler import Plan, Scheduler
from tandem.engine.sequence import Moment, Purpose, Sequence, Stage, Timeline
from tandem.engine.stopping import StopRule
from tandem.errors import ConfigError, OutOfBlocks, Overloaded
from tandem.kv.pool import BlockPool


class Bench:
    """A scheduler whose steps always succeed and whose sequences never end by themselves."""

    def __init__(self, **changes: int | frozenset[int]) -> None:
        settings = make_settings(**changes)
        self.pool = BlockPool(settings.num_blocks, settings.block_size_tokens)
        self.scheduler = Scheduler(self.pool, settings)
        self.num = 0

    def add(self, num_tokens: int, purpose: Purpose = Purpose.GENERATE, *, priority: int = 0) -> Sequence:
        # Distinct first tokens: nothing is shared unless a test wants it.
        spec = make_spec(f"s{self.num}", [self.num, *range(num_tokens - 1)], priority=priority)
        stop = StopRule.of(spec, (), 1000)
        sequence = Sequence(spec, purpose, self.num, stop, Timeline(Moment(0, 0.0)))
        self.num += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[Sequence, int]]:
        return self.plan().chunks

    def plan(self) -> Plan:
        plan = self.scheduler.schedule()
        for sequence, num_tokens in plan.chunks:
            samples = num_tokens == sequence.num_pending_tokens
            self.scheduler.commit(sequence, num_tokens)
            if samples:
                sequence.append(1)
        return plan


def test_a_long_prompt_is_cut_by_the_budget():
    bench = Bench(max_batch_tokens=16)
    prompt = bench.add(40)
    assert [bench.step() for _ in range(4)] == [[(prompt, 16)], [(prompt, 16)], [(prompt, 8)], [(prompt, 1)]]


def test_decodes_come_first_and_the_prompt_gets_the_rest_of_the_budget():
    bench = Bench(max_batch_tokens=16)
    first, second = bench.add(8), bench.add(8)
    bench.step()
    prompt = bench.add(40)
    assert bench.step() == [(first, 1), (second, 1), (prompt, 14)]


def test_order_is_priority_then_arrival():
    bench = Bench(max_num_sequences=1)
    plain, late, urgent = bench.add(4), bench.add(4), bench.add(4, priority=5)
    assert bench.step() == [(urgent, 4)]
    bench.scheduler.drop(urgent)
    assert bench.step() == [(plain, 4)]
    bench.scheduler.drop(plain)
    assert bench.step() == [(late, 4)]


def test_all_blocks_of_a_prompt_are_taken_when_it_starts():
    bench = Bench(num_blocks=32)
    prompt = bench.add(40)
    bench.step()
    assert len(prompt.block_ids) == 10
    assert bench.pool.num_free == 22


def test_reserved_sequences_count_as_running_ones():
    bench = Bench(max_num_sequences=2)
    reserved = [bench.add(4, Purpose.RECEIVE) for _ in range(3)]
    assert bench.plan().reserved == reserved[:2]
    assert bench.plan().reserved == []
    bench.scheduler.drop(reserved[0])
    assert bench.plan().reserved == reserved[2:]


def test_reservations_pass_a_prompt_that_only_lacks_budget():
    bench = Bench(max_batch_tokens=16)
    running, prompt = bench.add(40), bench.add(8)
    receiver = bench.add(8, Purpose.RECEIVE)
    plan = bench.plan()
    assert plan.started == [running]
    assert plan.reserved == [receiver]
    assert prompt.stage is Stage.WAITING
    late = bench.add(4, Purpose.RECEIVE)
    plan = bench.plan()
    assert plan.chunks == [(running, 16)]
    assert plan.reserved == [late]


def test_p10_a_large_reservation_is_not_overtaken_for_ever():
    bench = Bench(num_blocks=10)
    holder = bench.add(24, Purpose.RECEIVE)
    bench.plan()
    large, small = bench.add(32, Purpose.RECEIVE), bench.add(4, Purpose.RECEIVE)
    prompt = bench.add(4)
    assert bench.plan() == Plan()
    bench.scheduler.drop(holder)
    plan = bench.plan()
    assert plan.reserved == [large, small]
    assert plan.started == [prompt]


def test_the_last_in_order_is_preempted_and_comes_back_first():
    bench = Bench(num_blocks=5, max_num_sequences=4)
    first, second = bench.add(7), bench.add(7)
    bench.step()
    third = bench.add(4)
    while second.stage is Stage.RUNNING:
        bench.step()
    assert first.stage is Stage.RUNNING
    assert second.num_computed_tokens == 0
    assert list(second.block_ids) == []
    assert bench.scheduler.waiting == [second, third]
    bench.scheduler.drop(first)
    assert bench.plan().started == [second, third]
    # What it gave up was still cached: only the last token is computed again.
    assert second.num_computed_tokens == second.num_tokens - 1


def test_exported_and_reserved_sequences_are_never_preempted():
    bench = Bench(num_blocks=6, max_batch_tokens=8)
    running = bench.add(3)
    bench.step()
    exported, reserved = bench.add(8, Purpose.EXPORT), bench.add(4, Purpose.RECEIVE)
    bench.plan()
    bench.scheduler.hold(exported)
    while running.stage is Stage.RUNNING:
        bench.step()
    assert exported.stage is Stage.HELD
    assert len(exported.block_ids) == 2
    assert reserved.stage is Stage.RESERVED
    assert bench.plan() == Plan()
    bench.scheduler.drop(exported)
    assert bench.plan().started == [running]


def test_an_export_in_mid_prompt_is_not_preempted_for_a_decode():
    bench = Bench(num_blocks=9, max_batch_tokens=8)
    running = bench.add(7)
    bench.step()
    exported = bench.add(24, Purpose.EXPORT)
    bench.step()
    running.token_ids.extend([1] * 4)
    running.num_computed_tokens += 4
    bench.step()
    assert running.stage is Stage.WAITING
    assert exported.stage is Stage.RUNNING
    assert exported.num_computed_tokens > 7


def test_a_start_leaves_a_block_for_each_running_sequence():
    bench = Bench(num_blocks=5)
    running = bench.add(4)
    bench.step()
    waiting = bench.add(12)
    assert bench.step() == [(running, 1)]
    assert waiting.stage is Stage.WAITING
    assert bench.scheduler.running == [running]


def test_what_can_never_fit_is_refused_at_once():
    bench = Bench(num_blocks=4)
    with pytest.raises(OutOfBlocks) as caught:
        bench.add(17)
    assert caught.value.wanted == 5
    assert bench.scheduler.waiting == []


def test_a_full_queue_refuses_and_says_when_to_come_back():
    bench = Bench(max_waiting=1)
    bench.scheduler.retry_after_s = 2.5
    bench.add(4)
    with pytest.raises(Overloaded) as caught:
        bench.add(4)
    assert caught.value.retry_after_s == 2.5
    with pytest.raises(OutOfBlocks):
        bench.add(4, Purpose.RECEIVE)


def test_a_budget_below_one_token_a_sequence_is_a_wrong_setting():
    with pytest.raises(ConfigError, match="max_batch_tokens"):
        make_settings(max_batch_tokens=4, max_num_sequences=5)


@pytest.mark.parametrize("name", ["num_blocks", "max_context_tokens", "max_waiting", "max_num_sequences"])
def test_a_size_of_zero_is_a_wrong_setting(name: str):
    with pytest.raises(ConfigError, match=name):
        make_settings(**{name: 0})


def test_a_prefix_match_never_covers_the_last_token():
    bench = Bench()
    first = bench.add(8)
    bench.step()
    spec = make_spec("twin", first.spec.token_ids)
    twin = Sequence(spec, Purpose.GENERATE, 99, first.stop, Timeline(Moment(0, 0.0)))
    bench.scheduler.add(twin)
    chunks = bench.step()
    assert (twin, 4) in chunks
    assert twin.num_cached_tokens == 4
    assert twin.block_ids[0] == first.block_ids[0]
    assert twin.block_ids[1] != first.block_ids[1]
