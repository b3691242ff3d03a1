from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tandem.errors import InvalidRequest, PeerLost
from tandem.rpc.interceptors import CallObserver
from tandem.telemetry import names
from tandem.telemetry.rpc_spans import (
    RpcSide,
    RpcSpanObserver,
    begin_rpc_span,
    current_call_headers,
    rpc_span,
)
from tandem.telemetry.spans import begin_span, end_span, inject, start_span
from tandem.telemetry.tracing import Tracing


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(memory: InMemorySpanExporter) -> Iterator[Tracing]:
    tracing = Tracing("test", "one", exporters=[memory])
    yield tracing
    tracing.shutdown()


def only(memory: InMemorySpanExporter) -> ReadableSpan:
    (span,) = memory.get_finished_spans()
    return span


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_ending_twice_keeps_the_first_ending(tracing: Tracing, memory: InMemorySpanExporter) -> None:
    span = begin_span(tracing.tracer, "work")
    end_span(span)
    end_span(span, PeerLost("gone"))
    assert attributes(only(memory))[names.OUTCOME] == "ok"
    call = begin_rpc_span(tracing.tracer, RpcSide.CLIENT, "/a.B/C")
    call.end(14, PeerLost("gone"))
    call.end(0)
    assert attributes(memory.get_finished_spans()[1])[names.RPC_GRPC_STATUS] == 14


METHOD = "/tandem.v1.InferenceService/Generate"


@pytest.mark.parametrize(
    ("side", "code", "status", "outcome"),
    [
        (RpcSide.CLIENT, 0, StatusCode.OK, "ok"),
        (RpcSide.SERVER, 0, StatusCode.OK, "ok"),
        (RpcSide.CLIENT, 1, StatusCode.ERROR, "cancelled"),
        (RpcSide.SERVER, 1, StatusCode.ERROR, "cancelled"),
        (RpcSide.SERVER, 4, StatusCode.ERROR, "deadline"),
        (RpcSide.CLIENT, 3, StatusCode.ERROR, "error"),
        (RpcSide.SERVER, 3, StatusCode.UNSET, "error"),  # the caller's fault, not this span's failure
        (RpcSide.SERVER, 13, StatusCode.ERROR, "error"),
    ],
)
def test_an_rpc_span_says_how_the_call_ended(
    tracing: Tracing,
    memory: InMemorySpanExporter,
    side: RpcSide,
    code: int,
    status: StatusCode,
    outcome: str,
) -> None:
    begin_rpc_span(tracing.tracer, side, METHOD, address="decode-0:1234").end(code)
    span = only(memory)
    assert span.name == "tandem.v1.InferenceService/Generate"
    assert span.kind is side.value
    assert span.status.status_code is status
    found = attributes(span)
    found.pop(names.ERROR_TYPE, None)
    assert found == {
        names.RPC_SYSTEM: "grpc",
        names.RPC_SERVICE: "tandem.v1.InferenceService",
        names.RPC_METHOD: "Generate",
        names.RPC_GRPC_STATUS: code,
        names.SERVER_ADDRESS: "decode-0:1234",
        names.OUTCOME: outcome,
    }


@pytest.mark.parametrize(
    ("error", "code"), [(asyncio.CancelledError(), 1), (TimeoutError(), 4), (KeyError("x"), 2)]
)
def test_an_rpc_block_left_by_an_error_gets_a_code(
    tracing: Tracing, memory: InMemorySpanExporter, error: BaseException, code: int
) -> None:
    with pytest.raises(type(error)), rpc_span(tracing.tracer, RpcSide.SERVER, METHOD):
        raise error
    assert attributes(only(memory))[names.RPC_GRPC_STATUS] == code


def test_an_rpc_block_keeps_the_code_it_was_given(tracing: Tracing, memory: InMemorySpanExporter) -> None:
    def work() -> None:
        with rpc_span(tracing.tracer, RpcSide.CLIENT, METHOD) as call:
            error = InvalidRequest("prompt", "must not be empty")
            call.end(3, error)
            raise error

    with pytest.raises(InvalidRequest):
        work()
    assert attributes(only(memory))[names.RPC_GRPC_STATUS] == 3
    assert attributes(only(memory))[names.ERROR_TYPE] == "InvalidRequest"


async def test_the_observer_nests_a_calls_spans_and_keeps_concurrent_calls_apart(
    tracing: Tracing, memory: InMemorySpanExporter
) -> None:
    observer: CallObserver = RpcSpanObserver(tracing.tracer)
    both_started = asyncio.Barrier(2)

    async def serve(headers: Mapping[str, str], code: grpc.StatusCode) -> None:
        observer.started(METHOD, headers)
        await both_started.wait()
        with start_span(tracing.tracer, "service", parent=current_call_headers()):
            pass
        observer.ended(METHOD, code, 0.1)
        assert current_call_headers() == {}

    clients = [begin_span(tracing.tracer, "client") for _ in range(2)]
    codes = [grpc.StatusCode.OK, grpc.StatusCode.CANCELLED]
    await asyncio.gather(*(serve(inject(c), code) for c, code in zip(clients, codes, strict=True)))
    finished = memory.get_finished_spans()
    for client, code in zip(clients, codes, strict=True):
        trace = client.get_span_context().trace_id
        inner, call = (span for span in finished if span.context and span.context.trace_id == trace)
        assert call.parent is not None
        assert call.parent.span_id == client.get_span_context().span_id
        assert inner.parent is not None
        assert call.context is not None
        assert inner.parent.span_id == call.context.span_id
        assert attributes(call)[names.RPC_GRPC_STATUS] == code.value[0]


def test_outside_a_call_there_are_no_headers(tracing: Tracing) -> None:
    assert current_call_headers() == {}
    RpcSpanObserver(tracing.tracer).ended(METHOD, grpc.StatusCode.OK, 0.0)
