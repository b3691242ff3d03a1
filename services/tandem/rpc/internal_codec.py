"""Wire messages between our own processes to domain types and back; rules as in `codec`.

Only the time that is left crosses a wire, so a spec's deadline is rebuilt on the reader's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from tandem.clock import Clock, Deadline
from tandem.directory.base import WorkerRecord
from tandem.errors import InvalidRequest
from tandem.generation import PhaseTiming, PrefillResult, SequenceOutput, SequenceSpec, TokenOutput
from tandem.ids import AttemptId, Epoch, GatewayId, TransferId, WorkerId
from tandem.internal.v1 import transfer_service_pb2 as transfer
from tandem.internal.v1 import worker_service_pb2 as pb
from tandem.kv.hashing import HASH_BYTES
from tandem.kv.ticket import POSITION_BITS, FinalWord, Hello, PeerAddress, Ticket, TransferOutcome
from tandem.rpc.codec import (
    FINISH,
    decode_phase,
    decode_sampling,
    decode_token,
    decode_worker,
    encode_phase,
    encode_sampling,
    encode_token,
    encode_worker,
)
from tandem.rpc.wire import WireEnum, extend_field, set_field

OUTCOME = WireEnum(TransferOutcome, transfer.TransferOutcome, "TRANSFER_OUTCOME")
_HEX_DIGITS = frozenset("0123456789abcdef")
_ID_DIGITS = 32


def decode_attempt_id(text: str, field: str = "attempt_id") -> AttemptId:
    """128 bits in hex, or `InvalidRequest`."""
    return AttemptId(_hex128(text, field))


def decode_transfer_id(text: str, field: str = "transfer_id") -> TransferId:
    """128 bits in hex, or `InvalidRequest`."""
    return TransferId(_hex128(text, field))


def decode_gateway_id(text: str) -> GatewayId:
    """Not empty, or `InvalidRequest`."""
    if not text:
        raise InvalidRequest("gateway_id", "must not be empty")
    return GatewayId(text)


def _hex128(text: str, field: str) -> str:
    if len(text) != _ID_DIGITS or not _HEX_DIGITS.issuperset(text):
        raise InvalidRequest(field, f"must be {_ID_DIGITS} lower-case hex digits")
    return text


# Sequences


def encode_spec(spec: SequenceSpec, into: pb.SequenceSpec, clock: Clock) -> None:
    """Fill an empty `into`; a deadline that has passed crosses as zero seconds."""
    into.attempt_id = spec.attempt_id
    extend_field(into.token_ids, spec.token_ids, "spec.token_ids")
    set_field(into, "num_prompt_tokens", spec.num_prompt_tokens, "spec.num_prompt_tokens")
    into.sampling.SetInParent()
    encode_sampling(spec.sampling, into.sampling, prefix="spec.sampling")
    set_field(into, "seed", spec.seed, "spec.seed")
    into.chain_root = spec.chain_root
    set_field(into, "priority", spec.priority, "spec.priority")
    if spec.deadline is not None:
        into.remaining_s = spec.deadline.remaining_s(clock)


def decode_spec(message: pb.SequenceSpec, clock: Clock) -> SequenceSpec:
    """A sequence to compute; its deadline is counted from now."""
    token_ids = tuple(message.token_ids)
    if not 0 < message.num_prompt_tokens <= len(token_ids):
        raise InvalidRequest(
            "spec.num_prompt_tokens",
            f"must be between 1 and the {len(token_ids)} tokens given, not {message.num_prompt_tokens}",
        )
    if len(message.chain_root) != HASH_BYTES:
        raise InvalidRequest(
            "spec.chain_root", f"must have {HASH_BYTES} bytes, not {len(message.chain_root)}"
        )
    deadline = None
    if message.HasField("remaining_s"):
        if not message.remaining_s >= 0:  # NaN too
            raise InvalidRequest("spec.remaining_s", f"must not be {message.remaining_s:g}")
        deadline = Deadline.after(clock, message.remaining_s)
    return SequenceSpec(
        attempt_id=decode_attempt_id(message.attempt_id, "spec.attempt_id"),
        token_ids=token_ids,
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=decode_sampling(message.sampling),
        seed=message.seed,
        chain_root=message.chain_root,
        priority=message.priority,
        deadline=deadline,
    )


def encode_step(outputs: Iterable[SequenceOutput]) -> pb.AttachResponse:
    """One engine step's outputs. Hot: once per step, with every running sequence in it."""
    message = pb.AttachResponse()
    add = message.outputs.add
    for output in outputs:
        wire = add(attempt_id=output.attempt_id)
        for token in output.tokens:
            encode_token(token, wire.tokens.add())
        if output.num_cached_tokens:
            wire.num_cached_tokens = output.num_cached_tokens
        if output.finish is not None:
            wire.finish_reason = FINISH.encode(output.finish)
        for phase in output.phases:
            encode_phase(phase, wire.phases.add())
        if output.error is not None:
            wire.error = output.error
    return message


def decode_step(message: pb.AttachResponse) -> tuple[SequenceOutput, ...]:
    """One engine step's outputs. Hot."""
    return tuple([_decode_output(wire) for wire in message.outputs])


def _decode_output(wire: pb.SequenceOutput) -> SequenceOutput:
    finish = wire.finish_reason
    phases = wire.phases
    return SequenceOutput(
        decode_attempt_id(wire.attempt_id, "outputs.attempt_id"),
        tuple([decode_token(token) for token in wire.tokens]),
        FINISH.decode(finish, "outputs.finish_reason") if finish else None,
        wire.num_cached_tokens,
        tuple([decode_phase(phase) for phase in phases]) if phases else (),
        wire.error if wire.HasField("error") else None,
    )


