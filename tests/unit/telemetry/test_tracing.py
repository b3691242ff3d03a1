from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from tests.support.otlp import otlp_collector

from tandem.errors import ConfigError
from tandem.telemetry.spans import start_span, trace_id
from tandem.telemetry.tracing import Tracing, set_up_tracing


@pytest.fixture(autouse=True)
def _no_outer_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


def test_spans_reach_a_collector_named_by_the_standard_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        tracing = set_up_tracing("decode", "life-1")
        with start_span(tracing.tracer, "outer") as outer, start_span(tracing.tracer, "inner", parent=outer):
            pass
        tracing.shutdown()
        spans = {span.name: span for span in collector.wait_for(lambda spans: len(spans) == 2)}
    assert spans["inner"].parent_id == spans["outer"].span_id
    assert {span.trace_id for span in spans.values()} == {trace_id(outer)}
    assert spans["outer"].status == "OK"
    assert spans["outer"].resource["service.name"] == "tandem-decode"
    assert spans["outer"].resource["service.instance.id"] == "life-1"


def test_the_head_sampler_is_honoured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracing = set_up_tracing("gateway", "one", trace_dir=tmp_path)
    sampled = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    with start_span(tracing.tracer, "dropped") as dropped:
        assert int(trace_id(dropped), 16) != 0  # the user is still shown an id
    with start_span(tracing.tracer, "kept", parent=sampled):
        pass
    tracing.shutdown()
    (file,) = tmp_path.glob("*.jsonl")
    text = file.read_text()
    assert "kept" in text
    assert "dropped" not in text


def test_shutdown_is_bounded_when_the_collector_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with otlp_collector() as collector:
        collector.accepting.clear()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        tracing = set_up_tracing("gateway", "one")
        with start_span(tracing.tracer, "lost"):
            pass
        began = time.monotonic()
        tracing.shutdown(flush_s=0.2)
        assert time.monotonic() - began < 5.0
        assert collector.spans == []


def test_shutdown_twice_is_one_shutdown() -> None:
    tracing = Tracing("gateway", "one")
    tracing.shutdown()
    tracing.shutdown()


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            "OTEL_EXPORTER_OTLP_PROTOCOL",
        ),
    ],
)
def test_what_we_can_not_do_is_said_at_start(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], named: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=named):
        set_up_tracing("gateway", "one")


def test_none_switches_an_endpoint_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
        tracing = set_up_tracing("gateway", "one")
        with start_span(tracing.tracer, "kept at home"):
            pass
        tracing.shutdown()
        assert collector.spans == []
