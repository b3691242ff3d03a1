"""Public wire messages to domain types and back. Only `rpc` ever sees the wire side.

Strict in both directions. Decoding raises `InvalidRequest` naming the wire field (a client turns
that into `InternalError`: there it is the server that spoke nonsense). Encoding raises
`InvalidRequest` for what the wire can't carry, and leaves the rules for values to the one validator
in `tandem.request`: the wire is wide enough that nonsense like ``max_tokens = -1`` reaches it.
No function mutates its arguments.
"""

from __future__ import annotations

from dataclasses import fields

from tandem.directory.base import Role, WorkerLoad, WorkerRecord, WorkerState
from tandem.errors import InvalidRequest
from tandem.generation import Phase, PhaseTiming, TokenLogprob, TokenOutput
from tandem.ids import Epoch, WorkerId
from tandem.kv.ticket import PeerAddress
from tandem.request import ChatMessage, FinishReason, Request, SamplingParams, Slo, Usage
from tandem.rpc.services import GenerateChunk, ModelCard, ServerInfo
from tandem.rpc.wire import WireEnum, extend_field, set_field
from tandem.v1 import generation_pb2 as words
from tandem.v1 import inference_service_pb2 as pb
from tandem.v1 import worker_pb2 as workers

FINISH = WireEnum(FinishReason, words.FinishReason, "FINISH_REASON")
PHASE = WireEnum(Phase, words.Phase, "PHASE")
ROLE = WireEnum(Role, workers.WorkerRole, "WORKER_ROLE")
STATE = WireEnum(WorkerState, workers.WorkerState, "WORKER_STATE")


# Sampling


_SAMPLING_LISTS = ("stop", "stop_token_ids")
_SAMPLING_SCALARS = tuple(
    field.name for field in fields(SamplingParams) if field.name not in (*_SAMPLING_LISTS, "logit_bias")
)


def encode_sampling(params: SamplingParams, into: words.SamplingParams, *, prefix: str = "sampling") -> None:
    """Fill `into`. Every field that is not None is set, so the receiver's defaults never matter."""
    for name in _SAMPLING_SCALARS:
        value = getattr(params, name)
        if value is not None:
            set_field(into, name, value, f"{prefix}.{name}")
    for name in _SAMPLING_LISTS:
        extend_field(getattr(into, name), getattr(params, name), f"{prefix}.{name}")
    try:
        into.logit_bias.update(params.logit_bias)
    except (ValueError, TypeError):
        raise InvalidRequest(f"{prefix}.logit_bias", "holds a value that does not fit here") from None


def decode_sampling(message: words.SamplingParams) -> SamplingParams:
    """Fields that are not set take the defaults of `SamplingParams`."""
    given = {name: getattr(message, name) for name in _SAMPLING_SCALARS if message.HasField(name)}
    return SamplingParams(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
    )


# Requests


def encode_request(request: Request) -> pb.GenerateRequest:
    """The wire form. Two inputs at once are refused here, as only one can cross."""
    message = pb.GenerateRequest()
    _encode_input(request, message)
    if request.token_ids is not None:
        message.token_ids.SetInParent()
        extend_field(message.token_ids.token_ids, request.token_ids, "token_ids")
    message.sampling.SetInParent()
    encode_sampling(request.sampling, message.sampling)
    for name in ("model", "priority", "request_id", "session_id", "tenant", "public_prefix"):
        set_field(message, name, getattr(request, name), name)
    for name in ("ttft_s", "tpot_s"):
        value = getattr(request.slo, name)
        if value is not None:
            set_field(message.slo, name, value, f"slo.{name}")
    return message


