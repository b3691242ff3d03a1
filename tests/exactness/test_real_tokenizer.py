"""The demo model's own tokenizer and chat template, if a `make demo` or `ensure_model` has fetched it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tandem.model.tokenizer import Tokenizer
from tandem.request import ChatMessage

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "日本語のテキスト、你好世界。한국어",
    "😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "e\u0301 a\u0308\u0323 नमस्ते ภาษาไทย עִבְרִית",
    "def f(x):\n\treturn {'a': [1, 2.5e-3]}  # <|im_end|> \r\n\n\n",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff \x00",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    cache = Path(os.environ.get("TANDEM_CACHE", "~/.cache/tandem")).expanduser()
    found = sorted(cache.rglob("tokenizer_config.json")) if cache.is_dir() else []
    if not found:
        pytest.skip("no model in the cache; `make demo` fetches one")
    return found[0].parent


@pytest.mark.parametrize("text", TEXTS)
def test_p24_tokens_and_streamed_text_are_transformers(folder: Path, text: str) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer(folder)
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    stream = ours.detokenizer()
    parts = [stream.push((token_id,)) for token_id in ids] + [stream.flush()]
    assert not any("\ufffd" in part for part in parts)
    expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(parts) == ours.decode(ids) == expected
    assert ours.decode(ids, skip_special_tokens=False) == text


def test_the_chat_template_is_transformers(folder: Path) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer(folder)
    if not ours.has_chat_template:
        pytest.skip("the cached model has no chat template")
    for roles in (["user"], ["system", "user", "assistant", "user"]):
        chat = [ChatMessage(role, f"{role} says: 你好 {{{{x}}}}\n") for role in roles]
        plain = [{"role": message.role, "content": message.content} for message in chat]
        text = theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        assert ours.apply_chat_template(chat) == text
        ids = theirs.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(chat) == ids
