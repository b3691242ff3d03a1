"""An OTLP collector in this process: a real gRPC server on a real port that keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True)
class CollectedSpan:
    """One span as the collector got it; ids in hex, `status` is UNSET, OK or ERROR."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    status: str
    status_message: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Collector:
    """Spans and metric names received so far. Thread-safe; waiting has a bound and never polls."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[CollectedSpan] = []
        self._metrics: list[str] = []
        self.accepting = threading.Event()
        self.accepting.set()
        self.endpoint = ""

    @property
    def spans(self) -> list[CollectedSpan]:
        with self._changed:
            return list(self._spans)

    @property
    def metrics(self) -> list[str]:
        with self._changed:
            return list(self._metrics)

    def wait_for(
        self, enough: Callable[[list[CollectedSpan]], bool], timeout_s: float = 10.0
    ) -> list[CollectedSpan]:
        """The spans as soon as `enough` of them say so; AssertionError that lists them otherwise."""
        with self._changed:
            if not self._changed.wait_for(lambda: enough(self._spans), timeout_s):
                raise AssertionError(f"not enough after {timeout_s} s: {[span.name for span in self._spans]}")
            return list(self._spans)

    def add_spans(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        found = [
            CollectedSpan(
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                kind=type(span).SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                status=type(span.status).StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
                status_message=span.status.message,
                start_ns=span.start_time_unix_nano,
                end_ns=span.end_time_unix_nano,
                attributes=_plain(span.attributes),
                resource=_plain(group.resource.attributes),
            )
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self._changed:
            self._spans.extend(found)
            self._changed.notify_all()

    def add_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        found = [
            metric.name
            for group in request.resource_metrics
            for scope in group.scope_metrics
            for metric in scope.metrics
        ]
        with self._changed:
            self._metrics.extend(found)
            self._changed.notify_all()


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._collector.accepting.wait(30.0)
        self._collector.add_spans(request)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._collector.add_metrics(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    """A collector that listens at `.endpoint`. Clear `.accepting` to make it hang like a stuck one."""
    collector = Collector()
    pool = ThreadPoolExecutor(2, thread_name_prefix="otlp-collector")
    server = grpc.server(pool)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(collector), server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(collector), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    collector.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        collector.accepting.set()
        server.stop(None).wait()
        pool.shutdown()


def _plain(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in _typed(attributes)}


def _typed(attributes: Any) -> Iterator[KeyValue]:
    yield from attributes


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
