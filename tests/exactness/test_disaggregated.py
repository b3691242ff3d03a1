"""Token for token what `transformers` answers, on every way through a cluster, for every family."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.local import ask, assert_remote, local_cluster, local_settings
from tests.support.models import VOCAB_SIZE, Tiny, tiny_model
from tests.support.reference import BLOCK, greedy, prompts, random_prompt

from tandem.generation import Phase

NUM_TOKENS = 12
FAMILIES = pytest.mark.parametrize("kind", Tiny, ids=lambda kind: kind.value)


@FAMILIES
async def test_monolithic_disaggregated_with_prefix_hits_and_batched(kind):
    folder = tiny_model(kind)
    asked = prompts(VOCAB_SIZE)
    truth = [greedy(folder, prompt, NUM_TOKENS) for prompt in asked]
    async with local_cluster(local_settings(folder, "never")) as cluster:
        alone = [await ask(cluster, prompt, max_tokens=NUM_TOKENS) for prompt in asked]
    assert [answer.tokens for answer in alone] == truth
    async with local_cluster(local_settings(folder)) as cluster:
        cold = [await ask(cluster, prompt, max_tokens=NUM_TOKENS) for prompt in asked]
        warm = [await ask(cluster, prompt, max_tokens=NUM_TOKENS) for prompt in asked]
    for answers in (cold, warm):
        assert [answer.tokens for answer in answers] == truth
        for answer in answers:
            assert_remote(answer)
    assert all(answer.usage.cached_tokens == 0 for answer in cold)
    for prompt, answer in zip(asked, warm, strict=True):
        assert answer.usage.cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
    async with local_cluster(local_settings(folder)) as cluster:
        for at in range(0, len(asked), 9):
            batch = asked[at : at + 9]
            answers = await asyncio.gather(*(ask(cluster, p, max_tokens=NUM_TOKENS) for p in batch))
            assert [answer.tokens for answer in answers] == truth[at : at + 9]


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("delta", [-1, 0, 1])
@pytest.mark.parametrize("hit", ["none", "partial", "full"])
@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "loaded"])
async def test_p14_block_borders_with_every_kind_of_prefix_hit(k, delta, hit, loaded):
    folder = tiny_model(Tiny.LLAMA)
    prompt = random_prompt(k * BLOCK + delta, VOCAB_SIZE, seed=5)
    warmed = {"none": (), "partial": prompt[: len(prompt) // 2], "full": prompt}[hit]
    async with local_cluster(local_settings(folder)) as cluster:
        if warmed:
            await ask(cluster, warmed, max_tokens=1)
        load = []
        if loaded:
            load = [
                asyncio.ensure_future(ask(cluster, random_prompt(90, VOCAB_SIZE, seed), max_tokens=20))
                for seed in range(6)
            ]
            await asyncio.sleep(0)
        answer = await ask(cluster, prompt, max_tokens=NUM_TOKENS)
        await asyncio.gather(*load)
    assert_remote(answer)
    assert answer.tokens == greedy(folder, prompt, NUM_TOKENS)


async def test_p33_a_prefix_that_only_the_decode_worker_holds_does_not_shift_the_blocks():
    """D holds the last turn of a chat, P doesn't: P computes all and sends only what D lacks."""
    folder = tiny_model(Tiny.LLAMA)
    first = random_prompt(40, VOCAB_SIZE, seed=6)
    async with local_cluster(local_settings(folder, "never")) as cluster:
        turn = await ask(cluster, first, max_tokens=30)  # on D alone
        prompt = (*first, *turn.tokens, *random_prompt(20, VOCAB_SIZE, seed=7))
        cluster.router.policy = type(cluster.router.policy)(
            mode=local_settings(folder).gateway.disaggregation
        )
        answer = await ask(cluster, prompt, max_tokens=NUM_TOKENS)
    assert_remote(answer)
    assert answer.usage.cached_tokens == 0
    (transfer,) = [timing for timing in answer.phases if timing.phase is Phase.TRANSFER]
    num_blocks = -(-len(prompt) // BLOCK)
    assert 0 < int(transfer.attributes["num_blocks"]) < num_blocks
    assert answer.tokens == greedy(folder, prompt, NUM_TOKENS)


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 1},
        {"max_tokens": 9, "logprobs": 3},
        {"temperature": 0.9, "seed": 11, "max_tokens": 20},
        {"temperature": 1.2, "seed": 12, "top_p": 0.8, "top_k": 40, "max_tokens": 20},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "max_tokens": 20},
        {"repetition_penalty": 1.5, "max_tokens": 20},
        {"logit_bias": {9: 50.0}, "max_tokens": 6},
        {"temperature": 0.7, "seed": 5, "min_p": 0.1, "min_tokens": 4, "max_tokens": 12},
        {"stop_token_ids": tuple(range(3, 260)), "max_tokens": 20},
    ],
    ids=lambda sampling: "-".join(sampling),
)
async def test_p26_disaggregated_is_monolithic(sampling):
    folder = tiny_model(Tiny.LLAMA)
    answers = []
    for mode in ("never", "always"):
        async with local_cluster(local_settings(folder, mode)) as cluster:
            answers.append(
                [await ask(cluster, prompt, **sampling) for prompt in prompts(VOCAB_SIZE, (3, 16, 50, 140))]
            )
    for here, there in zip(*answers, strict=True):
        assert_remote(there)
        assert (here.tokens, here.text, here.finish) == (there.tokens, there.text, there.finish)


async def test_p26_an_end_of_sequence_as_the_first_token():
    folder = tiny_model(Tiny.LLAMA)
    prompt = random_prompt(20, VOCAB_SIZE, seed=8)
    (first,) = greedy(folder, prompt, 1)
    for mode in ("never", "always"):
        async with local_cluster(local_settings(folder, mode)) as cluster:
            answer = await ask(cluster, prompt, stop_token_ids=(first,), max_tokens=20)
        assert answer.tokens == (first,)
        assert answer.finish.value == "stop"
        assert answer.text == ""


async def test_p17_another_tenant_shares_nothing_and_gets_the_same_answer():
    folder = tiny_model(Tiny.LLAMA)
    prompt = random_prompt(100, VOCAB_SIZE, seed=9)
    async with local_cluster(local_settings(folder)) as cluster:
        first = await ask(cluster, prompt, tenant="a")
        again = await ask(cluster, prompt, tenant="a")
        other = await ask(cluster, prompt, tenant="b")
    assert first.tokens == again.tokens == other.tokens
    assert (first.usage.cached_tokens, again.usage.cached_tokens, other.usage.cached_tokens) == (0, 96, 0)
