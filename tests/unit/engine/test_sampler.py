"""What a draw depends on, what it must not depend on, and the field's definitions of each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tandem.engine.batch import SamplingRow
from tandem.engine.sampler import Sampler, _cutoffs, _mix64, uniform
from tandem.errors import InternalError
from tandem.generation import TokenOutput
from tandem.request import SamplingParams

VOCAB = 1000


def row(
    params: SamplingParams | None = None,
    *,
    seed: int = 7,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    suppress: frozenset[int] = frozenset(),
) -> SamplingRow:
    return SamplingRow(params or SamplingParams(), seed, position, prompt, output, suppress)


def tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[TokenOutput]:
    results = Sampler().sample(logits, rows)
    assert len(results) == len(rows)
    return [result for result in results if isinstance(result, TokenOutput)]


def ids(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    return [token.token_id for token in tokens(logits, rows)]


def draws(logits: torch.Tensor, params: SamplingParams, num_draws: int) -> Counter[int]:
    """Counts over many positions of one distribution [V]."""
    drawn: Counter[int] = Counter()
    for start in range(0, num_draws, 500):
        rows = [row(params, position=position) for position in range(start, start + 500)]
        drawn.update(ids(logits.expand(500, -1), rows))
    return drawn


def logits_of(num_rows: int, *, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def assert_fits(drawn: Counter[int], expected: torch.Tensor) -> None:
    """Chi-square of the counts against probabilities [V], bins of few expected draws put together."""
    total = drawn.total()
    big = (expected * total >= 10).nonzero()[:, 0].tolist()
    bins = [(drawn[i], float(expected[i]) * total) for i in big]
    rest = total - sum(count for count, _ in bins), total - sum(mean for _, mean in bins)
    statistic = sum((count - mean) ** 2 / mean for count, mean in [*bins, rest] if mean > 1)
    assert statistic < len(bins) + 5 * (2 * len(bins)) ** 0.5 + 5, statistic
    assert all(expected[i] > 0 for i in drawn)


GREEDY = SamplingParams(temperature=0.0)


def test_greedy_is_argmax_and_takes_no_chance() -> None:
    logits = logits_of(8)
    assert ids(logits, [row(GREEDY, seed=seed) for seed in range(8)]) == logits.argmax(-1).tolist()


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    logits = logits_of(2)
    assert ids(logits, [row(SamplingParams(temperature=1e-30))] * 2) == logits.argmax(-1).tolist()


def test_a_tiny_temperature_finds_the_maximum() -> None:
    logits = logits_of(2)
    assert ids(logits, [row(SamplingParams(temperature=2e-5))] * 2) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        (SamplingParams(top_k=5), [TopKLogitsWarper(5)]),
        (SamplingParams(top_k=400), [TopKLogitsWarper(400)]),
        (SamplingParams(top_p=0.7), [TopPLogitsWarper(0.7)]),
        (SamplingParams(top_p=0.01), [TopPLogitsWarper(0.01)]),
        (SamplingParams(min_p=0.05), [MinPLogitsWarper(0.05)]),
        (SamplingParams(top_k=50, top_p=0.8), [TopKLogitsWarper(50), TopPLogitsWarper(0.8)]),
        (
            SamplingParams(top_k=600, top_p=0.95, min_p=0.01),
            [TopKLogitsWarper(600), TopPLogitsWarper(0.95), MinPLogitsWarper(0.01)],
        ),
    ],
)
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_filters_keep_what_transformers_keeps(
    params: SamplingParams, processors: list[LogitsProcessor], scale: float
) -> None:
    """A small scale is a flat distribution: its nucleus lies beyond the sampler's window."""
    logits = logits_of(1, scale=scale)
    expected = logits.clone()
    for processor in processors:
        expected = processor(torch.zeros(1, 1, dtype=torch.long), expected)
    probabilities = expected.softmax(-1)[0]
    drawn = draws(logits[0], params, 8_000)
    assert_fits(drawn, probabilities)
    likely = (probabilities * 8_000 > 20).nonzero()[:, 0].tolist()
    assert set(likely) <= set(drawn)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 3, 255, 256, 257, 900, 1000, 5000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
)
def test_the_cut_lies_exactly_where_transformers_cuts(
    seed: int, scale: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = logits_of(1, seed=seed, scale=scale)
    expected = logits.clone()
    nothing = torch.LongTensor([[0]])
    if top_k:
        expected = TopKLogitsWarper(min(top_k, VOCAB))(nothing, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(nothing, expected)
    expected = MinPLogitsWarper(min_p)(nothing, expected) if min_p else expected
    weights = (logits - logits.max()).exp()
    cutoffs = _cutoffs(weights, [row(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))])
    kept = weights >= (0.0 if cutoffs is None else cutoffs)
    assert torch.equal(kept, expected > -torch.inf)


def test_plain_temperature_draws_from_the_softmax() -> None:
    logits = logits_of(1)[0]
    assert_fits(draws(logits, SamplingParams(temperature=1.7), 8_000), (logits / 1.7).softmax(-1))


def test_a_wide_flat_tail_keeps_its_mass() -> None:
    """One token holds half the mass, 60,000 share the rest: float32 alone would round the tail away."""
    logits = torch.zeros(60_001)
    logits[0] = torch.tensor(60_000.0).log()
    drawn = draws(logits, SamplingParams(), 4000)
    assert abs(drawn[0] - 2000) < 200
    tail = [token for token in drawn.elements() if token]
    assert abs(sum(tail) / len(tail) - 30_000) < 1500


def test_ties_at_the_cut_are_all_kept() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 2.0, 1.0])
    assert set(draws(logits, SamplingParams(top_k=2), 500)) == {1, 2, 3}


