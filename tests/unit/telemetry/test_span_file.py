from __future__ import annotations

from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.generation import Phase, PhaseTiming
from tandem.telemetry.span_file import SpanFileExporter, read_spans, span_tree
from tandem.telemetry.spans import inject, record_phase, start_span, trace_id
from tandem.telemetry.tracing import set_up_tracing


def test_one_trace_is_put_together_from_the_files_of_several_processes(tmp_path: Path) -> None:
    gateway = set_up_tracing("gateway", "g", trace_dir=tmp_path)
    worker = set_up_tracing("prefill", "p", trace_dir=tmp_path)
    with start_span(gateway.tracer, "request") as request:
        with start_span(worker.tracer, "call", parent=inject(request)) as call:
            record_phase(worker.tracer, PhaseTiming(Phase.PREFILL, 10, 0.001), call)
        # Read while everything still runs: a finished span is on disk at once.
        assert len(read_spans(tmp_path, trace_id(request))) == 2
    with start_span(gateway.tracer, "another request"):
        pass
    gateway.shutdown()
    worker.shutdown()
    spans = read_spans(tmp_path, trace_id(request))
    assert {span.service for span in spans} == {"tandem-gateway", "tandem-prefill"}
    assert [(depth, span.name) for depth, span in span_tree(spans)] == [
        (0, "request"),
        (1, "call"),
        (2, "tandem.prefill"),
    ]
    assert len(read_spans(tmp_path)) == 4
    assert spans[0].duration_s == pytest.approx(0.001)


def test_a_half_written_line_is_skipped_and_a_lost_parent_makes_a_root(tmp_path: Path) -> None:
    tracing = set_up_tracing("gateway", "g", trace_dir=tmp_path)
    with start_span(tracing.tracer, "orphan", parent={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}):
        pass
    tracing.shutdown()
    (file,) = tmp_path.glob("*.jsonl")
    with file.open("a") as stream:
        stream.write('{"trace_id": "ab')
    assert [(depth, span.name) for depth, span in span_tree(read_spans(tmp_path))] == [(0, "orphan")]


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ConfigError, match=r"telemetry\.trace_dir.*file"):
        SpanFileExporter(blocker, "tandem-gateway")
