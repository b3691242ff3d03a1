"""Text to token ids and back, for one model's folder, without torch or transformers.

Reads what Hugging Face folders hold: ``tokenizer.json``, ``tokenizer_config.json`` and the chat
template in either of its places. The heavy work runs in the Rust of `tokenizers`, which releases
the GIL: call `encode` in a thread and the event loop goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from tandem.errors import InvalidRequest, ModelLoadError
from tandem.model.chat import ChatTemplate
from tandem.model.detokenizer import IncrementalDetokenizer, TokenBytes
from tandem.request import ChatMessage


class Tokenizer:
    """One model's tokenizer. Safe for threads; a detokenizer of it is not."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelLoadError` for files that are missing, damaged or of an unknown kind."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(
                f"{folder.name}: no tokenizer.json; save one there with "
                "`AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{folder.name}/tokenizer.json can't be read: {error}") from error
        # A file may carry the settings of its training run; a prompt is never cut or filled silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._pieces = TokenBytes(self._tokenizer)
        config = _read_json(folder / "tokenizer_config.json")
        self.special_tokens = _special_tokens(config)
        source = _chat_template_source(folder, config)
        self._chat = ChatTemplate(source, self.special_tokens) if source is not None else None

    @property
    def vocab_size(self) -> int:
        """Tokens known here. A model's logits may be wider: its matrices are padded."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that show no text: start, end, turn markers…"""
        return self._pieces.special_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether `messages` can be taken."""
        return self._chat is not None

    def token_id(self, token: str) -> int | None:
        """The id of one token by its name, e.g. ``<|im_end|>``."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. `add_special_tokens`: with the start token, where the model has one."""
        return self._tokenizer.encode(_encodable(text), add_special_tokens=add_special_tokens).ids

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt text that the model's template makes of a chat. Raises `InvalidRequest`."""
        if self._chat is None:
            raise InvalidRequest("messages", "this model has no chat template; send prompt or token_ids")
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The ids of a chat. The template writes its special tokens itself, so none are added."""
        return self.encode(self.apply_chat_template(messages), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids` as a text of its own: what a detokenizer's parts join to."""
        whole = IncrementalDetokenizer(self._pieces, skip_special_tokens=skip_special_tokens)
        return whole.push(token_ids) + whole.flush()

    def detokenizer(
        self, prompt_tail: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """A new stream of text, behind a prompt that ends with `prompt_tail` if there is one."""
        return IncrementalDetokenizer(self._pieces, prompt_tail, skip_special_tokens=skip_special_tokens)


def _encodable(text: str) -> str:
    """`text`, or `InvalidRequest` if it holds half a surrogate pair, which no UTF-8 can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "prompt", f"holds half a surrogate pair at character {error.start}; send well-formed Unicode"
        ) from None
    return text


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{path.parent.name}/{path.name} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path.parent.name}/{path.name} must hold a JSON object")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like; older files hold a description of each in place of its text."""
    found = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _chat_template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template's file if there is one, else the one in the configuration, named or not."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    inline = config.get("chat_template")
    if isinstance(inline, list):
        inline = {entry["name"]: entry["template"] for entry in inline}.get("default")
    return inline if isinstance(inline, str) else None
