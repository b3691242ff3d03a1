"""Every domain type crosses the wire unchanged; what makes no sense is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fake_services import ATTEMPT, HELLO, RECORD, SPEC, TICKET, TRANSFER

from tandem.clock import Deadline
from tandem.directory.base import Role, WorkerLoad, WorkerRecord, WorkerState
from tandem.errors import InvalidRequest
from tandem.generation import (
    Phase,
    PhaseTiming,
    PrefillResult,
    SequenceOutput,
    SequenceSpec,
    TokenLogprob,
    TokenOutput,
)
from tandem.ids import Epoch, WorkerId
from tandem.internal.v1 import transfer_service_pb2 as transfer
from tandem.internal.v1 import worker_service_pb2 as worker
from tandem.kv.ticket import FinalWord, Hello, PeerAddress, Ticket, TransferOutcome
from tandem.request import (
    ChatMessage,
    FinishReason,
    ModelLimits,
    Request,
    SamplingParams,
    Slo,
    Usage,
    validate_sampling,
)
from tandem.rpc import codec, internal_codec
from tandem.rpc.services import GenerateChunk, ModelCard, ServerInfo
from tandem.v1 import generation_pb2 as words
from tandem.v1 import inference_service_pb2 as pb
from tandem.v1 import worker_pb2

I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
FLOAT = st.floats(allow_nan=False)
TEXT = st.text(max_size=20)
HEX128 = st.text("0123456789abcdef", min_size=32, max_size=32)


def tuples(of: st.SearchStrategy[Any], **bounds: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=bounds.pop("max_size", 4), **bounds).map(tuple)


def maybe(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | of


SAMPLING = st.builds(
    SamplingParams,
    temperature=FLOAT,
    top_p=FLOAT,
    top_k=I32,
    min_p=FLOAT,
    max_tokens=maybe(I32),
    min_tokens=I32,
    stop=tuples(TEXT),
    stop_token_ids=tuples(I32),
    ignore_eos=st.booleans(),
    seed=maybe(I64),
    n=I32,
    logprobs=maybe(I32),
    presence_penalty=FLOAT,
    frequency_penalty=FLOAT,
    repetition_penalty=FLOAT,
    logit_bias=st.dictionaries(I32, FLOAT, max_size=4),
)
REQUEST = st.builds(
    Request,
    model=TEXT,
    sampling=SAMPLING,
    priority=I32,
    slo=st.builds(Slo, ttft_s=maybe(FLOAT), tpot_s=maybe(FLOAT)),
    request_id=TEXT,
    session_id=TEXT,
    tenant=TEXT,
    public_prefix=st.booleans(),
)
INPUT = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"prompt": TEXT}),
    st.fixed_dictionaries({"messages": tuples(st.builds(ChatMessage, role=TEXT, content=TEXT))}),
    st.fixed_dictionaries({"token_ids": tuples(I32)}),
)
CANDIDATE = st.builds(TokenLogprob, token_id=U32, logprob=FLOAT)
TOKEN = st.builds(TokenOutput, token_id=U32) | st.builds(
    TokenOutput, token_id=U32, logprob=FLOAT, top=tuples(CANDIDATE)
)
PHASE = st.builds(
    PhaseTiming,
    phase=st.sampled_from(Phase),
    start_ns=I64,
    duration_s=FLOAT,
    attributes=st.dictionaries(TEXT, I64 | FLOAT | TEXT, max_size=3),
)
CHUNK = st.builds(
    GenerateChunk,
    index=U32,
    text=TEXT,
    tokens=tuples(TOKEN),
    finish=maybe(st.sampled_from(FinishReason)),
    usage=maybe(st.builds(Usage, prompt_tokens=U64, cached_tokens=U64, completion_tokens=U64)),
    phases=tuples(PHASE),
    request_id=TEXT,
    trace_id=TEXT,
)
MODEL = st.builds(ModelCard, model_id=TEXT, revision=TEXT, max_context_tokens=U64, vocab_size=U64)
PEER = st.builds(
    PeerAddress,
    worker_id=st.text(min_size=1, max_size=9),
    epoch=U64,
    control=st.text(min_size=1, max_size=9),
    transport=st.binary(min_size=1, max_size=9),
)
RECORDS = st.builds(
    WorkerRecord,
    address=PEER,
    role=st.sampled_from(Role),
    state=st.sampled_from(WorkerState),
    model_id=TEXT,
    layout_fingerprint=TEXT,
    block_size_tokens=U32,
    num_blocks=U64,
    max_context_tokens=U64,
    load=st.builds(
        WorkerLoad, num_free_blocks=U64, num_running=U64, num_waiting=U64, queued_prefill_tokens=U64
    ),
    capabilities=st.dictionaries(TEXT, TEXT, max_size=3),
)
OUTPUT = st.builds(
    SequenceOutput,
    attempt_id=HEX128,
    tokens=tuples(TOKEN),
    finish=maybe(st.sampled_from(FinishReason)),
    num_cached_tokens=U64,
    phases=tuples(PHASE),
    error=maybe(TEXT),
)
TICKETS = st.builds(
    Ticket,
    transfer_id=HEX128,
    attempt_id=HEX128,
    receiver=PEER,
    layout_fingerprint=TEXT,
    first_block=st.integers(0, 2**19),
    num_blocks=st.integers(0, 2**19),
    num_tokens=U64,
    num_cached_tokens=U64,
    lease_s=st.floats(0.001, 1e6),
)
WORD = st.builds(
    FinalWord,
    transfer_id=HEX128,
    attempt_id=HEX128,
    receiver_epoch=U64,
    outcome=st.sampled_from(TransferOutcome),
    num_tokens=U64,
    checksums=tuples(U64),
    first_token=TOKEN,
    detail=TEXT,
    busy_s=st.floats(0, 1e6),
)


class FixedClock:
    """A clock that stands still at a power of two, so that adding and subtracting is exact."""

    def monotonic_s(self) -> float:
        return 1024.0

    def wall_ns(self) -> int:
        return 0


CLOCK = FixedClock()


def through_wire(message: Any) -> Any:
    """The message as its reader gets it."""
    return type(message).FromString(message.SerializeToString())


# Sampling


def test_sampling_has_the_same_fields_on_both_sides() -> None:
    wire = {field.name for field in words.SamplingParams.DESCRIPTOR.fields}
    assert wire == {field.name for field in dataclasses.fields(SamplingParams)}


def test_every_scalar_of_sampling_is_optional_on_the_wire() -> None:
    for field in words.SamplingParams.DESCRIPTOR.fields:
        assert field.is_repeated or field.has_presence, field.name


def test_unset_sampling_takes_the_defaults_of_the_domain() -> None:
    assert codec.decode_sampling(words.SamplingParams()) == SamplingParams()
    assert codec.decode_request(pb.GenerateRequest(prompt="hi")) == Request(prompt="hi")


@pytest.mark.parametrize("zero", ["temperature", "top_p", "max_tokens", "repetition_penalty", "n", "seed"])
def test_a_zero_that_was_set_is_not_a_default(zero: str) -> None:
    assert getattr(codec.decode_sampling(words.SamplingParams(**{zero: 0})), zero) == 0


@given(SAMPLING)
@settings(max_examples=50)
def test_every_sampling_field_round_trips(params: SamplingParams) -> None:
    message = words.SamplingParams()
    codec.encode_sampling(params, message)
    assert codec.decode_sampling(through_wire(message)) == params


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", -1), ("n", -3), ("top_k", -1), ("min_tokens", -1), ("seed", -1), ("logprobs", -1),
     ("stop_token_ids", (-1,)), ("logit_bias", {-1: 1.0}), ("temperature", float("nan"))],
)  # fmt: skip
def test_p30_nonsense_crosses_the_wire_so_that_the_one_validator_names_it(name: str, value: Any) -> None:
    message = words.SamplingParams()
    codec.encode_sampling(SamplingParams(**{name: value}), message)
    crossed = codec.decode_sampling(through_wire(message))
    with pytest.raises(InvalidRequest) as caught:
        validate_sampling(crossed, ModelLimits(vocab_size=100, max_context_tokens=100))
    assert caught.value.field == f"sampling.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 2**31), ("seed", 2**63), ("temperature", "hot"), ("stop", ("\ud800",)),
     ("stop_token_ids", (2**31,)), ("logit_bias", {2**31: 1.0}), ("logit_bias", {1: "much"})],
)  # fmt: skip
def test_what_the_wire_cannot_carry_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.encode_sampling(SamplingParams(**{name: value}), words.SamplingParams())
    assert caught.value.field == f"sampling.{name}"


# Requests and answers


@given(REQUEST, INPUT)
@settings(max_examples=50)
def test_requests_round_trip(request: Request, given_input: dict[str, Any]) -> None:
    request = dataclasses.replace(request, **given_input)
    assert codec.decode_request(through_wire(codec.encode_request(request))) == request


@pytest.mark.parametrize("empty", [{"prompt": ""}, {"messages": ()}, {"token_ids": ()}])
def test_an_empty_input_is_not_a_missing_one(empty: dict[str, Any]) -> None:
    request = Request(**empty)
    assert codec.decode_request(through_wire(codec.encode_request(request))) == request


def test_two_inputs_are_refused_before_one_of_them_is_lost() -> None:
    with pytest.raises(InvalidRequest, match="got prompt and token_ids") as caught:
        codec.encode_request(Request(prompt="a", token_ids=(1,)))
    assert caught.value.field == "input"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(prompt="secret \ud800"), "prompt"),
        (Request(messages=(ChatMessage("user", "secret \udfff"),)), "messages[0].content"),
        (Request(token_ids=(2**31,)), "token_ids"),
        (Request(prompt="x", priority=2**31), "priority"),
        (Request(prompt="x", slo=Slo(ttft_s="soon")), "slo.ttft_s"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_p31_a_bad_field_is_named_and_its_text_is_not_repeated(request_: Request, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.encode_request(request_)
    assert caught.value.field == field
    assert "secret" not in str(caught.value)


@given(INPUT, TEXT)
@settings(max_examples=30)
def test_tokenize_requests_round_trip(given_input: dict[str, Any], model: str) -> None:
    request = Request(model=model, **given_input)
    if request.token_ids is not None:
        with pytest.raises(InvalidRequest) as caught:
            codec.encode_tokenize(request)
        assert caught.value.field == "token_ids"
    else:
        assert codec.decode_tokenize(through_wire(codec.encode_tokenize(request))) == request


@given(CHUNK)
@settings(max_examples=100)
def test_chunks_round_trip(chunk: GenerateChunk) -> None:
    assert codec.decode_chunk(through_wire(codec.encode_chunk(chunk))) == chunk


@given(st.lists(MODEL, max_size=2), st.lists(RECORDS, max_size=2), TEXT)
@settings(max_examples=30)
def test_server_info_round_trips_but_for_the_addresses(
    models: list[ModelCard], records: list[WorkerRecord], version: str
) -> None:
    info = ServerInfo(version, tuple(models), tuple(records))
    message = codec.encode_server_info(info)
    shown = tuple(dataclasses.replace(r, address=PeerAddress(r.worker_id, r.epoch, "", b"")) for r in records)
    assert codec.decode_server_info(through_wire(message)) == dataclasses.replace(info, workers=shown)


def test_users_are_not_told_internal_addresses() -> None:
    raw = codec.encode_server_info(ServerInfo("1", (), (RECORD,))).SerializeToString()
    assert RECORD.address.control.encode() not in raw
    assert RECORD.address.transport not in raw


# Between our own processes


@given(
    st.builds(
        SequenceSpec,
        attempt_id=HEX128,
        token_ids=tuples(U32, min_size=1, max_size=9),
        num_prompt_tokens=st.just(1),
        sampling=SAMPLING,
        seed=U64,
        chain_root=st.binary(min_size=16, max_size=16),
        priority=I32,
        deadline=maybe(st.builds(Deadline, st.integers(1024, 4096).map(float))),
    )
)
@settings(max_examples=50)
def test_specs_round_trip(spec: SequenceSpec) -> None:
    message = worker.SequenceSpec()
    internal_codec.encode_spec(spec, message, CLOCK)
    assert internal_codec.decode_spec(through_wire(message), CLOCK) == spec


def test_a_deadline_crosses_as_what_is_left_of_it() -> None:
    class Later(FixedClock):
        def monotonic_s(self) -> float:
            return 5.0

    message = worker.SequenceSpec()
    internal_codec.encode_spec(dataclasses.replace(SPEC, deadline=Deadline(1026.0)), message, CLOCK)
    assert internal_codec.decode_spec(message, Later()).deadline == Deadline(7.0)
    internal_codec.encode_spec(dataclasses.replace(SPEC, deadline=Deadline(3.0)), message, CLOCK)
    assert internal_codec.decode_spec(message, Later()).deadline == Deadline(5.0), (
        "passed is passed there too"
    )


@given(tuples(OUTPUT))
@settings(max_examples=100)
def test_steps_round_trip(outputs: tuple[SequenceOutput, ...]) -> None:
    assert internal_codec.decode_step(through_wire(internal_codec.encode_step(outputs))) == outputs


@given(st.builds(PrefillResult, first_token=TOKEN, num_cached_tokens=U64, phases=tuples(PHASE)))
@settings(max_examples=30)
def test_prefill_results_round_trip(result: PrefillResult) -> None:
    message = internal_codec.encode_prefill_result(result)
    assert internal_codec.decode_prefill_result(through_wire(message)) == result


@given(RECORDS)
@settings(max_examples=30)
def test_records_round_trip(record: WorkerRecord) -> None:
    message = worker.WorkerRecord()
    internal_codec.encode_record(record, message)
    assert internal_codec.decode_record(through_wire(message)) == record


@given(TICKETS)
@settings(max_examples=30)
def test_tickets_round_trip(ticket: Ticket) -> None:
    message = worker.Ticket()
    internal_codec.encode_ticket(ticket, message)
    assert internal_codec.decode_ticket(through_wire(message)) == ticket


@given(WORD)
@settings(max_examples=30)
def test_final_words_round_trip(word: FinalWord) -> None:
    assert internal_codec.decode_word(through_wire(internal_codec.encode_word(word))) == word


def test_a_failed_transfer_has_no_token() -> None:
    word = FinalWord(TRANSFER, ATTEMPT, Epoch(1), TransferOutcome.FAILED, detail="peer gone")
    assert internal_codec.decode_word(through_wire(internal_codec.encode_word(word))) == word


@given(st.builds(Hello, protocol_version=U32, peer=PEER, layout_fingerprint=TEXT))
@settings(max_examples=30)
def test_hellos_round_trip(hello: Hello) -> None:
    message = transfer.Hello()
    internal_codec.encode_hello(hello, message)
    assert internal_codec.decode_hello(through_wire(message)) == hello


# Strictness


def ticket_with(**changes: Any) -> worker.Ticket:
    message = worker.Ticket()
    internal_codec.encode_ticket(TICKET, message)
    for name, value in changes.items():
        setattr(message, name, value)
    return message


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("ticket.transfer_id", {"transfer_id": "ABCDEF0123456789" * 2}),
        ("ticket.transfer_id", {"transfer_id": "ab"}),
        ("ticket.attempt_id", {"attempt_id": ""}),
        ("ticket.lease_s", {"lease_s": 0.0}),
        ("ticket.lease_s", {"lease_s": float("nan")}),
        ("ticket.num_blocks", {"num_blocks": 2**20, "first_block": 1}),
    ],
)
def test_a_ticket_that_makes_no_sense_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        internal_codec.decode_ticket(ticket_with(**changes))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("spec.attempt_id", {"attempt_id": "g" * 32}),
        ("spec.num_prompt_tokens", {"num_prompt_tokens": 0}),
        ("spec.num_prompt_tokens", {"num_prompt_tokens": 4}),
        ("spec.chain_root", {"chain_root": b"short"}),
        ("spec.remaining_s", {"remaining_s": -1.0}),
        ("spec.remaining_s", {"remaining_s": float("nan")}),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    message = worker.SequenceSpec()
    internal_codec.encode_spec(SPEC, message, CLOCK)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(InvalidRequest) as caught:
        internal_codec.decode_spec(message, CLOCK)
    assert caught.value.field == field


def test_unknown_and_unspecified_enum_values_are_refused_by_name() -> None:
    for value in (0, 99):
        with pytest.raises(InvalidRequest, match=f"phases.phase: {value} is not"):
            codec.decode_phase(words.PhaseTiming(phase=value))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=f"outcome: {value} is not"):
            internal_codec.decode_word(transfer.FinishRequest(outcome=value))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="finish_reason: 99 is not"):
        codec.decode_chunk(pb.GenerateResponse(finish_reason=99))  # type: ignore[arg-type]


def test_missing_parts_are_refused_by_name() -> None:
    cases = [
        ("first_token", lambda: internal_codec.decode_prefill_result(worker.PrefillResponse())),
        (
            "first_token",
            lambda: internal_codec.decode_word(
                transfer.FinishRequest(
                    transfer_id=TRANSFER, attempt_id=ATTEMPT, outcome=transfer.TRANSFER_OUTCOME_OK
                )
            ),
        ),
        ("worker.worker_id", lambda: codec.decode_worker(worker_pb2.WorkerInfo())),
        ("worker.load", lambda: codec.decode_worker(worker_pb2.WorkerInfo(worker_id="w"))),
        ("hello.peer.worker_id", lambda: internal_codec.decode_hello(transfer.Hello())),
        ("gateway_id", lambda: internal_codec.decode_gateway_id("")),
        ("token.top", lambda: codec.decode_token(words.Token(top=[words.TokenLogprob()]))),
        (
            "phases.attributes",
            lambda: codec.decode_phase(
                words.PhaseTiming(phase=words.PHASE_DECODE, attributes={"a": words.AttributeValue()})
            ),
        ),
    ]
    for field, decode in cases:
        with pytest.raises(InvalidRequest) as caught:
            decode()
        assert caught.value.field == field


def test_the_fakes_that_other_tests_use_cross_unchanged() -> None:
    assert internal_codec.decode_ticket(ticket_with()) == TICKET
    message = transfer.Hello()
    internal_codec.encode_hello(HELLO, message)
    assert internal_codec.decode_hello(message) == HELLO
    assert HELLO.peer.worker_id == WorkerId("decode-0")
