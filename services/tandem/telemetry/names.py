"""Every name that leaves the process in a span or a metric, in one place.

`gen_ai.*`, `rpc.*`, `error.*` and `service.*` follow OpenTelemetry's semantic conventions (a test
compares them with the published package); `tandem.*` is ours. Standard library only, so that
policies may use the words too.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from tandem.generation import Phase

TRACER: Final = "tandem"


class Outcome(Enum):
    """How a request, a call or a phase ended; the same four words in spans, metrics and logs."""

    OK = "ok"
    ERROR = "error"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


class Operation(Enum):
    """`gen_ai.operation.name`: what the user asked for."""

    CHAT = "chat"
    TEXT_COMPLETION = "text_completion"


def request_span(operation: Operation, model: str) -> str:
    """The span of one user's request, e.g. ``chat smollm2-135m``, as the conventions name it."""
    return f"{operation.value} {model}".rstrip()


def phase_span(phase: Phase) -> str:
    """The span of one phase of a request, e.g. ``tandem.prefill``."""
    return f"tandem.{phase.value}"


# --- attributes: generative AI -------------------------------------------------------------------
GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_CONVERSATION: Final = "gen_ai.conversation.id"
PROVIDER: Final = "tandem"
"""The value of `gen_ai.provider.name`."""

# --- attributes: remote calls, errors, processes -------------------------------------------------
RPC_SYSTEM: Final = "rpc.system"
RPC_SERVICE: Final = "rpc.service"
RPC_METHOD: Final = "rpc.method"
RPC_GRPC_STATUS: Final = "rpc.grpc.status_code"
RPC_SYSTEM_GRPC: Final = "grpc"
SERVER_ADDRESS: Final = "server.address"
ERROR_TYPE: Final = "error.type"
SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
SERVICE_INSTANCE: Final = "service.instance.id"
SERVICE_NAMESPACE: Final = "service.namespace"

# --- attributes: Tandem's own --------------------------------------------------------------------
OUTCOME: Final = "tandem.outcome"
REQUEST_ID: Final = "tandem.request.id"
ATTEMPT_ID: Final = "tandem.attempt.id"
WORKER_ID: Final = "tandem.worker.id"
ROLE: Final = "tandem.role"
ROUTE_DECODE: Final = "tandem.route.decode"
ROUTE_PREFILL: Final = "tandem.route.prefill"
TTFT_S: Final = "tandem.ttft_s"
TPOT_S: Final = "tandem.tpot_s"

# --- keys of `PhaseTiming.attributes`: short, since the phase says the rest ----------------------
# A span shows them as ``tandem.<phase>.<key>``.
NUM_TOKENS: Final = "num_tokens"
NUM_CACHED_TOKENS: Final = "num_cached_tokens"
NUM_BYTES: Final = "num_bytes"
NUM_BLOCKS: Final = "num_blocks"
EXPOSED_S: Final = "exposed_s"
"""Seconds of a transfer during which nothing was left to compute."""
BUSY_S: Final = "busy_s"
"""Seconds during which bytes were on their way, where that is not the whole phase."""
WORKER: Final = "worker"
TRANSPORT: Final = "transport"


def phase_attribute(phase: Phase, key: str) -> str:
    """The span attribute for one key of a phase; a key that already has a dot stays as it is."""
    return key if "." in key else f"tandem.{phase.value}.{key}"


# --- metrics, in Prometheus spelling (dots to underscores, unit at the end) ----------------------
METRIC_TTFT: Final = "gen_ai_server_time_to_first_token_seconds"
METRIC_TPOT: Final = "gen_ai_server_time_per_output_token_seconds"
METRIC_DURATION: Final = "gen_ai_server_request_duration_seconds"
METRIC_REQUESTS: Final = "tandem_requests"
METRIC_REQUESTS_IN_FLIGHT: Final = "tandem_requests_in_flight"
METRIC_REQUEST_PROMPT_TOKENS: Final = "tandem_request_prompt_tokens"
METRIC_REQUEST_CACHED_TOKENS: Final = "tandem_request_cached_tokens"
METRIC_REQUEST_GENERATED_TOKENS: Final = "tandem_request_generated_tokens"
METRIC_PROMPT_TOKENS: Final = "tandem_prompt_tokens"
METRIC_PREFIX_HIT_TOKENS: Final = "tandem_prefix_hit_tokens"
METRIC_GENERATED_TOKENS: Final = "tandem_generated_tokens"
METRIC_RUNNING: Final = "tandem_sequences_running"
METRIC_WAITING: Final = "tandem_sequences_waiting"
METRIC_QUEUED_PREFILL_TOKENS: Final = "tandem_queued_prefill_tokens"
METRIC_BLOCKS_USED: Final = "tandem_kv_blocks_used"
METRIC_BLOCKS_FREE: Final = "tandem_kv_blocks_free"
METRIC_TRANSFERS: Final = "tandem_transfers"
METRIC_TRANSFER_BYTES: Final = "tandem_transfer_bytes"
METRIC_TRANSFER_SECONDS: Final = "tandem_transfer_seconds"
METRIC_TRANSFERS_OPEN: Final = "tandem_transfers_open"
METRIC_REDIS_UP: Final = "tandem_redis_up"

# Buckets that the conventions recommend for the three histograms, in seconds.
TTFT_BUCKETS_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
TPOT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_BUCKETS_S: Final = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
TRANSFER_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