def decode_request(message: pb.GenerateRequest) -> Request:
    """The domain form; its rules are checked by `tandem.request`, not here."""
    kind = message.WhichOneof("input")
    slo = message.slo
    return Request(
        model=message.model,
        prompt=message.prompt if kind == "prompt" else None,
        messages=_decode_messages(message.messages) if kind == "messages" else None,
        token_ids=tuple(message.token_ids.token_ids) if kind == "token_ids" else None,
        sampling=decode_sampling(message.sampling),
        priority=message.priority,
        slo=Slo(
            ttft_s=slo.ttft_s if slo.HasField("ttft_s") else None,
            tpot_s=slo.tpot_s if slo.HasField("tpot_s") else None,
        ),
        request_id=message.request_id,
        session_id=message.session_id,
        tenant=message.tenant,
        public_prefix=message.public_prefix,
    )


def encode_tokenize(request: Request) -> pb.TokenizeRequest:
    """Of a request only the model and the text to tokenise."""
    message = pb.TokenizeRequest()
    _encode_input(request, message)
    if request.token_ids is not None:
        raise InvalidRequest("token_ids", "are tokens already; give prompt or messages")
    set_field(message, "model", request.model, "model")
    return message


def decode_tokenize(message: pb.TokenizeRequest) -> Request:
    """A request with nothing but a model and at most one input."""
    kind = message.WhichOneof("input")
    return Request(
        model=message.model,
        prompt=message.prompt if kind == "prompt" else None,
        messages=_decode_messages(message.messages) if kind == "messages" else None,
    )


def _encode_input(request: Request, message: pb.GenerateRequest | pb.TokenizeRequest) -> None:
    given = [name for name in ("prompt", "messages", "token_ids") if getattr(request, name) is not None]
    if len(given) > 1:
        raise InvalidRequest(
            "input", f"give exactly one of prompt, messages, token_ids; got {' and '.join(given)}"
        )
    if request.prompt is not None:
        set_field(message, "prompt", request.prompt, "prompt")
    if request.messages is not None:
        message.messages.SetInParent()
        for position, turn in enumerate(request.messages):
            wire_turn = message.messages.messages.add()
            set_field(wire_turn, "role", turn.role, f"messages[{position}].role")
            set_field(wire_turn, "content", turn.content, f"messages[{position}].content")


def _decode_messages(message: pb.ChatMessages) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(turn.role, turn.content) for turn in message.messages)


# Answers


def encode_token(token: TokenOutput, into: words.Token) -> None:
    """Fill an empty `into`."""
    into.token_id = token.token_id
    if token.logprob is not None:
        into.logprob = token.logprob
    for candidate in token.top:
        into.top.add(token_id=candidate.token_id, logprob=candidate.logprob)


def decode_token(message: words.Token) -> TokenOutput:
    """One generated token."""
    if message.HasField("logprob"):
        top = tuple(TokenLogprob(candidate.token_id, candidate.logprob) for candidate in message.top)
        return TokenOutput(message.token_id, message.logprob, top)
    if message.top:
        raise InvalidRequest("token.top", "must not be set without logprob")
    return TokenOutput(message.token_id)


def encode_phase(phase: PhaseTiming, into: words.PhaseTiming) -> None:
    """Fill an empty `into`."""
    into.phase = PHASE.encode(phase.phase)
    into.start_ns = phase.start_ns
    into.duration_s = phase.duration_s
    for name, value in phase.attributes.items():
        if isinstance(value, str):
            into.attributes[name].string_value = value
        elif isinstance(value, int):
            into.attributes[name].int_value = value
        else:
            into.attributes[name].double_value = value


def decode_phase(message: words.PhaseTiming) -> PhaseTiming:
    """One phase."""
    attributes: dict[str, int | float | str] = {}
    for name, value in message.attributes.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise InvalidRequest("phases.attributes", "holds an attribute without a value")
        attributes[name] = getattr(value, kind)
    return PhaseTiming(
        phase=PHASE.decode(message.phase, "phases.phase"),
        start_ns=message.start_ns,
        duration_s=message.duration_s,
        attributes=attributes,
    )


