from __future__ import annotations

from tests.support.engine_fakes import make_spec

from tandem.engine.stopping import StopRule
from tandem.request import FinishReason

EOS = frozenset({2})


def rule(num_prompt: int = 3, max_context: int = 100, **sampling: object) -> StopRule:
    return StopRule.of(make_spec("a", range(10, 10 + num_prompt), **sampling), EOS, max_context)  # type: ignore[arg-type]


def test_end_of_sequence_and_stop_ids_end_it():
    stop = rule(max_tokens=10, stop_token_ids=(7,))
    assert stop.check(2, 4) is FinishReason.STOP
    assert stop.check(7, 4) is FinishReason.STOP
    assert stop.check(5, 4) is None


def test_ignored_end_of_sequence_leaves_stop_ids_in_force():
    stop = rule(max_tokens=10, ignore_eos=True, stop_token_ids=(7,))
    assert stop.check(2, 4) is None
    assert stop.check(7, 4) is FinishReason.STOP


def test_max_tokens_counts_generated_tokens():
    stop = rule(num_prompt=3, max_tokens=2)
    assert stop.check(5, 4) is None
    assert stop.check(5, 5) is FinishReason.LENGTH


def test_a_stop_token_at_the_limit_is_a_stop():
    assert rule(num_prompt=3, max_tokens=2).check(2, 5) is FinishReason.STOP


def test_without_max_tokens_it_goes_to_the_end_of_the_context():
    stop = rule(num_prompt=3, max_context=50, max_tokens=None)
    assert stop.check(5, 49) is None
    assert stop.check(5, 50) is FinishReason.LENGTH


def test_the_context_ends_it_before_max_tokens():
    assert rule(num_prompt=3, max_context=10, max_tokens=90).check(5, 10) is FinishReason.LENGTH


def test_min_tokens_suppresses_until_as_many_were_generated():
    stop = rule(num_prompt=3, max_tokens=10, min_tokens=2, stop_token_ids=(7,))
    assert stop.suppressed(3) == {2, 7}
    assert stop.suppressed(4) == {2, 7}
    assert stop.suppressed(5) == frozenset()
    assert stop.check(2, 5) is None
    assert stop.check(2, 6) is FinishReason.STOP


def test_nothing_is_suppressed_without_min_tokens():
    assert rule(max_tokens=10).suppressed(3) == frozenset()


def test_a_continued_sequence_counts_what_was_generated_before():
    spec = make_spec("a", range(10, 15), num_prompt_tokens=3, max_tokens=4, min_tokens=3)
    stop = StopRule.of(spec, EOS, 100)
    assert stop.suppressed(5) == {2}
    assert stop.suppressed(6) == frozenset()
    assert stop.check(5, 6) is None
    assert stop.check(5, 7) is FinishReason.LENGTH
