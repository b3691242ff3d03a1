"""P24: the streamed text, joined, is the text at once; no character is split."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tokenizers import FAMILIES, byte_fallback, byte_level
from tokenizers import decoders, models

from tandem.errors import ModelLoadError
from tandem.model.detokenizer import IncrementalDetokenizer, TokenBytes

TEXTS = [
    "the cat sat on the mat",
    "日本語のテキスト、你好世界",
    "😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "e\u0301 a\u0308\u0323 नमस्ते",
    "  two  spaces \n\n tabs\t",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff \x00 \x7f",
]


def stream(tokenizer: tokenizers.Tokenizer, ids: Sequence[int], cuts: Sequence[int] = ()) -> list[str]:
    """The parts that come out when `ids` are pushed in pieces cut at `cuts`; one by one without."""
    detokenizer = IncrementalDetokenizer(TokenBytes(tokenizer))
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)}) if cuts else range(1, len(ids) + 1)
    parts, start = [], 0
    for end in ends:
        parts.append(detokenizer.push(ids[start:end]))
        start = end
    return [*parts, detokenizer.flush()]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=40)))
def test_p24_streamed_text_is_the_library_decode(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]()
    ids = tokenizer.encode(text).ids
    parts = stream(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    assert not any("\ufffd" in part for part in parts) or "\ufffd" in text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_p24_every_text_survives_the_round_trip(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]()
    assert "".join(stream(tokenizer, tokenizer.encode(text).ids)) == text


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 345), max_size=30), cuts=st.lists(st.integers(1, 30), max_size=4))
def test_p24_any_byte_level_tokens_even_broken_ones(ids: list[int], cuts: list[int]) -> None:
    """Random tokens are mostly broken UTF-8: replacement characters must fall in the same places."""
    assert "".join(stream(byte_level(), ids, cuts)) == byte_level().decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    runs=st.lists(
        st.one_of(
            st.text(min_size=1, max_size=3).map(lambda text: [3 + byte for byte in text.encode()]),
            st.sampled_from([[3 + 0xE4], [3 + 0xFF, 3 + 0x80], [3 + 0xF0, 3 + 0x9F, 3 + 0x98]]),
            st.lists(st.integers(259, 300), min_size=1, max_size=3),
        ),
        max_size=6,
    ),
    cuts=st.lists(st.integers(1, 30), max_size=4),
)
def test_p24_byte_fallback_runs_whole_or_broken(runs: list[list[int]], cuts: list[int]) -> None:
    """Each run is whole or broken throughout, and ends at a plain token: there the library agrees."""
    ids = [token_id for run in runs for token_id in [*run, 270]]
    assert "".join(stream(byte_fallback(), ids, cuts)) == byte_fallback().decode(ids)


def test_p24_a_broken_byte_does_not_void_the_characters_before_it() -> None:
    ids = [3 + byte for byte in "你".encode()] + [3 + 0xFF]
    assert stream(byte_fallback(), ids) == ["", "", "你", "\ufffd", ""]
    assert byte_fallback().decode(ids) == "\ufffd" * 4  # the one difference


@settings(max_examples=200, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    ids=st.lists(st.integers(0, 320), max_size=30),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
)
def test_p24_chunk_borders_change_nothing(family: str, ids: list[int], cuts: list[int]) -> None:
    tokenizer = FAMILIES[family]()
    assert "".join(stream(tokenizer, ids, cuts)) == "".join(stream(tokenizer, ids))


def test_a_character_comes_with_its_last_byte() -> None:
    ids = [3 + byte for byte in "😀é".encode()]
    assert stream(byte_fallback(), ids) == ["", "", "", "😀", "", "é", ""]


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    ids = byte_level().encode("😀").ids[:-1]
    assert ids, "the tiny tokenizer has learnt the emoji as one token"
    *parts, end = stream(byte_level(), ids)
    assert "".join(parts) == ""
    assert end == "\ufffd"


def test_special_tokens_show_only_when_asked_for() -> None:
    tokenizer = byte_level()
    ids = [1, *tokenizer.encode("cat").ids, 2]
    pieces = TokenBytes(tokenizer)
    assert IncrementalDetokenizer(pieces).push(ids) == "cat"
    assert IncrementalDetokenizer(pieces, skip_special_tokens=False).push(ids) == "<s>cat</s>"


def test_an_added_token_that_is_not_special_shows_as_it_is() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a<tool call>b").ids
    assert "".join(stream(tokenizer, ids)) == "a<tool call>b"


def test_ids_without_a_token_show_nothing() -> None:
    """A model's logits are often wider than its tokenizer."""
    assert "".join(stream(byte_level(), [10**6, *byte_level().encode("cat").ids, 10**6])) == "cat"


@pytest.mark.parametrize("family", FAMILIES)
def test_text_behind_a_prompt_continues_it(family: str) -> None:
    tokenizer = FAMILIES[family]()
    prompt = tokenizer.encode("the dog", add_special_tokens=False).ids
    answer = tokenizer.encode("cat the", add_special_tokens=False).ids  # " cat the", as a model says it
    detokenizer = IncrementalDetokenizer(TokenBytes(tokenizer), prompt)
    text = detokenizer.push(answer) + detokenizer.flush()
    assert text == tokenizer.decode(prompt + answer)[len(tokenizer.decode(prompt)) :]


def test_a_character_that_the_prompt_began_is_finished() -> None:
    ids = [3 + byte for byte in "😀".encode()]
    detokenizer = IncrementalDetokenizer(TokenBytes(byte_fallback()), ids[:2])
    assert detokenizer.push(ids[2:]) == "😀"


def test_without_a_decoder_tokens_are_words() -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert "".join(stream(tokenizer, [0, 1, 1])) == tokenizer.decode([0, 1, 1]) == "a b b"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 3, 0)]),
        decoders.Sequence([decoders.Replace(tokenizers.Regex("a+"), " ")]),
    ],
)
def test_an_unknown_decoder_is_refused_by_name(decoder: decoders.Decoder) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.decoder = decoder
    with pytest.raises(ModelLoadError, match="not supported; supported are"):
        TokenBytes(tokenizer)


class CountingTokenizer:
    """A tokenizer that counts the calls into it, and can't decode."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.get_added_tokens_decoder = tokenizer.get_added_tokens_decoder
        self.to_str = tokenizer.to_str
        self._tokenizer = tokenizer
        self.num_lookups = 0

    def id_to_token(self, token_id: int) -> str | None:
        self.num_lookups += 1
        return self._tokenizer.id_to_token(token_id)


def test_a_token_is_looked_up_once_however_long_the_text() -> None:
    """No text is decoded twice: the cost of a token can't grow with what came before."""
    tokenizer = CountingTokenizer(byte_level())
    ids = byte_level().encode("日本語 the cat " * 500).ids
    detokenizer = IncrementalDetokenizer(TokenBytes(tokenizer))  # type: ignore[arg-type]
    text = "".join(detokenizer.push((token_id,)) for token_id in ids)
    assert text == "日本語 the cat " * 500
    assert tokenizer.num_lookups <= len(set(ids)) + 1  # the first token is read as a start, too
