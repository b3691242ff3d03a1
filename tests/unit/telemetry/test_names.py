from __future__ import annotations

import opentelemetry.semconv._incubating.attributes.gen_ai_attributes as gen_ai
import opentelemetry.semconv._incubating.attributes.rpc_attributes as rpc
import opentelemetry.semconv._incubating.metrics.gen_ai_metrics as gen_ai_metrics
from opentelemetry.semconv.attributes import error_attributes, server_attributes, service_attributes

from tandem.generation import Phase
from tandem.telemetry import names

PUBLISHED = {
    value
    for module in (gen_ai, rpc, error_attributes, server_attributes, service_attributes)
    for value in vars(module).values()
    if isinstance(value, str)
}


def test_names_that_follow_the_conventions_are_published_ones() -> None:
    borrowed = [
        value
        for value in vars(names).values()
        if isinstance(value, str) and value.startswith(("gen_ai.", "rpc.", "error.", "server."))
    ]
    assert len(borrowed) > 15
    assert [name for name in borrowed if name not in PUBLISHED] == []


def test_histograms_are_the_conventions_metrics_in_prometheus_spelling() -> None:
    for mine, published in (
        (names.METRIC_TTFT, gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN),
        (names.METRIC_TPOT, gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN),
        (names.METRIC_DURATION, gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION),
    ):
        assert mine == published.replace(".", "_") + "_seconds"


def test_no_two_names_are_equal() -> None:
    values = [v for k, v in vars(names).items() if k.isupper() and isinstance(v, str) and "." in v]
    assert len(values) == len(set(values))


def test_a_phase_key_gets_its_phase_and_a_full_name_stays() -> None:
    assert names.phase_attribute(Phase.TRANSFER, names.NUM_BYTES) == "tandem.transfer.num_bytes"
    assert names.phase_attribute(Phase.TRANSFER, names.WORKER_ID) == names.WORKER_ID


def test_the_request_span_is_named_as_the_conventions_ask() -> None:
    assert names.request_span(names.Operation.CHAT, "smollm2") == "chat smollm2"
    assert names.request_span(names.Operation.TEXT_COMPLETION, "") == "text_completion"
