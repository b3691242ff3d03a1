"""Trace context as call metadata, both ways. No other key of a caller gets any further."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.generation import CallContext

_TRACE_KEYS = ("traceparent", "tracestate")
_MAX_VALUE_CHARS = 512


def trace_metadata(context: CallContext | None) -> tuple[tuple[str, str], ...]:
    """The W3C trace headers of `context`, those that metadata can carry."""
    if context is None:
        return ()
    return tuple(
        (key, value)
        for key in _TRACE_KEYS
        if (value := context.trace_headers.get(key)) is not None and _carries(value)
    )


def trace_headers(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """The W3C trace headers among a call's metadata; empty starts a new trace."""
    return {
        key: value
        for key, value in metadata or ()
        if key in _TRACE_KEYS and isinstance(value, str) and _carries(value)
    }


def _carries(value: str) -> bool:
    return 0 < len(value) <= _MAX_VALUE_CHARS and value.isascii() and value.isprintable()
