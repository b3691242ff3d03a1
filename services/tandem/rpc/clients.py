"""The services over a channel: callers can't tell these from the service objects themselves.

Errors come back as the domain errors that the server raised; a broken connection is `PeerLost`.
A context's deadline becomes the call's timeout, its trace headers become metadata. Closing a stream's
iterator, or cancelling the task that awaits a call, cancels the call on the server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc.aio

from tandem import errors
from tandem.clock import Clock
from tandem.directory.base import WorkerRecord
from tandem.generation import SequenceOutput, SequenceSpec
from tandem.ids import AttemptId, GatewayId, TransferId
from tandem.internal.v1 import transfer_service_pb2 as transfer
from tandem.internal.v1 import worker_service_pb2 as worker
from tandem.internal.v1.transfer_service_pb2_grpc import TransferServiceStub
from tandem.internal.v1.worker_service_pb2_grpc import WorkerServiceStub
from tandem.kv.ticket import FinalWord, Hello, Ticket
from tandem.request import Request
from tandem.rpc import codec, internal_codec
from tandem.rpc.channels import ChannelPool
from tandem.rpc.metadata import trace_metadata
from tandem.rpc.services import (
    CallContext,
    GenerateChunk,
    ModelCard,
    PrefillResult,
    ServerInfo,
    TokenizeResult,
)
from tandem.rpc.status import from_rpc_error
from tandem.rpc.wire import extend_field, set_field
from tandem.v1 import inference_service_pb2 as pb
from tandem.v1.inference_service_pb2_grpc import InferenceServiceStub

DEFAULT_CALL_TIMEOUT_S = 30.0
"""Bounds calls that should be quick and that carry no deadline of their own."""

_Message = TypeVar("_Message")
_Reply = TypeVar("_Reply")
_Value = TypeVar("_Value")


class _Client:
    """What the three clients share: timeouts, metadata, and errors mapped at this boundary."""

    def __init__(
        self,
        pool: ChannelPool,
        address: str,
        clock: Clock,
        *,
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
    ) -> None:
        self._channel = pool.get(address)
        self._address = address
        self._clock = clock
        self._call_timeout_s = call_timeout_s

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Message, _Reply],
        message: _Message,
        decode: Callable[[_Reply], _Value],
        context: CallContext | None = None,
        *,
        patient: bool = False,
    ) -> _Value:
        """One unary call. `patient`: without a deadline only keepalive bounds it, as it may take long."""
        timeout_s = self._timeout_s(context)
        if timeout_s is None and not patient:
            timeout_s = self._call_timeout_s
        metadata = trace_metadata(context)
        async with self._mapped():
            return decode(await method(message, timeout=timeout_s, metadata=metadata))

    async def _stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[_Message, _Reply],
        encode: Callable[[], _Message],
        decode: Callable[[_Reply], _Value],
        context: CallContext,
    ) -> AsyncGenerator[_Value]:
        """One server stream; unbounded without a deadline, as keepalive notices a dead peer.

        Everything happens, and fails, on the first ``anext``, as it would in the service itself.
        """
        message = encode()
        timeout_s = self._timeout_s(context)
        async with self._mapped():
            call = method(message, timeout=timeout_s, metadata=trace_metadata(context))
            try:
                async for reply in call:
                    yield decode(reply)
            finally:
                call.cancel()

    def _timeout_s(self, context: CallContext | None) -> float | None:
        if context is None or context.deadline is None:
            return None
        remaining_s = context.deadline.remaining_s(self._clock)
        if remaining_s <= 0:
            raise errors.DeadlineExceeded(f"the deadline had passed before {self._address} was called")
        return remaining_s if math.isfinite(remaining_s) else None

    @asynccontextmanager
    async def _mapped(self) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._address) from error
        except errors.InvalidRequest as error:
            raise errors.InternalError(f"{self._address} answered nonsense: {error}") from error
        except grpc.aio.UsageError as error:  # the channel was closed before the call
            raise errors.PeerLost(f"the channel to {self._address} is closed") from error
        except asyncio.CancelledError:
            # Closing a channel makes gRPC raise this in tasks that nobody cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise errors.PeerLost(f"the channel to {self._address} was closed during the call") from None


class GrpcInference(_Client):
    """`InferenceService` at a gateway's address. Workers come without addresses in `server_info`."""

    def __init__(
        self,
        pool: ChannelPool,
        address: str,
        clock: Clock,
        *,
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
    ) -> None:
        super().__init__(pool, address, clock, call_timeout_s=call_timeout_s)
        self._stub = InferenceServiceStub(self._channel)

    def generate(self, request: Request, context: CallContext) -> AsyncGenerator[GenerateChunk]:
        """See `InferenceService`."""
        return self._stream(
            self._stub.Generate, lambda: codec.encode_request(request), codec.decode_chunk, context
        )

    async def tokenize(self, request: Request) -> TokenizeResult:
        """See `InferenceService`."""
        return await self._call(
            self._stub.Tokenize,
            codec.encode_tokenize(request),
            lambda reply: TokenizeResult(tuple(reply.token_ids)),
        )

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """See `InferenceService`."""
        message = pb.DetokenizeRequest()
        set_field(message, "model", model, "model")
        extend_field(message.token_ids, token_ids, "token_ids")
        return await self._call(self._stub.Detokenize, message, lambda reply: reply.text)

    async def list_models(self) -> tuple[ModelCard, ...]:
        """See `InferenceService`."""
        return await self._call(
            self._stub.ListModels,
            pb.ListModelsRequest(),
            lambda reply: tuple(map(codec.decode_model, reply.models)),
        )

    async def server_info(self) -> ServerInfo:
        """See `InferenceService`."""
        return await self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest(), codec.decode_server_info)


