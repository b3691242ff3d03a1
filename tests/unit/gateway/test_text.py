"""P25: stop strings neither leak nor cut too much, wherever the tokens' and messages' borders fall."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tokenizers import byte_fallback, byte_level

from tandem.gateway.text import TextAssembler, TextDelta
from tandem.generation import TokenOutput
from tandem.model.detokenizer import IncrementalDetokenizer, TokenBytes


def detokenizer() -> IncrementalDetokenizer:
    return IncrementalDetokenizer(TokenBytes(byte_fallback(strip=False)))


def chars(text: str) -> list[TokenOutput]:
    """One token a byte: the cruellest cut."""
    return [TokenOutput(3 + byte) for byte in text.encode()]


def run(
    tokens: Sequence[TokenOutput],
    stop: tuple[str, ...],
    *,
    min_tokens: int = 0,
    cuts: Sequence[int] = (),
    hidden: frozenset[int] = frozenset(),
) -> tuple[str, int, bool]:
    """Text, tokens kept and whether stopped, when `tokens` come in messages cut at `cuts`."""
    assembler = TextAssembler(detokenizer(), stop, min_tokens, hidden)
    text, kept, stopped = "", 0, False
    for start, end in pairwise([0, *sorted(cuts), len(tokens)]):
        delta = assembler.push(tokens[start:end])
        text += delta.text
        kept += delta.num_tokens_kept
        stopped = delta.stopped
    return text + assembler.finish(), kept, stopped


def reference(text: str, stop: tuple[str, ...], border: int = 0) -> tuple[str, int | None]:
    """The definition, read plainly: the first end past `border` wins, of equal ends the longest.

    The text before the stop string, and where that ends; None without one.
    """
    found = [
        (end, -len(word))
        for word in stop
        for end in range(max(border, 0) + 1, len(text) + 1)
        if text[:end].endswith(word)
    ]
    if not found:
        return text, None
    end, minus_length = min(found)
    return text[: end + minus_length], end


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello STOP world", ("STOP",), "hello "),
        ("STOP", ("STOP",), ""),
        ("ends with STO", ("STOP",), "ends with STO"),
        ("SSTOP", ("STOP",), "S"),
        ("STSTOP", ("STOP",), "ST"),
        ("aab aaab!", ("aaab",), "aab "),
        ("one\n\nUser: two", ("\n\nUser:", "\n\nBot:"), "one"),
        ("日本語。終わり", ("終",), "日本語。"),
        ("x👍🏽y", ("👍🏽",), "x"),
        ("abc", ("abc", "b"), "a"),  # b is complete first
        ("abc", ("c", "bc"), "a"),  # both end at c: the longer one
        ("abcd", ("abcde", "bc"), "a"),  # the shorter one ends inside a longer one's start
        ("abcx", ("abcde", "cx"), "ab"),
        ("no stop", (), "no stop"),
    ],
)
def test_p25_stop_strings(text: str, stop: tuple[str, ...], expected: str) -> None:
    for cuts in ((), range(1, len(text.encode()))):
        assert run(chars(text), stop, cuts=list(cuts))[0] == expected
    assert reference(text, stop)[0] == expected


words = st.text(alphabet="abé", min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(alphabet="abé😀", max_size=24),
    stop=st.lists(words, max_size=4).map(tuple),
    min_tokens=st.integers(0, 12),
    data=st.data(),
)
def test_p25_any_cut_gives_the_one_shot_result(
    text: str, stop: tuple[str, ...], min_tokens: int, data: st.DataObject
) -> None:
    tokens = chars(text)
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=6))
    border = len(text.encode()[:min_tokens].decode(errors="ignore"))
    expected, stop_end = reference(text, stop, border)
    kept = len(tokens) if stop_end is None else len(text[:stop_end].encode())
    at_once = run(tokens, stop, min_tokens=min_tokens)
    assert at_once == run(tokens, stop, min_tokens=min_tokens, cuts=cuts)
    assert at_once == (expected, kept, stop_end is not None)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 345), max_size=24),
    stop=st.lists(st.sampled_from(["t", "at", "the", "e c", "\ufffd", "日"]), max_size=3).map(tuple),
    data=st.data(),
)
def test_p25_real_tokens_of_several_characters(
    ids: list[int], stop: tuple[str, ...], data: st.DataObject
) -> None:
    pieces = TokenBytes(byte_level())
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    assembler = TextAssembler(IncrementalDetokenizer(pieces), stop)
    tokens = [TokenOutput(token_id) for token_id in ids]
    deltas = [assembler.push(tokens[a:b]) for a, b in pairwise([0, *sorted(cuts), len(ids)])]
    text = "".join(delta.text for delta in deltas) + assembler.finish()
    assert text == reference(byte_level().decode(ids), stop)[0]


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abc", max_size=20), stop=st.lists(words, min_size=1, max_size=4).map(tuple))
def test_p25_only_what_may_become_a_stop_string_is_held_back(text: str, stop: tuple[str, ...]) -> None:
    assembler = TextAssembler(detokenizer(), stop)
    shown = ""
    for end, token in enumerate(chars(text), start=1):
        delta = assembler.push([token])
        shown += delta.text
        if delta.stopped:
            return
        held = text[len(shown) : end]
        assert not held or any(word.startswith(held) and word != held for word in stop)
        longest = max(
            (n for word in stop for n in range(1, len(word)) if text[:end].endswith(word[:n])), default=0
        )
        assert len(held) == longest


def test_text_without_a_partial_stop_comes_at_once() -> None:
    assembler = TextAssembler(detokenizer(), ("STOP",))
    assert assembler.push(chars("abc")) == TextDelta("abc", 3, stopped=False)
    assert assembler.push(chars("ST")) == TextDelta("", 2, stopped=False)
    assert assembler.push(chars("!")) == TextDelta("ST!", 1, stopped=False)


def test_tokens_behind_the_stop_do_not_count() -> None:
    assembler = TextAssembler(detokenizer(), ("b",))
    assert assembler.push(chars("abcd")) == TextDelta("a", 2, stopped=True)
    assert assembler.push(chars("e")) == TextDelta("", 0, stopped=True)
    assert assembler.finish() == ""


def test_finish_gives_the_held_text_once() -> None:
    assembler = TextAssembler(detokenizer(), ("STOP",))
    assembler.push(chars("xST"))
    assert assembler.finish() == "ST"
    assert assembler.finish() == ""


def test_finish_shows_an_unfinished_character() -> None:
    assembler = TextAssembler(detokenizer(), ("STOP",))
    assert assembler.push([*chars("ST"), TokenOutput(3 + 0xF0)]).text == ""
    assert assembler.finish() == "ST\ufffd"


def test_p26_stop_strings_wait_for_min_tokens() -> None:
    assert run(chars("a.b.c"), (".",), min_tokens=2) == ("a.b", 4, True)
    assert run(chars("a.b.c"), (".",), min_tokens=1) == ("a", 2, True)
    assert run(chars("a.b"), (".",), min_tokens=3) == ("a.b", 3, False)


def test_a_stop_string_may_begin_before_min_tokens_and_end_after() -> None:
    assert run(chars("xSTOPy"), ("STOP",), min_tokens=4) == ("x", 5, True)
    assert run(chars("xSTOPy"), ("STOP",), min_tokens=5) == ("xSTOPy", 6, False)


def test_a_match_that_came_too_early_is_not_held_back() -> None:
    assembler = TextAssembler(detokenizer(), ("STOP",), 4)
    assert assembler.push(chars("STOP")).text == "STOP"


def test_a_match_that_came_too_early_may_begin_another() -> None:
    for cuts in ((), (1, 2)):
        assert run(chars("abc"), ("ab", "bc"), min_tokens=2, cuts=cuts) == ("a", 3, True)


def test_hidden_tokens_count_but_show_nothing() -> None:
    (hidden,) = chars("!")
    tokens = [*chars("ab"), hidden]
    for stop in ((), ("x",)):
        assert run(tokens, stop, hidden=frozenset({hidden.token_id})) == ("ab", 3, False)


def test_many_long_stop_strings_cost_little_per_character() -> None:
    """Near misses of the longest allowed stops, all alike: no quadratic blow-up."""
    stop = tuple("a" * 255 + chr(ord("b") + n) for n in range(16))
    text = "a" * 5000
    assert run(chars(text), stop) == (text, 5000, False)
