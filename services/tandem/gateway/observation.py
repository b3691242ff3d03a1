"""One request as its operators see it: a span, its phases, its timeline and its counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from tandem.clock import Clock
from tandem.generation import CallContext, Phase, PhaseTiming
from tandem.request import FinishReason, Request, Usage
from tandem.telemetry import names
from tandem.telemetry.metrics import GatewayMetrics
from tandem.telemetry.names import Operation
from tandem.telemetry.spans import (
    Span,
    Tracer,
    begin_span,
    end_span,
    inject,
    outcome_of,
    record_phase,
    trace_id,
)
from tandem.telemetry.timeline import Timeline


class Observation:
    """Begins with the request and ends exactly once, by `finish`. Mutable."""

    def __init__(
        self,
        request: Request,
        context: CallContext,
        model_id: str,
        *,
        clock: Clock,
        tracer: Tracer,
        metrics: GatewayMetrics | None,
    ) -> None:
        self.usage = Usage()
        self.phases: list[PhaseTiming] = []
        self._clock = clock
        self._tracer = tracer
        self._metrics = metrics
        self._start_s = clock.monotonic_s()
        self._token_times_s: list[float] = []
        self._finish_reasons: list[str] = []
        self._ended = False
        operation = Operation.TEXT_COMPLETION if request.messages is None else Operation.CHAT
        self._span = begin_span(
            tracer,
            names.request_span(operation, model_id),
            parent=context.trace_headers,
            attributes=_request_attributes(request, operation, model_id),
        )
        self.trace_id = trace_id(self._span)
        self.trace_headers = inject(self._span)
        if metrics is not None:
            metrics.request_started()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[dict[str, int | float | str]]:
        """Time a phase that runs here; the block may add attributes."""
        attributes: dict[str, int | float | str] = {}
        start_ns, start_s = self._clock.wall_ns(), self._clock.monotonic_s()
        try:
            yield attributes
        finally:
            duration_s = self._clock.monotonic_s() - start_s
            self.add_phases((PhaseTiming(phase, start_ns, duration_s, attributes),))

    def add_phases(self, phases: Iterable[PhaseTiming]) -> None:
        """Note phases that ended. Those of workers have their spans already; ours get them now."""
        for timing in phases:
            self.phases.append(timing)
            if names.WORKER not in timing.attributes:
                record_phase(self._tracer, timing, self._span)

    def add_tokens(self, num_tokens: int) -> None:
        """Tokens go to the client now."""
        self._token_times_s.extend([self._clock.monotonic_s()] * num_tokens)

    def add_finish(self, reason: FinishReason) -> None:
        """One choice has ended."""
        self._finish_reasons.append(reason.value)

    def finish(self, error: BaseException | None = None) -> None:
        """End the span and count the request. Later calls change nothing."""
        if self._ended:
            return
        self._ended = True
        timeline = Timeline(self._start_s, tuple(self._token_times_s), self._clock.monotonic_s())
        _describe_end(self._span, timeline, self.usage, self._finish_reasons)
        end_span(self._span, error)
        if self._metrics is not None:
            self._metrics.request_ended(timeline, outcome_of(error), self.usage)


def _request_attributes(
    request: Request, operation: Operation, model_id: str
) -> dict[str, str | int | float | bool]:
    sampling = request.sampling
    optional = {
        names.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.GEN_AI_REQUEST_SEED: sampling.seed,
        names.GEN_AI_CONVERSATION: request.session_id or None,
        names.REQUEST_ID: request.request_id or None,
    }
    return {
        names.GEN_AI_OPERATION: operation.value,
        names.GEN_AI_PROVIDER: names.PROVIDER,
        names.GEN_AI_REQUEST_MODEL: model_id,
        names.GEN_AI_REQUEST_STREAM: True,
        names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
        names.GEN_AI_REQUEST_CHOICES: sampling.n,
        **{key: value for key, value in optional.items() if value is not None},
    }


def _describe_end(span: Span, timeline: Timeline, usage: Usage, reasons: Sequence[str]) -> None:
    span.set_attribute(names.GEN_AI_INPUT_TOKENS, usage.prompt_tokens)
    span.set_attribute(names.GEN_AI_CACHED_TOKENS, usage.cached_tokens)
    span.set_attribute(names.GEN_AI_OUTPUT_TOKENS, usage.completion_tokens)
    if reasons:
        span.set_attribute(names.GEN_AI_FINISH_REASONS, list(reasons))
    if timeline.ttft_s is not None:
        span.set_attribute(names.TTFT_S, timeline.ttft_s)
    if timeline.tpot_s is not None:
        span.set_attribute(names.TPOT_S, timeline.tpot_s)