class GrpcWorker(_Client):
    """`WorkerService` at a worker's control address."""

    def __init__(
        self,
        pool: ChannelPool,
        address: str,
        clock: Clock,
        *,
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
    ) -> None:
        super().__init__(pool, address, clock, call_timeout_s=call_timeout_s)
        self._stub = WorkerServiceStub(self._channel)

    def attach(
        self, gateway_id: GatewayId, context: CallContext
    ) -> AsyncGenerator[tuple[SequenceOutput, ...]]:
        """See `WorkerService`."""
        return self._stream(
            self._stub.Attach,
            lambda: worker.AttachRequest(gateway_id=gateway_id),
            internal_codec.decode_step,
            context,
        )

    async def submit(self, spec: SequenceSpec, gateway_id: GatewayId, context: CallContext) -> None:
        """See `WorkerService`."""
        message = worker.SubmitRequest(gateway_id=gateway_id)
        internal_codec.encode_spec(spec, message.spec, self._clock)
        await self._call(self._stub.Submit, message, _nothing, context)

    async def reserve(self, spec: SequenceSpec, gateway_id: GatewayId, context: CallContext) -> Ticket:
        """See `WorkerService`."""
        message = worker.ReserveRequest(gateway_id=gateway_id)
        internal_codec.encode_spec(spec, message.spec, self._clock)
        return await self._call(
            self._stub.Reserve,
            message,
            lambda reply: internal_codec.decode_ticket(reply.ticket),
            context,
            patient=True,
        )

    async def prefill(
        self, spec: SequenceSpec, ticket: Ticket, gateway_id: GatewayId, context: CallContext
    ) -> PrefillResult:
        """See `WorkerService`."""
        message = worker.PrefillRequest(gateway_id=gateway_id)
        internal_codec.encode_spec(spec, message.spec, self._clock)
        internal_codec.encode_ticket(ticket, message.ticket)
        return await self._call(
            self._stub.Prefill, message, internal_codec.decode_prefill_result, context, patient=True
        )

    async def cancel(self, attempt_id: AttemptId) -> None:
        """See `WorkerService`."""
        await self._call(self._stub.Cancel, worker.CancelRequest(attempt_id=attempt_id), _nothing)

    async def describe(self) -> WorkerRecord:
        """See `WorkerService`."""
        return await self._call(
            self._stub.Describe,
            worker.DescribeRequest(),
            lambda reply: internal_codec.decode_record(reply.record),
        )


class GrpcTransfer(_Client):
    """`TransferService` at a worker's control address."""

    def __init__(
        self,
        pool: ChannelPool,
        address: str,
        clock: Clock,
        *,
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
    ) -> None:
        super().__init__(pool, address, clock, call_timeout_s=call_timeout_s)
        self._stub = TransferServiceStub(self._channel)

    async def handshake(self, hello: Hello, context: CallContext) -> Hello:
        """See `TransferService`."""
        message = transfer.HandshakeRequest()
        internal_codec.encode_hello(hello, message.hello)
        return await self._call(
            self._stub.Handshake,
            message,
            lambda reply: internal_codec.decode_hello(reply.hello),
            context,
        )

    async def finish(self, word: FinalWord, context: CallContext) -> None:
        """See `TransferService`."""
        await self._call(self._stub.Finish, internal_codec.encode_word(word), _nothing, context)

    async def renew(self, transfer_ids: Sequence[TransferId], context: CallContext) -> tuple[TransferId, ...]:
        """See `TransferService`."""
        return await self._call(
            self._stub.Renew,
            transfer.RenewRequest(transfer_ids=transfer_ids),
            lambda reply: tuple(map(internal_codec.decode_transfer_id, reply.unknown_transfer_ids)),
            context,
        )


def _nothing(reply: object) -> None:
    """The answer says no more than that it worked."""
