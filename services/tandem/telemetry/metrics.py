"""Prometheus metrics: one registry a process, handed down, never the library's global one.

The three `gen_ai_server_*` histograms follow the semantic conventions in name, unit and buckets.
Labels are few and bounded: model and outcome. Never a request, a tenant or a text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry as CollectorRegistry
from prometheus_client import Counter, Gauge, Histogram, start_http_server

from tandem.errors import ConfigError
from tandem.generation import Phase, PhaseTiming, WorkerLoad
from tandem.request import Usage
from tandem.telemetry import names
from tandem.telemetry.names import Outcome
from tandem.telemetry.timeline import Timeline


class GatewayMetrics:
    """What the gateway counts: latencies as the user sees them, and how requests end."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["gen_ai_request_model"], registry=registry, buckets=buckets).labels(
                model
            )

        self._ttft = histogram(names.METRIC_TTFT, "Time to first token.", names.TTFT_BUCKETS_S)
        self._tpot = histogram(
            names.METRIC_TPOT, "Time per output token after the first.", names.TPOT_BUCKETS_S
        )
        self._duration = Histogram(
            names.METRIC_DURATION,
            "Request duration, whatever its outcome.",
            ["gen_ai_request_model", "outcome"],
            registry=registry,
            buckets=names.DURATION_BUCKETS_S,
        )
        self._requests = Counter(
            names.METRIC_REQUESTS, "Requests ended, by outcome.", ["outcome"], registry=registry
        )
        self._in_flight = Gauge(
            names.METRIC_REQUESTS_IN_FLIGHT, "Requests begun and not ended.", registry=registry
        )
        self._prompt_tokens = Counter(
            names.METRIC_REQUEST_PROMPT_TOKENS, "Prompt tokens of requests.", registry=registry
        )
        self._hit_tokens = Counter(
            names.METRIC_REQUEST_CACHED_TOKENS, "Prompt tokens that a prefix cache held.", registry=registry
        )
        self._generated = Counter(
            names.METRIC_REQUEST_GENERATED_TOKENS, "Tokens generated.", registry=registry
        )
        self._model = model
        for outcome in Outcome:  # a rate needs the zero before the first event
            self._requests.labels(outcome.value)

    def request_started(self) -> None:
        """One more in flight. Each call needs one `request_ended`."""
        self._in_flight.inc()

    def request_ended(self, timeline: Timeline, outcome: Outcome, usage: Usage) -> None:
        """Count one request; `usage` is what was really computed, also after a cancel."""
        self._in_flight.dec()
        self._requests.labels(outcome.value).inc()
        self._duration.labels(self._model, outcome.value).observe(timeline.e2e_s)
        if timeline.ttft_s is not None:
            self._ttft.observe(timeline.ttft_s)
        if timeline.tpot_s is not None:
            self._tpot.observe(timeline.tpot_s)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._hit_tokens.inc(usage.cached_tokens)
        self._generated.inc(usage.completion_tokens)


class WorkerMetrics:
    """What a worker counts: its load, its tokens and its transfers."""

    def __init__(self, registry: CollectorRegistry, num_blocks: int) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, registry=registry)

        self._num_blocks = num_blocks
        self._running = gauge(names.METRIC_RUNNING, "Sequences in the batch.")
        self._waiting = gauge(names.METRIC_WAITING, "Sequences that wait for a place or for blocks.")
        self._queued = gauge(names.METRIC_QUEUED_PREFILL_TOKENS, "Prompt tokens that wait to be computed.")
        self._used = gauge(names.METRIC_BLOCKS_USED, "KV blocks that sequences hold.")
        self._free = gauge(names.METRIC_BLOCKS_FREE, "KV blocks free or only cached.")
        self._prompt_tokens = counter(names.METRIC_PROMPT_TOKENS, "Prompt tokens of sequences begun here.")
        self._hit_tokens = counter(names.METRIC_PREFIX_HIT_TOKENS, "Prompt tokens the prefix cache held.")
        self._generated = counter(names.METRIC_GENERATED_TOKENS, "Tokens generated here.")
        self._transfers_open = gauge(names.METRIC_TRANSFERS_OPEN, "KV transfers begun and not settled.")
        self._transfers = Counter(
            names.METRIC_TRANSFERS, "KV transfers received here, by outcome.", ["outcome"], registry=registry
        )
        self._bytes = counter(names.METRIC_TRANSFER_BYTES, "KV bytes received by transfers that ended well.")
        self._seconds = Histogram(
            names.METRIC_TRANSFER_SECONDS,
            "From the first block's arrival until all are checked.",
            registry=registry,
            buckets=names.TRANSFER_BUCKETS_S,
        )
        for outcome in (Outcome.OK, Outcome.ERROR):
            self._transfers.labels(outcome.value)

    def set_load(self, load: WorkerLoad) -> None:
        """Show the engine's own account of its load."""
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._queued.set(load.queued_prefill_tokens)
        self._free.set(load.num_free_blocks)
        self._used.set(self._num_blocks - load.num_free_blocks)

    def tokens_generated(self, num_tokens: int) -> None:
        """Count tokens of one step, all sequences together."""
        self._generated.inc(num_tokens)

    def set_open_transfers(self, num_open: int) -> None:
        """Transfers that still hold or may still write blocks."""
        self._transfers_open.set(num_open)

    def phases_ended(self, phases: Iterable[PhaseTiming]) -> None:
        """Count what a sequence's phases brought: prompts computed, transfers received."""
        for timing in phases:
            if timing.phase is Phase.PREFILL:
                self._prompt_tokens.inc(int(timing.attributes.get(names.NUM_TOKENS, 0)))
                self._hit_tokens.inc(int(timing.attributes.get(names.NUM_CACHED_TOKENS, 0)))
            elif timing.phase is Phase.TRANSFER:
                self._transfers.labels(Outcome.OK.value).inc()
                self._bytes.inc(int(timing.attributes.get(names.NUM_BYTES, 0)))
                self._seconds.observe(timing.duration_s)

    def transfer_failed(self) -> None:
        """Count one transfer that brought nothing."""
        self._transfers.labels(Outcome.ERROR.value).inc()


class DirectoryMetrics:
    """Whether the state plane can be reached, asked at each scrape."""

    def __init__(self, registry: CollectorRegistry, in_contact: Callable[[], bool]) -> None:
        up = Gauge(names.METRIC_REDIS_UP, "1 while Redis answers, else 0.", registry=registry)
        up.set_function(lambda: float(in_contact()))


class MetricsServer:
    """``GET /metrics`` over HTTP in a thread of its own. A context manager; `port` 0 takes a free one.

    Raises `ConfigError` when the address can't be bound.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"telemetry.metrics_port: can't listen on {host}:{port}: {error.strerror or error}; "
                "name another port (0 takes a free one), or stop what listens there"
            ) from error
        self._stop: Callable[[], None] | None = self._server.shutdown
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        """The port that listens."""
        return self._server.server_port

    def stop(self) -> None:
        """Stop listening, free the port and end the thread. Blocks half a second at most; idempotent."""
        with self._lock:
            stop, self._stop = self._stop, None
            if stop is not None:
                stop()
                self._server.server_close()
                self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
