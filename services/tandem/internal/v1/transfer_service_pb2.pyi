from tandem.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransferOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_OUTCOME_UNSPECIFIED: _ClassVar[TransferOutcome]
    TRANSFER_OUTCOME_OK: _ClassVar[TransferOutcome]
    TRANSFER_OUTCOME_FAILED: _ClassVar[TransferOutcome]
    TRANSFER_OUTCOME_CANCELLED: _ClassVar[TransferOutcome]
TRANSFER_OUTCOME_UNSPECIFIED: TransferOutcome
TRANSFER_OUTCOME_OK: TransferOutcome
TRANSFER_OUTCOME_FAILED: TransferOutcome
TRANSFER_OUTCOME_CANCELLED: TransferOutcome

class PeerAddress(_message.Message):
    __slots__ = ("worker_id", "epoch", "control", "transport")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    control: str
    transport: bytes
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., control: _Optional[str] = ..., transport: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "peer", "layout_fingerprint")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    peer: PeerAddress
    layout_fingerprint: str
    def __init__(self, protocol_version: _Optional[int] = ..., peer: _Optional[_Union[PeerAddress, _Mapping]] = ..., layout_fingerprint: _Optional[str] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("hello",)
    HELLO_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("hello",)
    HELLO_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("transfer_id", "attempt_id", "receiver_epoch", "outcome", "num_tokens", "checksums", "first_token", "detail", "busy_s")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt_id: str
    receiver_epoch: int
    outcome: TransferOutcome
    num_tokens: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    first_token: _generation_pb2.Token
    detail: str
    busy_s: float
    def __init__(self, transfer_id: _Optional[str] = ..., attempt_id: _Optional[str] = ..., receiver_epoch: _Optional[int] = ..., outcome: _Optional[_Union[TransferOutcome, str]] = ..., num_tokens: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., first_token: _Optional[_Union[_generation_pb2.Token, _Mapping]] = ..., detail: _Optional[str] = ..., busy_s: _Optional[float] = ...) -> None: ...

class FinishResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("transfer_ids",)
    TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    transfer_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transfer_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("unknown_transfer_ids",)
    UNKNOWN_TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    unknown_transfer_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unknown_transfer_ids: _Optional[_Iterable[str]] = ...) -> None: ...