def test_top_k_of_one_is_the_maximum() -> None:
    logits = logits_of(4)
    assert ids(logits, [row(SamplingParams(top_k=1))] * 4) == logits.argmax(-1).tolist()


def test_repetition_penalty_is_transformers_over_prompt_and_output() -> None:
    logits = logits_of(1)
    prompt, output = [1, 2, 3, 3], [4, 2]
    expected = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([prompt + output]), logits.clone())
    params = SamplingParams(temperature=1.0, repetition_penalty=1.8)
    drawn: Counter[int] = Counter()
    for start in range(0, 8_000, 500):
        rows = [row(params, position=p, prompt=prompt, output=output) for p in range(start, start + 500)]
        drawn.update(ids(logits.expand(500, -1), rows))
    assert_fits(drawn, expected.softmax(-1)[0])


def test_repetition_penalty_makes_a_token_less_likely_on_either_side_of_zero() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert ids(torch.tensor([[3.0, 2.0]]), [row(params, prompt=[0])]) == [1]
    assert ids(torch.tensor([[-2.0, -3.0]]), [row(params, output=[0])]) == [1]


def test_frequency_counts_and_presence_does_not_over_the_output_only() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.2]])
    output = [1, 1, 1, 2]

    def best(frequency: float, presence: float) -> int:
        params = SamplingParams(temperature=0.0, frequency_penalty=frequency, presence_penalty=presence)
        return ids(logits, [row(params, prompt=[3, 3, 3], output=output)])[0]

    assert best(0.4, 0.0) == 1  # 1.8, 1.6, 1.2
    assert best(0.6, 0.0) == 2  # 1.2, 1.4, 1.2
    assert best(0.0, 1.9) == 3  # 1.1, 0.1, 1.2
    assert best(0.0, 1.7) == 1  # 1.3, 0.3, 1.2: the prompt's tokens pay nothing
    assert best(0.0, -2.0) == 1


def test_bias_comes_before_penalties() -> None:
    """3 + 1 halved is 2; 3 halved plus 1 would be 2.5 and beat the neighbour's 2.2."""
    logits = torch.tensor([[2.2, 3.0]])
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, logit_bias={1: 1.0})
    assert ids(logits, [row(params, prompt=[1])]) == [0]


def test_logit_bias_bans_and_forces() -> None:
    logits = logits_of(1)
    best = int(logits.argmax())
    banned = SamplingParams(temperature=0.0, logit_bias={best: -100.0})
    forced = SamplingParams(logit_bias={17: 100.0})
    assert ids(logits, [row(banned)]) == [int(logits.topk(2).indices[0, 1])]
    assert draws(logits[0], forced, 500) == {17: 500}


