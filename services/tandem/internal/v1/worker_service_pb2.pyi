from tandem.internal.v1 import transfer_service_pb2 as _transfer_service_pb2
from tandem.v1 import generation_pb2 as _generation_pb2
from tandem.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SequenceSpec(_message.Message):
    __slots__ = ("attempt_id", "token_ids", "num_prompt_tokens", "sampling", "seed", "chain_root", "priority", "remaining_s")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHAIN_ROOT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _generation_pb2.SamplingParams
    seed: int
    chain_root: bytes
    priority: int
    remaining_s: float
    def __init__(self, attempt_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., chain_root: _Optional[bytes] = ..., priority: _Optional[int] = ..., remaining_s: _Optional[float] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("attempt_id", "tokens", "finish_reason", "num_cached_tokens", "phases", "error")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    tokens: _containers.RepeatedCompositeFieldContainer[_generation_pb2.Token]
    finish_reason: _generation_pb2.FinishReason
    num_cached_tokens: int
    phases: _containers.RepeatedCompositeFieldContainer[_generation_pb2.PhaseTiming]
    error: str
    def __init__(self, attempt_id: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[_generation_pb2.Token, _Mapping]]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., num_cached_tokens: _Optional[int] = ..., phases: _Optional[_Iterable[_Union[_generation_pb2.PhaseTiming, _Mapping]]] = ..., error: _Optional[str] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("transfer_id", "attempt_id", "receiver", "layout_fingerprint", "first_block", "num_blocks", "num_tokens", "num_cached_tokens", "lease_s")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt_id: str
    receiver: _transfer_service_pb2.PeerAddress
    layout_fingerprint: str
    first_block: int
    num_blocks: int
    num_tokens: int
    num_cached_tokens: int
    lease_s: float
    def __init__(self, transfer_id: _Optional[str] = ..., attempt_id: _Optional[str] = ..., receiver: _Optional[_Union[_transfer_service_pb2.PeerAddress, _Mapping]] = ..., layout_fingerprint: _Optional[str] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...

class WorkerRecord(_message.Message):
    __slots__ = ("info", "control", "transport")
    INFO_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    info: _worker_pb2.WorkerInfo
    control: str
    transport: bytes
    def __init__(self, info: _Optional[_Union[_worker_pb2.WorkerInfo, _Mapping]] = ..., control: _Optional[str] = ..., transport: _Optional[bytes] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("gateway_id",)
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    def __init__(self, gateway_id: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    def __init__(self, outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("spec", "gateway_id")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    spec: SequenceSpec
    gateway_id: str
    def __init__(self, spec: _Optional[_Union[SequenceSpec, _Mapping]] = ..., gateway_id: _Optional[str] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("spec", "gateway_id")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    spec: SequenceSpec
    gateway_id: str
    def __init__(self, spec: _Optional[_Union[SequenceSpec, _Mapping]] = ..., gateway_id: _Optional[str] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("spec", "ticket", "gateway_id")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    spec: SequenceSpec
    ticket: Ticket
    gateway_id: str
    def __init__(self, spec: _Optional[_Union[SequenceSpec, _Mapping]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., gateway_id: _Optional[str] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("first_token", "num_cached_tokens", "phases")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    first_token: _generation_pb2.Token
    num_cached_tokens: int
    phases: _containers.RepeatedCompositeFieldContainer[_generation_pb2.PhaseTiming]
    def __init__(self, first_token: _Optional[_Union[_generation_pb2.Token, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., phases: _Optional[_Iterable[_Union[_generation_pb2.PhaseTiming, _Mapping]]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: WorkerRecord
    def __init__(self, record: _Optional[_Union[WorkerRecord, _Mapping]] = ...) -> None: ...
