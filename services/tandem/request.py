"""A user's request, what comes back, and every rule it must pass: one validator for all fronts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tandem.errors import InvalidRequest

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS_TOKENS = 1024
MAX_LOGIT_BIAS = 100.0


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens; names and defaults as users of the field know them.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 switch the filters off.
    `logprobs` None: none; n: the chosen token's and the n most likely. `max_tokens` None: up to
    the end of the context. Stop strings are matched on text by the gateway; stop ids, end of
    sequence and lengths by the engine.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a chat. `role` is what the model's chat template knows: system, user, assistant…"""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Slo:
    """The latencies the caller asks for, in seconds. Used by admission and routing."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One user's request. Exactly one of `prompt`, `messages`, `token_ids` is set."""

    model: str = ""
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    slo: Slo = field(default_factory=Slo)
    request_id: str = ""
    session_id: str = ""
    tenant: str = ""
    public_prefix: bool = False


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the validator must know of the served model."""

    vocab_size: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, all choices together. Cached tokens are part of the prompt's."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def validate_sampling(params: SamplingParams, limits: ModelLimits, *, prefix: str = "sampling") -> None:
    """Raise `InvalidRequest` naming the first field that breaks a rule."""

    def require(ok: bool, name: str, problem: str) -> None:
        if not ok:
            raise InvalidRequest(f"{prefix}.{name}", problem)

    def within(name: str, value: float, low: float, high: float) -> None:
        require(
            math.isfinite(value) and low <= value <= high,
            name,
            f"must be between {low:g} and {high:g}, not {value:g}",
        )

    within("temperature", params.temperature, 0.0, 100.0)
    require(0.0 < params.top_p <= 1.0, "top_p", f"must be in (0, 1], not {params.top_p:g}")
    within("top_k", params.top_k, 0, 2**31 - 1)
    within("min_p", params.min_p, 0.0, 1.0)
    within("presence_penalty", params.presence_penalty, -2.0, 2.0)
    within("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    require(
        math.isfinite(params.repetition_penalty) and 0.0 < params.repetition_penalty <= 100.0,
        "repetition_penalty",
        f"must be in (0, 100], not {params.repetition_penalty:g}",
    )
    within("n", params.n, 1, MAX_CHOICES)
    if params.max_tokens is not None:
        within("max_tokens", params.max_tokens, 1, limits.max_context_tokens)
    within("min_tokens", params.min_tokens, 0, limits.max_context_tokens)
    require(
        params.max_tokens is None or params.min_tokens <= params.max_tokens,
        "min_tokens",
        f"must not exceed max_tokens ({params.max_tokens}), not {params.min_tokens}",
    )
    if params.logprobs is not None:
        within("logprobs", params.logprobs, 0, MAX_TOP_LOGPROBS)
    if params.seed is not None:
        within("seed", params.seed, 0, 2**63 - 1)
    require(len(params.stop) <= MAX_STOP_STRINGS, "stop", f"holds more than {MAX_STOP_STRINGS} strings")
    for text in params.stop:
        require(
            0 < len(text) <= MAX_STOP_STRING_CHARS,
            "stop",
            f"each string must have 1 to {MAX_STOP_STRING_CHARS} characters",
        )
    _require_tokens(params.stop_token_ids, limits, f"{prefix}.stop_token_ids")
    require(
        len(params.logit_bias) <= MAX_LOGIT_BIAS_TOKENS,
        "logit_bias",
        f"names more than {MAX_LOGIT_BIAS_TOKENS} tokens",
    )
    _require_tokens(params.logit_bias, limits, f"{prefix}.logit_bias")
    for bias in params.logit_bias.values():
        within("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def validate_input(request: Request, *, max_prompt_bytes: int) -> None:
    """Check what can be checked before tokenising: one input, not empty, within the byte cap."""
    given = [
        name
        for name, value in (
            ("prompt", request.prompt),
            ("messages", request.messages),
            ("token_ids", request.token_ids),
        )
        if value is not None
    ]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InvalidRequest("input", f"give exactly one of prompt, messages, token_ids; got {found}")
    if not (request.prompt or request.messages or request.token_ids):
        raise InvalidRequest(given[0], "must not be empty")
    for position, message in enumerate(request.messages or ()):
        if not message.role:
            raise InvalidRequest(f"messages[{position}].role", "must not be empty")
    num_bytes = len((request.prompt or "").encode()) + sum(
        len(message.content.encode()) for message in request.messages or ()
    )
    if num_bytes > max_prompt_bytes:
        raise InvalidRequest(given[0], f"has {num_bytes} bytes; at most {max_prompt_bytes} are taken")
    for name, value in (("slo.ttft_s", request.slo.ttft_s), ("slo.tpot_s", request.slo.tpot_s)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidRequest(name, f"must be a positive number of seconds, not {value:g}")
    if not -100 <= request.priority <= 100:
        raise InvalidRequest("priority", f"must be between -100 and 100, not {request.priority}")


def validate_prompt_tokens(token_ids: tuple[int, ...], limits: ModelLimits, params: SamplingParams) -> None:
    """Check the tokenised prompt against the vocabulary and the context length."""
    if not token_ids:
        raise InvalidRequest("prompt", "must hold at least one token")
    _require_tokens(token_ids, limits, "token_ids")
    room_tokens = limits.max_context_tokens - len(token_ids)
    if room_tokens < 1:
        raise InvalidRequest(
            "prompt",
            f"has {len(token_ids)} tokens; the model's context is {limits.max_context_tokens} "
            "and at least one must be left for the answer: shorten the prompt",
        )
    if params.max_tokens is not None and params.max_tokens > room_tokens:
        raise InvalidRequest(
            "sampling.max_tokens",
            f"{params.max_tokens} with a prompt of {len(token_ids)} tokens passes the context of "
            f"{limits.max_context_tokens}; at most {room_tokens} fit",
        )


def _require_tokens(token_ids: Iterable[int], limits: ModelLimits, name: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(name, f"token id {token_id} is outside 0 to {limits.vocab_size - 1}")