def test_suppressed_tokens_are_never_drawn() -> None:
    logits = torch.zeros(500, 4)
    rows = [row(position=p, suppress=frozenset({0, 2})) for p in range(500)]
    assert set(ids(logits, rows)) == {1, 3}
    assert ids(torch.tensor([[9.0, 1.0]]), [row(GREEDY, suppress=frozenset({0}))]) == [1]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_p26_a_draw_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    kinds = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        top_k=st.sampled_from([0, 3, 300]),
        top_p=st.sampled_from([0.5, 0.99, 1.0]),
        min_p=st.sampled_from([0.0, 0.1]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        logprobs=st.sampled_from([None, 0, 3]),
        logit_bias=st.sampled_from([{}, {5: 2.0}]),
    )
    params = data.draw(st.lists(kinds, min_size=1, max_size=6))
    logits = logits_of(len(params), seed=data.draw(st.integers(0, 99)))
    rows = [row(p, seed=i * 31, position=i + 9, prompt=[1, 2], output=[3, 3]) for i, p in enumerate(params)]
    together = tokens(logits, rows)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = tokens(logits[list(order)], [rows[i] for i in order])
    alone = [tokens(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    assert [t.token_id for t in together] == [t.token_id for t in alone]
    assert [shuffled[list(order).index(i)].token_id for i in range(len(rows))] == [t.token_id for t in alone]
    for one, other in zip(together, alone, strict=True):
        assert [t.token_id for t in one.top] == [t.token_id for t in other.top]


def test_p26_a_draw_is_a_function_of_seed_and_position() -> None:
    logits = torch.zeros(1, VOCAB).expand(64, -1)
    first = ids(logits, [row(seed=1, position=p) for p in range(64)])
    assert first == ids(logits, [row(seed=1, position=p) for p in range(64)])
    assert first != ids(logits, [row(seed=2, position=p) for p in range(64)])
    assert len(set(first)) > 48


def test_the_uniform_numbers_are_these_on_every_worker() -> None:
    """Golden: a change would make a migrated sequence go on differently on an older worker."""
    numbers = [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(2**63 - 1, 2**20)]
    assert numbers == pytest.approx(
        [0.217225946381531, 0.700204194565014, 0.505750528709346, 0.670263612937168], abs=1e-15
    )


def test_the_mixer_is_splitmix64() -> None:
    """The first two numbers of the reference generator seeded with 0 (Vigna's splitmix64.c)."""
    assert _mix64(0) == 0xE220A8397B1DCDAF
    assert _mix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_uniform_numbers_of_near_seeds_and_positions_are_independent() -> None:
    near = [[uniform(seed, position) for position in range(200)] for seed in range(200)]
    numbers = torch.tensor(near, dtype=torch.float64)
    assert 0.0 <= float(numbers.min()) < float(numbers.max()) < 1.0
    assert abs(float(numbers.mean()) - 0.5) < 0.01
    for variables in (numbers, numbers.T):
        assert float((torch.corrcoef(variables) - torch.eye(200)).abs().max()) < 0.4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_raw_models_chosen_and_best(temperature: float) -> None:
    logits = logits_of(2)
    params = SamplingParams(
        temperature=temperature, logprobs=4, top_k=2, repetition_penalty=3.0, logit_bias={0: 50.0}
    )
    expected = logits.log_softmax(-1)
    outputs = tokens(logits, [row(params, prompt=[1, 2, 3]), row(GREEDY)])
    assert outputs[0].token_id == 0
    assert outputs[0].logprob == pytest.approx(float(expected[0, 0]))
    best = expected[0].topk(4)
    assert [t.token_id for t in outputs[0].top] == best.indices.tolist()
    assert [t.logprob for t in outputs[0].top] == pytest.approx(best.values.tolist())
    assert outputs[1].logprob is None
    assert outputs[1].top == ()


def test_logprobs_zero_is_the_chosen_token_only() -> None:
    (output,) = tokens(logits_of(1), [row(SamplingParams(logprobs=0))])
    assert output.logprob is not None
    assert output.top == ()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, logprobs=2)])
def test_p30_a_broken_row_fails_alone(bad: float, params: SamplingParams) -> None:
    logits = logits_of(3)
    expected = Sampler().sample(logits, [row(params)] * 3)
    logits[1, 5] = bad
    results = Sampler().sample(logits, [row(params, position=0)] * 3)
    assert isinstance(results[1], InternalError)
    assert "position 0" in str(results[1])
    assert [results[0], results[2]] == [expected[0], expected[2]]


def test_a_row_with_every_token_suppressed_fails_alone() -> None:
    results = Sampler().sample(torch.zeros(2, 2), [row(suppress=frozenset({0, 1})), row()])
    assert isinstance(results[0], InternalError)
    assert isinstance(results[1], TokenOutput)


def test_logits_are_left_as_they_were() -> None:
    logits = logits_of(2)
    before = logits.clone()
    params = SamplingParams(repetition_penalty=2.0, logit_bias={1: 5.0}, top_p=0.5)
    Sampler().sample(logits, [row(params, prompt=[1], suppress=frozenset({3})), row(GREEDY)])
    assert torch.equal(logits, before)


def test_half_precision_logits_are_taken() -> None:
    logits = logits_of(4).bfloat16()
    assert ids(logits, [row(GREEDY)] * 4) == logits.argmax(-1).tolist()
    assert ids(logits, [row()] * 4) == ids(logits.float(), [row()] * 4)


def test_no_rows_no_tokens() -> None:
    assert Sampler().sample(torch.zeros(0, 5), []) == []


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 513])
def test_any_vocabulary_size(vocab: int) -> None:
    drawn = draws(torch.zeros(vocab), SamplingParams(top_k=200, top_p=0.999), 2000)
    assert set(drawn) <= set(range(vocab))
    assert len(drawn) > vocab * 0.9
