"""Spans of remote calls, on both sides. gRPC's status codes come as numbers: the library stays in `rpc`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, Protocol

from opentelemetry.trace import Span, SpanKind, Tracer

from tandem.telemetry import names
from tandem.telemetry.names import Outcome
from tandem.telemetry.spans import Parent, begin_span, inject, mark_outcome, outcome_of

_OK = 0
_CANCELLED = 1
_UNKNOWN = 2
_DEADLINE_EXCEEDED = 4
# For a server, other codes than these (UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS among them)
# are the caller's fault, not a failure of the span.
_SERVER_FAULTS = frozenset({_CANCELLED, _UNKNOWN, _DEADLINE_EXCEEDED, 12, 13, 14, 15})
_OUTCOMES = {_OK: Outcome.OK, _CANCELLED: Outcome.CANCELLED, _DEADLINE_EXCEEDED: Outcome.DEADLINE}
_CODES = {Outcome.CANCELLED: _CANCELLED, Outcome.DEADLINE: _DEADLINE_EXCEEDED}


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
        outcome = _OUTCOMES.get(code, Outcome.ERROR)
        if self._side is RpcSide.SERVER and code != _OK and code not in _SERVER_FAULTS:
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
        call.end(_CODES.get(outcome_of(error), _UNKNOWN), error)
        raise
    call.end(_OK)


class StatusCode(Protocol):
    """What `grpc.StatusCode` looks like from here: an enum whose value starts with the number."""

    @property
    def value(self) -> Any:
        """``(number, text)``."""
        ...


_current_call: ContextVar[RpcSpan | None] = ContextVar("tandem_rpc_span", default=None)


def current_call_headers() -> dict[str, str]:
    """The headers of the server span of the call that this task serves; empty outside of one.

    For the servicer that makes a `CallContext` from a call, and nobody else: a service that calls
    another in its own process still runs in this task.
    """
    call = _current_call.get()
    return {} if call is None else call.trace_headers


class RpcSpanObserver:
    """One server span a call; told by the gRPC interceptor, in the call's own task."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def started(self, method: str, headers: Mapping[str, str]) -> None:
        """Open the span under the caller's trace context."""
        _current_call.set(begin_rpc_span(self._tracer, RpcSide.SERVER, method, parent=headers))

    def ended(self, method: str, code: StatusCode, duration_s: float) -> None:
        """Close it with the status that the caller sees."""
        call = _current_call.get()
        if call is not None:
            call.end(int(code.value[0]))
            _current_call.set(None)
