from __future__ import annotations

import socket
import threading
import urllib.request

import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from tandem.errors import ConfigError
from tandem.generation import Phase, PhaseTiming, WorkerLoad
from tandem.request import Usage
from tandem.telemetry import names
from tandem.telemetry.metrics import (
    DirectoryMetrics,
    GatewayMetrics,
    MetricsServer,
    WorkerMetrics,
)
from tandem.telemetry.names import Outcome
from tandem.telemetry.timeline import Timeline


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    found: float | None = registry.get_sample_value(name, labels)
    return found


def test_a_request_is_counted_by_outcome_and_seen_in_flight(registry: CollectorRegistry) -> None:
    metrics = GatewayMetrics(registry, "smollm2")
    assert value(registry, "tandem_requests_total", outcome="cancelled") == 0
    metrics.request_started()
    assert value(registry, "tandem_requests_in_flight") == 1
    metrics.request_ended(
        Timeline(0.0, (0.03, 0.05, 0.09), 0.1), Outcome.OK, Usage(prompt_tokens=50, cached_tokens=32)
    )
    metrics.request_started()
    metrics.request_ended(Timeline(0.0, (), 0.1), Outcome.CANCELLED, Usage())
    assert value(registry, "tandem_requests_in_flight") == 0
    assert value(registry, "tandem_requests_total", outcome="ok") == 1
    assert value(registry, "tandem_requests_total", outcome="cancelled") == 1
    assert value(registry, "tandem_request_cached_tokens_total") == 32
    model = {"gen_ai_request_model": "smollm2"}
    # A request without a token has no time to its first: it must not pull the histogram down.
    assert value(registry, f"{names.METRIC_TTFT}_count", **model) == 1
    assert value(registry, f"{names.METRIC_TPOT}_sum", **model) == pytest.approx(0.03)
    assert value(registry, f"{names.METRIC_DURATION}_count", **model, outcome="cancelled") == 1


def test_the_histograms_have_the_conventions_buckets(registry: CollectorRegistry) -> None:
    GatewayMetrics(registry, "m").request_started()
    found = {
        sample.labels["le"]
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == f"{names.METRIC_TTFT}_bucket"
    }
    assert found == {*map(str, names.TTFT_BUCKETS_S), "+Inf"}


def test_a_workers_load_shows_used_and_free_blocks(registry: CollectorRegistry) -> None:
    metrics = WorkerMetrics(registry, num_blocks=100)
    metrics.set_load(WorkerLoad(num_free_blocks=70, num_running=3, num_waiting=2, queued_prefill_tokens=512))
    assert value(registry, "tandem_kv_blocks_used") == 30
    assert value(registry, "tandem_kv_blocks_free") == 70
    assert value(registry, "tandem_sequences_running") == 3
    assert value(registry, "tandem_sequences_waiting") == 2
    assert value(registry, "tandem_queued_prefill_tokens") == 512


def test_only_transfers_that_ended_well_make_a_speed(registry: CollectorRegistry) -> None:
    metrics = WorkerMetrics(registry, num_blocks=1)
    metrics.phases_ended([PhaseTiming(Phase.TRANSFER, 0, 0.5, {"num_bytes": 1000})])
    metrics.transfer_failed()
    assert value(registry, "tandem_transfer_bytes_total") == 1000
    assert value(registry, "tandem_transfer_seconds_sum") == 0.5
    assert value(registry, "tandem_transfers_total", outcome="ok") == 1
    assert value(registry, "tandem_transfers_total", outcome="error") == 1


def test_the_other_counters_count(registry: CollectorRegistry) -> None:
    metrics = WorkerMetrics(registry, num_blocks=1)
    metrics.phases_ended([PhaseTiming(Phase.PREFILL, 0, 0.5, {"num_tokens": 100, "num_cached_tokens": 64})])
    metrics.phases_ended([PhaseTiming(Phase.DECODE, 0, 0.5, {"num_tokens": 9})])
    metrics.tokens_generated(5)
    metrics.set_open_transfers(2)
    assert value(registry, "tandem_prompt_tokens_total") == 100
    assert value(registry, "tandem_prefix_hit_tokens_total") == 64
    assert value(registry, "tandem_generated_tokens_total") == 5
    assert value(registry, "tandem_transfers_open") == 2


def test_redis_is_asked_at_each_scrape(registry: CollectorRegistry) -> None:
    up = [True]
    DirectoryMetrics(registry, lambda: up[0])
    assert value(registry, "tandem_redis_up") == 1
    up[0] = False
    assert value(registry, "tandem_redis_up") == 0


def test_a_gateway_and_a_worker_fit_in_one_registry(registry: CollectorRegistry) -> None:
    GatewayMetrics(registry, "m")
    WorkerMetrics(registry, 1)
    DirectoryMetrics(registry, lambda: True)


def test_nothing_of_ours_is_in_the_global_registry(registry: CollectorRegistry) -> None:
    GatewayMetrics(registry, "m")
    WorkerMetrics(registry, 1)
    assert [m.name for m in REGISTRY.collect() if m.name.startswith(("tandem", "gen_ai"))] == []


def test_the_server_serves_and_stops_clean(registry: CollectorRegistry) -> None:
    DirectoryMetrics(registry, lambda: True)
    with MetricsServer(registry, "127.0.0.1", 0) as server:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as answer:
            assert b"tandem_redis_up 1.0" in answer.read()
        port = server.port
    server.stop()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
    assert not [t for t in threading.enumerate() if "serve_forever" in t.name]


def test_a_port_in_use_is_a_config_error_that_names_it(registry: CollectorRegistry) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"telemetry\.metrics_port.*127\.0\.0\.1:{port}.*another port"):
            MetricsServer(registry, "127.0.0.1", port)