def encode_prefill_result(result: PrefillResult) -> pb.PrefillResponse:
    """What the gateway learns from a sender."""
    message = pb.PrefillResponse(num_cached_tokens=result.num_cached_tokens)
    message.first_token.SetInParent()
    encode_token(result.first_token, message.first_token)
    for phase in result.phases:
        encode_phase(phase, message.phases.add())
    return message


def decode_prefill_result(message: pb.PrefillResponse) -> PrefillResult:
    """What the gateway learns from a sender; without a token it is nothing."""
    if not message.HasField("first_token"):
        raise InvalidRequest("first_token", "must be set")
    phases: tuple[PhaseTiming, ...] = tuple([decode_phase(phase) for phase in message.phases])
    return PrefillResult(decode_token(message.first_token), message.num_cached_tokens, phases)


# Workers


def encode_peer(peer: PeerAddress, into: transfer.PeerAddress) -> None:
    """Fill an empty `into`."""
    into.worker_id = peer.worker_id
    into.epoch = peer.epoch
    into.control = peer.control
    into.transport = peer.transport


def decode_peer(message: transfer.PeerAddress, field: str) -> PeerAddress:
    """How to reach a worker."""
    for name in ("worker_id", "control", "transport"):
        if not getattr(message, name):
            raise InvalidRequest(f"{field}.{name}", "must not be empty")
    return PeerAddress(WorkerId(message.worker_id), Epoch(message.epoch), message.control, message.transport)


def encode_record(record: WorkerRecord, into: pb.WorkerRecord) -> None:
    """Fill an empty `into`, addresses included."""
    encode_worker(record, into.info)
    into.control = record.address.control
    into.transport = record.address.transport


def decode_record(message: pb.WorkerRecord) -> WorkerRecord:
    """A worker's record with its addresses."""
    return decode_worker(message.info, control=message.control, transport=message.transport)


# Transfers


def encode_ticket(ticket: Ticket, into: pb.Ticket) -> None:
    """Fill an empty `into`."""
    into.transfer_id = ticket.transfer_id
    into.attempt_id = ticket.attempt_id
    encode_peer(ticket.receiver, into.receiver)
    into.layout_fingerprint = ticket.layout_fingerprint
    into.first_block = ticket.first_block
    into.num_blocks = ticket.num_blocks
    into.num_tokens = ticket.num_tokens
    into.num_cached_tokens = ticket.num_cached_tokens
    into.lease_s = ticket.lease_s


def decode_ticket(message: pb.Ticket) -> Ticket:
    """A ticket whose numbers make sense; whether it is known is for its receiver to say."""
    end = message.first_block + message.num_blocks
    if end > 1 << POSITION_BITS:
        raise InvalidRequest("ticket.num_blocks", f"ends at block {end}, past {1 << POSITION_BITS}")
    if not (math.isfinite(message.lease_s) and message.lease_s > 0):
        raise InvalidRequest("ticket.lease_s", f"must be a positive time, not {message.lease_s:g}")
    return Ticket(
        transfer_id=decode_transfer_id(message.transfer_id, "ticket.transfer_id"),
        attempt_id=decode_attempt_id(message.attempt_id, "ticket.attempt_id"),
        receiver=decode_peer(message.receiver, "ticket.receiver"),
        layout_fingerprint=message.layout_fingerprint,
        first_block=message.first_block,
        num_blocks=message.num_blocks,
        num_tokens=message.num_tokens,
        num_cached_tokens=message.num_cached_tokens,
        lease_s=message.lease_s,
    )


def encode_word(word: FinalWord) -> transfer.FinishRequest:
    """A sender's final word."""
    message = transfer.FinishRequest(
        transfer_id=word.transfer_id,
        attempt_id=word.attempt_id,
        receiver_epoch=word.receiver_epoch,
        outcome=OUTCOME.encode(word.outcome),
        num_tokens=word.num_tokens,
        checksums=word.checksums,
        detail=word.detail,
        busy_s=word.busy_s,
    )
    if word.first_token is not None:
        message.first_token.SetInParent()
        encode_token(word.first_token, message.first_token)
    return message


def decode_word(message: transfer.FinishRequest) -> FinalWord:
    """A sender's final word. OK without a first token is refused: nothing could be decoded from it."""
    outcome = OUTCOME.decode(message.outcome, "outcome")
    first_token: TokenOutput | None = None
    if message.HasField("first_token"):
        first_token = decode_token(message.first_token)
    elif outcome is TransferOutcome.OK:
        raise InvalidRequest("first_token", "must be set when the outcome is OK")
    return FinalWord(
        transfer_id=decode_transfer_id(message.transfer_id),
        attempt_id=decode_attempt_id(message.attempt_id),
        receiver_epoch=Epoch(message.receiver_epoch),
        outcome=outcome,
        num_tokens=message.num_tokens,
        checksums=tuple(message.checksums),
        first_token=first_token,
        detail=message.detail,
        busy_s=message.busy_s,
    )


def encode_hello(hello: Hello, into: transfer.Hello) -> None:
    """Fill an empty `into`."""
    into.protocol_version = hello.protocol_version
    encode_peer(hello.peer, into.peer)
    into.layout_fingerprint = hello.layout_fingerprint


def decode_hello(message: transfer.Hello) -> Hello:
    """Who a peer says it is."""
    return Hello(
        message.protocol_version, decode_peer(message.peer, "hello.peer"), message.layout_fingerprint
    )
