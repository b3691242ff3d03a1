"""Spans: how one starts, what it says when it ends, and how its context crosses a wire.

Parents are passed by hand (a span, or the W3C headers of a `CallContext`) and no span is made
"current": a span made current inside an async generator leaks into whoever consumes it.
An error's message enters a span only if the error is ours, because only those are known to hold no
prompt text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span as Span
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tandem.errors import Cancelled, DeadlineExceeded, TandemError
from tandem.generation import PhaseTiming
from tandem.telemetry import names
from tandem.telemetry.names import Outcome

Parent = Span | Mapping[str, str] | None
"""Where a span hangs: under a span of this process, under W3C headers, or (None, empty) at a new root."""

_PROPAGATOR = TraceContextTextMapPropagator()


def outcome_of(error: BaseException | None) -> Outcome:
    """Which of the four endings an exception is; None is a good end."""
    if error is None:
        return Outcome.OK
    # GeneratorExit: the reader of a stream closed it, which is how a client goes away.
    if isinstance(error, Cancelled | asyncio.CancelledError | GeneratorExit):
        return Outcome.CANCELLED
    if isinstance(error, DeadlineExceeded | TimeoutError):
        return Outcome.DEADLINE
    return Outcome.ERROR


def end_span(span: Span, error: BaseException | None = None, *, end_ns: int | None = None) -> None:
    """Set status and outcome from `error`, and end the span. A second call changes nothing."""
    mark_outcome(span, outcome_of(error), error)
    span.end(end_ns)


def mark_outcome(span: Span, outcome: Outcome, error: BaseException | None = None) -> None:
    """Set status, `tandem.outcome` and `error.type`, without ending the span.

    For an ending that raised nothing here, e.g. a sequence that a worker reports as cancelled.
    """
    span.set_attribute(names.OUTCOME, outcome.value)
    if outcome is Outcome.OK:
        span.set_status(Status(StatusCode.OK))
        return
    span.set_attribute(names.ERROR_TYPE, outcome.value if error is None else type(error).__qualname__)
    detail = str(error) if isinstance(error, TandemError) else ""
    span.set_status(Status(StatusCode.ERROR, f"{outcome.value}: {detail}" if detail else outcome.value))


def begin_span(
    tracer: Tracer,
    name: str,
    *,
    parent: Parent = None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, AttributeValue] | None = None,
    start_ns: int | None = None,
) -> Span:
    """A span that the caller must end with `end_span` on every path; prefer `start_span`."""
    return tracer.start_span(
        name, context=_context(parent), kind=kind, attributes=dict(attributes or {}), start_time=start_ns
    )


@contextmanager
def start_span(
    tracer: Tracer,
    name: str,
    *,
    parent: Parent = None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Span]:
    """A span around a block; whatever leaves the block decides its status. Does not swallow."""
    span = begin_span(tracer, name, parent=parent, kind=kind, attributes=attributes)
    try:
        yield span
    except BaseException as error:
        end_span(span, error)
        raise
    end_span(span)


def record_phase(tracer: Tracer, timing: PhaseTiming, parent: Parent, outcome: Outcome = Outcome.OK) -> None:
    """Make a span, after the fact, of a phase that was measured where no tracer is (the engine)."""
    span = begin_span(
        tracer,
        names.phase_span(timing.phase),
        parent=parent,
        start_ns=timing.start_ns,
        attributes={
            names.phase_attribute(timing.phase, key): value for key, value in timing.attributes.items()
        },
    )
    mark_outcome(span, outcome)
    span.end(timing.start_ns + round(timing.duration_s * 1e9))


def inject(span: Span) -> dict[str, str]:
    """``traceparent`` and perhaps ``tracestate`` for `CallContext.trace_headers`; keeps "not sampled"."""
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, context=set_span_in_context(span, Context()))
    return headers


def trace_id(span: Span) -> str:
    """32 hex digits to show to the user and to search the collector by."""
    return f"{span.get_span_context().trace_id:032x}"


def _context(parent: Parent) -> Context:
    if isinstance(parent, Span):
        return set_span_in_context(parent, Context())
    return _PROPAGATOR.extract(dict(parent or {}), context=Context())
