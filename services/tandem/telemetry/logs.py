"""Logs of one process: JSON lines or a console, with trace ids, and never with a user's text.

Write ``log.info("worker ready", extra=fields(worker=…, num_blocks=…))``. Three guards keep prompts
out: request objects in a message's arguments are replaced by their type's name, fields whose names
stand for text are withheld, and a foreign exception shows its type and place but not its message
(a tokeniser's or a template's message may quote its input).
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import IO, Any

from opentelemetry.trace import Span, get_current_span
from rich.console import Console
from rich.text import Text

from tandem.errors import TandemError
from tandem.generation import SequenceSpec
from tandem.request import ChatMessage, Request

_FIELDS = "tandem_fields"
_SPAN = "tandem_span"
_TEXT_TYPES = (Request, ChatMessage, SequenceSpec)
_TEXT_FIELDS = frozenset({"prompt", "messages", "text", "content", "token_ids", "tokens", "stop", "answer"})
_WITHHELD = "<withheld>"
_STYLES = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}


def fields(span: Span | None = None, **values: Any) -> dict[str, Any]:
    """The `extra` of one log call: structured values, and the span it belongs to."""
    return {_FIELDS: values, _SPAN: span}


def set_up_logging(
    role: str, *, level: str = "INFO", as_json: bool = False, stream: IO[str] | None = None
) -> Callable[[], None]:
    """Send this process's logs to `stream` (stderr), ours from `level` up, others' from WARNING up.

    Replaces the root logger's handlers; returns a function that puts the old ones back.
    """
    target = stream if stream is not None else sys.stderr
    handler = logging.StreamHandler(target)
    handler.setFormatter(_JsonFormatter(role) if as_json else _ConsoleFormatter(role, target))
    handler.addFilter(_withhold_arguments)
    root, ours = logging.getLogger(), logging.getLogger("tandem")
    old_handlers, old_level, old_ours = root.handlers[:], root.level, ours.level
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    ours.setLevel(level)

    def restore() -> None:
        handler.flush()
        root.handlers[:] = old_handlers
        root.setLevel(old_level)
        ours.setLevel(old_ours)

    return restore


class _JsonFormatter(logging.Formatter):
    """One JSON object a line, with the field names of OpenTelemetry's log model."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            **_safe_fields(record),  # first, so that a field can't take a reserved name
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
            **_trace_ids(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            entry["exception"] = describe_exception(record.exc_info[1])
        return json.dumps(entry, default=_safe_text)


class _ConsoleFormatter(logging.Formatter):
    """A line for people; coloured when the stream is a terminal."""

    def __init__(self, role: str, stream: IO[str]) -> None:
        super().__init__()
        self._role = role
        self._console = Console(file=stream, soft_wrap=True)

    def format(self, record: logging.LogRecord) -> str:
        line = Text()
        line.append(datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3] + " ", "dim")
        line.append(f"{record.levelname:<7} ", _STYLES.get(record.levelname, ""))
        line.append(f"{self._role} ", "cyan")
        line.append(record.getMessage())
        for key, value in {**_safe_fields(record), **_trace_ids(record)}.items():
            line.append(f" {key}={_safe_text(value)}", "dim")
        if record.exc_info and record.exc_info[1] is not None:
            line.append("\n" + describe_exception(record.exc_info[1]))
        with self._console.capture() as capture:
            self._console.print(line, end="")
        return capture.get()


def describe_exception(error: BaseException) -> str:
    """The chain of an exception, innermost cause first: type and place, and the message where safe.

    Safe are our own errors and the operating system's.
    """
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < 8:
        message = ""
        if isinstance(current, TandemError):
            message = f": {current}"
        elif isinstance(current, OSError) and current.strerror:
            message = f": {current.strerror}"
        frames = "".join(
            f"\n  {frame.filename}:{frame.lineno} in {frame.name}"
            for frame in traceback.extract_tb(current.__traceback__)
        )
        parts.append(f"{type(current).__qualname__}{message}{frames}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\nled to\n".join(reversed(parts))


def _withhold_arguments(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(_safe(value) for value in record.args)
    elif isinstance(record.args, Mapping):
        record.args = {
            key: _WITHHELD if key in _TEXT_FIELDS else _safe(value) for key, value in record.args.items()
        }
    return True


def _safe_fields(record: logging.LogRecord) -> dict[str, Any]:
    values: Mapping[str, Any] = getattr(record, _FIELDS, {})
    return {key: _WITHHELD if key in _TEXT_FIELDS else _safe(value) for key, value in values.items()}


def _safe(value: Any) -> Any:
    if isinstance(value, _TEXT_TYPES):
        return f"<{type(value).__name__}: withheld>"
    if isinstance(value, BaseException):
        return str(value) if isinstance(value, TandemError) else type(value).__qualname__
    return value


def _safe_text(value: Any) -> str:
    return str(_safe(value))


def _trace_ids(record: logging.LogRecord) -> dict[str, str]:
    span: Span | None = getattr(record, _SPAN, None)
    context = (span if span is not None else get_current_span()).get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