def encode_chunk(chunk: GenerateChunk) -> pb.GenerateResponse:
    """One message of the answer."""
    message = pb.GenerateResponse(index=chunk.index, text=chunk.text)
    for token in chunk.tokens:
        encode_token(token, message.tokens.add())
    if chunk.finish is not None:
        message.finish_reason = FINISH.encode(chunk.finish)
    if chunk.usage is not None:
        message.usage.SetInParent()
        message.usage.prompt_tokens = chunk.usage.prompt_tokens
        message.usage.cached_tokens = chunk.usage.cached_tokens
        message.usage.completion_tokens = chunk.usage.completion_tokens
    for phase in chunk.phases:
        encode_phase(phase, message.phases.add())
    message.request_id = chunk.request_id
    message.trace_id = chunk.trace_id
    return message


def decode_chunk(message: pb.GenerateResponse) -> GenerateChunk:
    """One message of the answer."""
    usage = message.usage
    return GenerateChunk(
        index=message.index,
        text=message.text,
        tokens=tuple([decode_token(token) for token in message.tokens]),
        finish=FINISH.decode(message.finish_reason, "finish_reason") if message.finish_reason else None,
        usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        if message.HasField("usage")
        else None,
        phases=tuple([decode_phase(phase) for phase in message.phases]),
        request_id=message.request_id,
        trace_id=message.trace_id,
    )


# Models and workers


def encode_model(card: ModelCard) -> pb.ModelCard:
    """A served model."""
    return pb.ModelCard(
        model_id=card.model_id,
        revision=card.revision,
        max_context_tokens=card.max_context_tokens,
        vocab_size=card.vocab_size,
    )


def decode_model(message: pb.ModelCard) -> ModelCard:
    """A served model."""
    return ModelCard(message.model_id, message.revision, message.max_context_tokens, message.vocab_size)


def encode_worker(record: WorkerRecord, into: workers.WorkerInfo) -> None:
    """Fill an empty `into` with all of the record but its addresses."""
    into.worker_id = record.worker_id
    into.epoch = record.epoch
    into.role = ROLE.encode(record.role)
    into.state = STATE.encode(record.state)
    into.model_id = record.model_id
    into.layout_fingerprint = record.layout_fingerprint
    into.block_size_tokens = record.block_size_tokens
    into.num_blocks = record.num_blocks
    into.max_context_tokens = record.max_context_tokens
    into.load.SetInParent()
    for name in _LOAD_FIELDS:
        setattr(into.load, name, getattr(record.load, name))
    into.capabilities.update(record.capabilities)


def decode_worker(message: workers.WorkerInfo, *, control: str = "", transport: bytes = b"") -> WorkerRecord:
    """A worker's record; users are told no addresses, so those stay empty for them."""
    if not message.worker_id:
        raise InvalidRequest("worker.worker_id", "must not be empty")
    if not message.HasField("load"):
        raise InvalidRequest("worker.load", "must be set: unknown load is not zero load")
    return WorkerRecord(
        address=PeerAddress(WorkerId(message.worker_id), Epoch(message.epoch), control, transport),
        role=ROLE.decode(message.role, "worker.role"),
        state=STATE.decode(message.state, "worker.state"),
        model_id=message.model_id,
        layout_fingerprint=message.layout_fingerprint,
        block_size_tokens=message.block_size_tokens,
        num_blocks=message.num_blocks,
        max_context_tokens=message.max_context_tokens,
        load=WorkerLoad(**{name: getattr(message.load, name) for name in _LOAD_FIELDS}),
        capabilities=dict(message.capabilities),
    )


_LOAD_FIELDS = tuple(field.name for field in fields(WorkerLoad))


def encode_server_info(info: ServerInfo) -> pb.GetServerInfoResponse:
    """What users may know: workers without their addresses (`PeerAddress` stays inside)."""
    message = pb.GetServerInfoResponse(version=info.version, models=map(encode_model, info.models))
    for record in info.workers:
        encode_worker(record, message.workers.add())
    return message


def decode_server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    """Workers come without addresses: ``control`` and ``transport`` are empty."""
    return ServerInfo(
        version=message.version,
        models=tuple(map(decode_model, message.models)),
        workers=tuple(map(decode_worker, message.workers)),
    )
