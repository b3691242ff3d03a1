from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, get_current_span

from tandem.errors import Cancelled, DeadlineExceeded, Draining, PeerLost
from tandem.generation import Phase, PhaseTiming
from tandem.telemetry import names
from tandem.telemetry.names import Outcome
from tandem.telemetry.spans import (
    inject,
    outcome_of,
    record_phase,
    start_span,
    trace_id,
)
from tandem.telemetry.tracing import Tracing

CANARY = "canary-4711"


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


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (PeerLost("gone"), Outcome.ERROR),
        (Draining("going"), Outcome.ERROR),
        (RuntimeError("bug"), Outcome.ERROR),
        (DeadlineExceeded("late"), Outcome.DEADLINE),
        (TimeoutError(), Outcome.DEADLINE),
        (Cancelled("went away"), Outcome.CANCELLED),
        (asyncio.CancelledError(), Outcome.CANCELLED),
        (GeneratorExit(), Outcome.CANCELLED),
    ],
)
def test_p27_each_ending_sets_status_and_outcome(
    tracing: Tracing, memory: InMemorySpanExporter, error: BaseException, outcome: Outcome
) -> None:
    with pytest.raises(type(error)), start_span(tracing.tracer, "work"):
        raise error
    span = only(memory)
    assert outcome_of(error) is outcome
    assert span.status.status_code is StatusCode.ERROR
    assert (span.status.description or "").startswith(outcome.value)
    assert attributes(span)[names.OUTCOME] == outcome.value
    assert attributes(span)[names.ERROR_TYPE] == type(error).__qualname__


def test_p27_a_good_end_is_ok(tracing: Tracing, memory: InMemorySpanExporter) -> None:
    with start_span(tracing.tracer, "work", attributes={"a": 1}):
        pass
    assert only(memory).status.status_code is StatusCode.OK
    assert attributes(only(memory)) == {"a": 1, names.OUTCOME: "ok"}


def test_p31_a_foreign_errors_message_enters_no_span(tracing: Tracing, memory: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match=CANARY), start_span(tracing.tracer, "work"):
        raise ValueError(f"bad template: {CANARY}")
    assert CANARY not in only(memory).to_json()


def test_our_own_errors_message_is_shown(tracing: Tracing, memory: InMemorySpanExporter) -> None:
    with pytest.raises(PeerLost), start_span(tracing.tracer, "work"):
        raise PeerLost("decode-0 closed the connection")
    assert only(memory).status.description == "error: decode-0 closed the connection"


def test_headers_carry_the_trace_across_a_wire(tracing: Tracing, memory: InMemorySpanExporter) -> None:
    with start_span(tracing.tracer, "client") as client:
        headers = inject(client)
    with start_span(tracing.tracer, "server", parent=headers) as server:
        assert trace_id(server) == trace_id(client)
    finished = memory.get_finished_spans()[1]
    assert finished.parent is not None
    assert finished.parent.span_id == client.get_span_context().span_id
    assert set(headers) == {"traceparent"}


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "rubbish"}])
def test_no_or_broken_headers_start_a_new_trace(
    tracing: Tracing, memory: InMemorySpanExporter, headers: dict[str, str] | None
) -> None:
    with start_span(tracing.tracer, "root", parent=headers):
        pass
    assert only(memory).parent is None


def test_an_unsampled_parent_stays_unsampled(tracing: Tracing, memory: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-00"}
    with start_span(tracing.tracer, "server", parent=headers) as span:
        onward = inject(span)
    assert memory.get_finished_spans() == ()
    assert onward["traceparent"].startswith(f"00-{'ab' * 16}-")
    assert onward["traceparent"].endswith("-00")


async def test_a_span_in_a_stream_does_not_leak_into_its_reader(
    tracing: Tracing, memory: InMemorySpanExporter
) -> None:
    async def stream() -> AsyncIterator[int]:
        with start_span(tracing.tracer, "stream"):
            for number in range(3):
                yield number

    reader = stream()
    assert await anext(reader) == 0
    assert not get_current_span().get_span_context().is_valid
    await reader.aclose()  # type: ignore[attr-defined]
    assert attributes(only(memory))[names.OUTCOME] == "cancelled"


async def test_a_cancelled_task_leaves_a_cancelled_span(
    tracing: Tracing, memory: InMemorySpanExporter
) -> None:
    started = asyncio.Event()

    async def work() -> None:
        with start_span(tracing.tracer, "work"):
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert attributes(only(memory))[names.OUTCOME] == "cancelled"


def test_a_measured_phase_becomes_a_span_with_its_own_times(
    tracing: Tracing, memory: InMemorySpanExporter
) -> None:
    timing = PhaseTiming(Phase.TRANSFER, 1_000_000_000, 0.25, {names.NUM_BYTES: 4096, names.WORKER: "p-0"})
    with start_span(tracing.tracer, "request") as parent:
        record_phase(tracing.tracer, timing, parent)
        record_phase(tracing.tracer, timing, inject(parent), Outcome.CANCELLED)
    first, second, request = memory.get_finished_spans()
    assert first.name == "tandem.transfer"
    assert (first.start_time, first.end_time) == (1_000_000_000, 1_250_000_000)
    assert attributes(first)["tandem.transfer.num_bytes"] == 4096
    assert second.status.status_code is StatusCode.ERROR
    for child in (first, second):
        assert child.parent is not None
        assert request.context is not None
        assert child.parent.span_id == request.context.span_id
