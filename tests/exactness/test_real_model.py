"""The demo model on every way through a cluster, token for token what `transformers` answers.

Rounding differs between ways that cut a prompt into other chunks. It must not decide here, so every
prompt is one whose answer leads its runner-up by far more than rounding gives; see `MIN_MARGIN`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from tests.support.local import Answer, ask, assert_remote, local_cluster, local_settings
from tests.support.reference import BLOCK, greedy_with_margin
from transformers import PreTrainedTokenizerFast

from tandem.config.settings import Settings
from tandem.model.pull import ensure_model
from tandem.model.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(400)

HERE = Path(__file__).parent
NUM_TOKENS = 8
MIN_MARGIN = 0.02
"""In logits. Rounding moves a log-probability by up to 0.005 (P38), wrong keys and values by about 3."""
STARTS = {
    1: 0,
    2: 61,
    3: 122,
    7: 183,
    15: 244,
    16: 305,
    17: 366,
    24: 431,
    31: 488,
    32: 549,
    33: 610,
    47: 671,
    64: 736,
    65: 793,
    100: 854,
    127: 915,
    128: 976,
    129: 1041,
    200: 1098,
    333: 1159,
    512: 1220,
    1023: 600,
    2000: 1600,
}
"""Length of each prompt in tokens, and where in the text it starts. No two begin alike."""
PATTERNS = (
    "👨‍👩‍👧‍👦 🇫🇷 👍🏽\n",
    "東京、京都、大阪。",
    "北京，上海，广州。",
    "🌧️ ☀️ ",
    "e\u0301a\u0308 ",
    "Привет, мир! ",
)


@dataclass(frozen=True)
class Real:
    """The model, and what it must answer."""

    folder: Path

    @cached_property
    def text(self) -> tuple[int, ...]:
        """The tokens that prompts are cut from: prose, code, tables, several scripts, a licence."""
        parts = (HERE / "varied_text.txt", HERE.parents[1] / "LICENSE")
        return tuple(Tokenizer(self.folder).encode("\n".join(part.read_text("utf-8") for part in parts)))

    def prompt(self, length: int) -> tuple[int, ...]:
        start = STARTS[length]
        return self.text[start : start + length]

    def truth(self, length: int) -> tuple[int, ...]:
        tokens, margin = greedy_with_margin(self.folder, self.prompt(length), NUM_TOKENS)
        assert margin > MIN_MARGIN, f"{length} tokens: rounding could decide; start this prompt elsewhere"
        return tokens

    def settings(self, mode: str) -> Settings:
        return local_settings(self.folder, mode, engine={"max_batch_tokens": 512})

    def check(self, answers: Sequence[Answer], lengths: Sequence[int] = tuple(STARTS)) -> None:
        """By length, so that a failure names every prompt that differs."""
        got = dict(zip(lengths, (answer.tokens for answer in answers), strict=True))
        assert got == {length: self.truth(length) for length in lengths}


@pytest.fixture(scope="module", autouse=True)
def all_cores() -> Iterator[None]:
    """This model is large enough to gain from them."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def real() -> Real:
    model = Real(ensure_model("smollm2-135m", progress=False))
    prompts = [model.prompt(length) for length in STARTS]
    assert [len(prompt) for prompt in prompts] == list(STARTS)
    return model


async def test_monolithic(real: Real) -> None:
    async with local_cluster(real.settings("never")) as cluster:
        answers = [await ask(cluster, real.prompt(n), max_tokens=NUM_TOKENS) for n in STARTS]
    real.check(answers)


async def test_disaggregated_cold_and_with_prefix_hits(real: Real) -> None:
    async with local_cluster(real.settings("always")) as cluster:
        cold = [await ask(cluster, real.prompt(n), max_tokens=NUM_TOKENS) for n in STARTS]
        warm = [await ask(cluster, real.prompt(n), max_tokens=NUM_TOKENS) for n in STARTS]
    for answers in (cold, warm):
        real.check(answers)
        for answer in answers:
            assert_remote(answer)
    assert all(answer.usage.cached_tokens == 0 for answer in cold)
    for length, answer in zip(STARTS, warm, strict=True):
        assert answer.usage.cached_tokens == (length - 1) // BLOCK * BLOCK


async def test_disaggregated_each_with_eight_others(real: Real) -> None:
    lengths = sorted(STARTS, key=lambda length: length % 9)  # short and long ones side by side
    answers: list[Answer] = []
    async with local_cluster(real.settings("always")) as cluster:
        for at in range(0, len(lengths), 9):
            batch = (ask(cluster, real.prompt(n), max_tokens=NUM_TOKENS) for n in lengths[at : at + 9])
            answers += await asyncio.gather(*batch)
    real.check(answers, lengths)
    for answer in answers:
        assert_remote(answer)


async def test_p24_streamed_text_of_many_scripts_is_the_one_shot_decode(real: Real) -> None:
    """The model goes on with what it is shown often enough: characters of several tokens each."""
    ours, theirs = Tokenizer(real.folder), PreTrainedTokenizerFast.from_pretrained(real.folder)
    async with local_cluster(real.settings("always")) as cluster:
        calls = (ask(cluster, ours.encode(pattern * 6), max_tokens=40) for pattern in PATTERNS)
        answers = await asyncio.gather(*calls)
    for pattern, answer in zip(PATTERNS, answers, strict=True):
        assert_remote(answer)
        assert len(answer.tokens) == 40
        once = theirs.decode(answer.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert answer.text == once
        assert "\ufffd" not in answer.text.rstrip("\ufffd")  # a last character may be cut short by the limit
        assert sum(not char.isascii() for char in answer.text) >= 4, (pattern, answer.text)
