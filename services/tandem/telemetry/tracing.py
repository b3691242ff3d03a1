"""Setting up tracing for one process, from the standard ``OTEL_*`` variables.

Nothing is registered globally: the composition root makes one `Tracing` and hands its tracer down.
Without an exporter spans still get ids (the user is shown a trace id), and go nowhere.
Sampling is decided at the head (``OTEL_TRACES_SAMPLER``) and carried in ``traceparent``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
    SpanExporter,
)
from opentelemetry.trace import Tracer

import tandem
from tandem.errors import ConfigError
from tandem.telemetry import names
from tandem.telemetry.span_file import SpanFileExporter

DEFAULT_FLUSH_S = 3.0
_EXPORTERS = ("otlp", "console", "none")


class Tracing:
    """One process's tracing. `exporters` are written at once, `batched` ones in the background."""

    def __init__(
        self,
        role: str,
        instance_id: str,
        *,
        exporters: Sequence[SpanExporter] = (),
        batched: Sequence[SpanExporter] = (),
    ) -> None:
        resource = Resource.create(
            {
                names.SERVICE_NAME: f"tandem-{role}",
                names.SERVICE_INSTANCE: instance_id,
                names.SERVICE_VERSION: tandem.__version__,
                names.SERVICE_NAMESPACE: "tandem",
            }
        )
        # The provider's own atexit hook waits up to 30 s for a dead collector; ours has a bound.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for exporter in exporters:
            self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        for exporter in batched:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._exporters = (*exporters, *batched)
        self._shut_down = False
        self.tracer: Tracer = self._provider.get_tracer(names.TRACER, tandem.__version__)

    def shutdown(self, flush_s: float = DEFAULT_FLUSH_S) -> None:
        """Send what is left, for at most about `flush_s` seconds, then drop it. Blocks; idempotent.

        Call it in a thread from asyncio. Spans that end later are lost.
        """
        if self._shut_down:
            return
        self._shut_down = True
        # The SDK's shutdown takes no timeout, so it gets a thread and we keep the time.
        flusher = threading.Thread(target=self._provider.shutdown, name="tandem-span-flush", daemon=True)
        flusher.start()
        flusher.join(flush_s)
        if flusher.is_alive():
            for exporter in self._exporters:  # ends an export that still waits for a dead collector
                exporter.shutdown()
            flusher.join(1.0)


def set_up_tracing(role: str, instance_id: str, *, trace_dir: Path | None = None) -> Tracing:
    """Tracing for a process of this role, e.g. ``gateway``.

    OTLP over gRPC is on when ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or its ``_TRACES_`` form) is set or
    ``OTEL_TRACES_EXPORTER`` says so; `trace_dir` adds a file of JSON lines. Raises `ConfigError`.
    """
    exporters: list[SpanExporter] = []
    batched: list[SpanExporter] = []
    wanted = _wanted_exporters(os.environ)
    if "otlp" in wanted:
        _require_grpc(os.environ)
        batched.append(OTLPSpanExporter())
    if "console" in wanted:
        exporters.append(ConsoleSpanExporter())
    if trace_dir is not None:
        exporters.append(SpanFileExporter(trace_dir, f"tandem-{role}"))
    return Tracing(role, instance_id, exporters=exporters, batched=batched)


def _wanted_exporters(environ: Mapping[str, str]) -> set[str]:
    listed = {name.strip() for name in environ.get("OTEL_TRACES_EXPORTER", "").split(",") if name.strip()}
    for name in listed - set(_EXPORTERS):
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER: {name!r} is not built in; use one of {', '.join(_EXPORTERS)}"
        )
    if "none" in listed:
        return set()
    if not listed and (
        environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    ):
        return {"otlp"}
    return listed


def _require_grpc(environ: Mapping[str, str]) -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environ.get(name, "grpc")
        if protocol != "grpc":
            raise ConfigError(
                f"{name}: {protocol!r} is not built in; use grpc (collectors listen for it on port 4317)"
            )
        if name in environ:
            return
