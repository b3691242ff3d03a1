"""Spans as JSON lines in a folder: a trace to look at where no collector runs (`make demo`).

Each process appends to its own file, so that nothing needs a lock between processes; `read_spans`
puts one trace together from all of them.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tandem.errors import ConfigError
from tandem.telemetry import names


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One finished span as read back. Times are nanoseconds since the Unix epoch."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    service: str
    start_ns: int
    end_ns: int
    status: str
    attributes: dict[str, Any]

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


class SpanFileExporter(SpanExporter):
    """Appends finished spans to ``<folder>/<service>-<pid>.jsonl``; each line is written whole.

    Raises `ConfigError` when the folder can't be written.
    """

    def __init__(self, folder: Path, service: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"{service}-{os.getpid()}.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"telemetry.trace_dir: can't write to {folder}: {error.strerror}; name a writable folder"
            ) from error
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write and flush: a reader sees the span at once, even if this process is killed next."""
        lines = "".join(json.dumps(_as_json(span)) + "\n" for span in spans)
        with self._lock:
            if self._file.closed:
                return SpanExportResult.FAILURE
            self._file.write(lines)
            self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._file.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing waits here."""
        return True


def read_spans(folder: Path, trace_id: str | None = None) -> list[SpanRecord]:
    """The spans in a folder, of one trace or all, by start time. A half-written last line is skipped."""
    spans: list[SpanRecord] = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                span = SpanRecord(**json.loads(line))
                if trace_id is None or span.trace_id == trace_id:
                    spans.append(span)
    return sorted(spans, key=lambda span: (span.start_ns, span.end_ns))


def span_tree(spans: Sequence[SpanRecord]) -> list[tuple[int, SpanRecord]]:
    """``(depth, span)`` in the order of a printed tree. A span whose parent is not here is a root."""
    known = {span.span_id for span in spans}
    children: dict[str | None, list[SpanRecord]] = {}
    for span in spans:
        children.setdefault(span.parent_id if span.parent_id in known else None, []).append(span)
    rows: list[tuple[int, SpanRecord]] = []
    stack = [(0, span) for span in reversed(children.get(None, []))]
    while stack:
        depth, span = stack.pop()
        rows.append((depth, span))
        stack.extend((depth + 1, child) for child in reversed(children.get(span.span_id, [])))
    return rows


def _as_json(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None, "a finished span has a context"
    return {
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": None if span.parent is None else f"{span.parent.span_id:016x}",
        "name": span.name,
        "service": str(span.resource.attributes.get(names.SERVICE_NAME, "")),
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "status": span.status.status_code.name,
        "attributes": dict(span.attributes or {}),
    }
