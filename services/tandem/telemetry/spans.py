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
from enum import Enum

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tandem.errors import Cancelled, DeadlineExceeded, TandemError
from tandem.generation import PhaseTiming
from tandem.telemetry import names
from tandem.telemetry.names import Outcome

Parent = Span | Mapping[str, str] | None
"""Where a span hangs: under a span of this process, under W3C headers, or (None, empty) at a new root."""

_PROPAGATOR = TraceContextTextMapPropagator()
_OK_CODE = 0
_CANCELLED_CODE = 1
_DEADLINE_CODE = 4
# For a server, other codes than these are the caller's fault, not a failure of the span.
_SERVER_FAULT_CODES = frozenset({_CANCELLED_CODE, 2, _DEADLINE_CODE, 12, 13, 14, 15})


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


class RpcSide(Enum):
    """Which end of a call a span describes."""

    CLIENT = SpanKind.CLIENT
    SERVER = SpanKind.SERVER


class RpcSpan:
    """One call's span. End it once, by the status code that the other side sees."""

    def __init__(self, span: Span, side: RpcSide) -> None:
        self.span = span
        self._side = side
        self._ended = False

    @property
    def trace_headers(self) -> dict[str, str]:
        """What a client sends along, and what a server hangs its own spans under."""
        return inject(self.span)

    def end(self, code: int, error: BaseException | None = None) -> None:
        """End with a gRPC status code (0 is OK, 1 cancelled, 4 deadline). Later calls change nothing."""
        if self._ended:
            return
        self._ended = True
        self.span.set_attribute(names.RPC_GRPC_STATUS, code)
        outcome = _outcome_of_code(code)
        if self._side is RpcSide.SERVER and code not in _SERVER_FAULT_CODES and code != _OK_CODE:
            self.span.set_attribute(names.OUTCOME, outcome.value)
            if error is not None:
                self.span.set_attribute(names.ERROR_TYPE, type(error).__qualname__)
        else:
            mark_outcome(self.span, outcome, error)
        self.span.end()


def begin_rpc_span(
    tracer: Tracer, side: RpcSide, method: str, *, parent: Parent = None, address: str = ""
) -> RpcSpan:
    """Start a call's span. `method` is gRPC's full name, ``/tandem.v1.InferenceService/Generate``."""
    service, _, name = method.lstrip("/").rpartition("/")
    attributes = {
        names.RPC_SYSTEM: names.RPC_SYSTEM_GRPC,
        names.RPC_SERVICE: service,
        names.RPC_METHOD: name,
    }
    if address:
        attributes[names.SERVER_ADDRESS] = address
    span = begin_span(tracer, method.lstrip("/"), parent=parent, kind=side.value, attributes=attributes)
    return RpcSpan(span, side)


@contextmanager
def rpc_span(
    tracer: Tracer, side: RpcSide, method: str, *, parent: Parent = None, address: str = ""
) -> Iterator[RpcSpan]:
    """A call's span around a block: OK at its end unless `end` was called; errors by their kind.

    An error that leaves the block unclassified counts as UNKNOWN (2); call `end` first to say better.
    """
    call = begin_rpc_span(tracer, side, method, parent=parent, address=address)
    try:
        yield call
    except BaseException as error:
        outcome = outcome_of(error)
        call.end(
            {Outcome.CANCELLED: _CANCELLED_CODE, Outcome.DEADLINE: _DEADLINE_CODE}.get(outcome, 2), error
        )
        raise
    call.end(_OK_CODE)


def _outcome_of_code(code: int) -> Outcome:
    known = {_OK_CODE: Outcome.OK, _CANCELLED_CODE: Outcome.CANCELLED, _DEADLINE_CODE: Outcome.DEADLINE}
    return known.get(code, Outcome.ERROR)


def _context(parent: Parent) -> Context:
    if isinstance(parent, Span):
        return set_span_in_context(parent, Context())
    return _PROPAGATOR.extract(dict(parent or {}), context=Context())
