"""A model's folder read without transformers gives what transformers gives."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from tests.support.tokenizers import BOS, CHAT_TEMPLATE, EOS, FAMILIES, byte_fallback, byte_level, save
from transformers import PreTrainedTokenizerFast

from tandem.errors import InvalidRequest, ModelLoadError
from tandem.model.chat import ChatTemplate
from tandem.model.tokenizer import Tokenizer
from tandem.request import ChatMessage

CHAT = (
    ChatMessage("system", "Be kind."),
    ChatMessage("user", "  Grüß 日本 <b>&amp;</b> 😀 "),
    ChatMessage("assistant", "Hi"),
    ChatMessage("user", "{{ 7 * 7 }}"),
)
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "smol": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou help<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n'"
        " + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "controls": (
        "{% for m in messages %}\n  {% if m.role == 'system' %}\n    {% continue %}\n  {% endif %}\n"
        "{{ m | tojson }}{% if loop.index > 2 %}{% break %}{% endif %}\n{% endfor %}\n"
    ),
    "namespace": (
        "{%- set ns = namespace(found=false) -%}{%- for m in messages -%}"
        "{%- if m.role == 'user' -%}{%- set ns.found = true -%}{%- endif -%}{%- endfor -%}"
        "{{ ns.found }} {{ tools is none }} {{ dict(a=1)['a'] }} {{ messages | tojson(indent=2) }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "tokens": "{{ bos_token }}{{ unk_token }}{% if pad_token is defined %}pad{% endif %}{{ eos_token }}",
}


def folder_of(tmp_path: Path, **config: object) -> Path:
    return save(byte_level(), tmp_path / "model", **config)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_render_as_in_transformers(tmp_path: Path, name: str, add_generation_prompt: bool) -> None:
    folder = folder_of(tmp_path, chat_template=TEMPLATES[name])
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": m.role, "content": m.content} for m in CHAT]
    expected = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    ours = Tokenizer(folder)
    assert ours.apply_chat_template(CHAT, add_generation_prompt=add_generation_prompt) == expected
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(CHAT) == ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_text_encodes_and_decodes_as_in_transformers(
    tmp_path: Path, family: str, add_special_tokens: bool
) -> None:
    folder = save(FAMILIES[family](), tmp_path / "model")
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer(folder)
    for text in ("the cat, naïve", "日本 😀 e\u0301", "a</s>b", " ", ""):
        ids = theirs.encode(text, add_special_tokens=add_special_tokens)
        assert ours.encode(text, add_special_tokens=add_special_tokens) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_kept_when_asked_for(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(byte_fallback(), tmp_path))
    ids = tokenizer.encode("cat")
    assert ids[0] == tokenizer.token_id(BOS)
    assert tokenizer.decode(ids) == "cat"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s> cat"
    assert tokenizer.special_token_ids == {tokenizer.token_id(t) for t in ("<unk>", BOS, EOS)}


def test_vocabulary_counts_added_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder_of(tmp_path))
    added = tokenizer.token_id("<tool call>")
    assert added is not None
    assert tokenizer.vocab_size == added + 1
    assert tokenizer.token_id("no such token") is None


def test_truncation_and_padding_of_the_training_run_are_off(tmp_path: Path) -> None:
    trained = byte_level().from_str(byte_level().to_str())
    trained.enable_truncation(3)
    trained.enable_padding(length=64)
    tokenizer = Tokenizer(save(trained, tmp_path))
    assert tokenizer.encode("z" * 20) == byte_level().encode("z" * 20).ids


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert Tokenizer(folder).apply_chat_template(CHAT) == "from the file"


def test_named_templates_use_the_default_one(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert Tokenizer(folder_of(tmp_path, chat_template=named)).apply_chat_template(CHAT) == "yes"


def test_special_tokens_may_be_described_at_length(tmp_path: Path) -> None:
    described = {"__type": "AddedToken", "content": "<s>", "special": True}
    tokenizer = Tokenizer(folder_of(tmp_path, bos_token=described, chat_template="{{ bos_token }}"))
    assert tokenizer.apply_chat_template(CHAT) == "<s>"


def test_a_chat_without_a_template_is_refused_with_the_cure(tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder_of(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="messages: this model has no chat template; send prompt"):
        tokenizer.encode_chat(CHAT)


def test_p30_a_template_may_refuse_messages(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"messages: .* Unknown role wizard") as caught:
        Tokenizer(folder_of(tmp_path)).encode_chat([ChatMessage("wizard", "hi")])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('bad: ' + messages[0].content) }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ messages[0].content | int / 0 }}",
        "{{ messages[0].__class__.__mro__ }}",
    ],
)
def test_p31_a_refusal_never_quotes_the_prompt(template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(template, {}).render([ChatMessage("user", "canary")])
    assert "canary" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(InvalidRequest, match="unsafe"):
        ChatTemplate("{{ messages.append(1) }}{{ ''.__class__.__mro__ }}", {}).render(CHAT)


def test_a_template_knows_the_date() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2031, 5, 4))
    assert template.render(CHAT) == "04 May 2031"


def test_a_template_that_does_not_parse_names_the_line() -> None:
    with pytest.raises(ModelLoadError, match="line 2"):
        ChatTemplate("a\n{% if %}", {})


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="surrogate pair at character 1"):
        Tokenizer(folder_of(tmp_path)).encode("a\ud800")


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json; save one"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json can't be read"):
        Tokenizer(tmp_path)
    folder = folder_of(tmp_path)
    for content in ("{", json.dumps([1])):
        (folder / "tokenizer_config.json").write_text(content, encoding="utf-8")
        with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
            Tokenizer(folder)


async def test_many_threads_may_encode_and_decode_at_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder_of(tmp_path))
    texts = [f"the cat {n} 日本語 😀" * 20 for n in range(32)]
    ids = await asyncio.gather(*(asyncio.to_thread(tokenizer.encode, text) for text in texts))
    assert ids == [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(i) for i in ids] == texts


def test_neither_torch_nor_transformers_is_loaded() -> None:
    """The gateway runs without them."""
    code = (
        "import sys, tandem.model.tokenizer, tandem.gateway.text\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
