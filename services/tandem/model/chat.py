"""Chat templates, rendered as `transformers` renders them, without importing it.

Same sandbox, switches, filters and globals as `transformers.utils.chat_template_utils`, so a
template written for it gives the same prompt here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.errors import InvalidRequest, ModelLoadError
from tandem.request import ChatMessage


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it just renders them."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The block's body, as if the tag weren't there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's compiled template. Immutable; `render` may run in any thread."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens`: ``bos_token`` and the like, as the template names them.

        Raises `ModelLoadError` when the template doesn't parse.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"the chat template doesn't parse, line {error.lineno}: {error.message}; "
                "take it anew from the model's publisher"
            ) from error

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a chat, up to where the assistant speaks next.

        Raises `InvalidRequest` when the template rejects the messages: say, roles out of order.
        """
        chat = [{"role": message.role, "content": message.content} for message in messages]
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": chat,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except Exception as error:  # a template is the publisher's program: it may fail in any way
            raise InvalidRequest("messages", _refusal(error, messages)) from None


def _refusal(error: Exception, messages: Sequence[ChatMessage]) -> str:
    """The template's own words if they are meant for users and quote no message (P31)."""
    reason = str(error)
    quotes = any(message.content.strip() and message.content.strip() in reason for message in messages)
    if not isinstance(error, jinja2.TemplateError) or quotes:
        reason = f"{type(error).__name__} in the template"
    return f"the model's chat template refuses them: {reason}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
