"""The gRPC side of the services: wire in, domain call, wire out. No decision is taken here.

Errors leave as they come: `interceptors` makes statuses of them. Streams are written with
`context.write` inside a coroutine, not yielded: so a client that vanishes cancels *our* coroutine,
also while it waits for a slow reader, and the domain iterator is closed before the call ends.
Waiting in `write` is the flow control: a slow reader stops its own iterator and nothing else (P32).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc.aio

from tandem.clock import Clock, Deadline
from tandem.internal.v1 import transfer_service_pb2 as transfer
from tandem.internal.v1 import transfer_service_pb2_grpc as transfer_grpc
from tandem.internal.v1 import worker_service_pb2 as worker
from tandem.internal.v1 import worker_service_pb2_grpc as worker_grpc
from tandem.rpc import codec, internal_codec
from tandem.rpc.metadata import trace_headers
from tandem.rpc.services import CallContext, InferenceService, TransferService, WorkerService
from tandem.telemetry.rpc_spans import current_call_headers
from tandem.v1 import inference_service_pb2 as pb
from tandem.v1 import inference_service_pb2_grpc as inference_grpc

_Value = TypeVar("_Value")
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")
Call = grpc.aio.ServicerContext


def call_context(context: Call[Any, Any], clock: Clock) -> CallContext:
    """The caller's deadline on our clock, and the trace context: of this call's span if it has one."""
    remaining_s: float | None = context.time_remaining()
    deadline = None if remaining_s is None else Deadline.after(clock, max(0.0, remaining_s))
    headers = current_call_headers() or trace_headers(context.invocation_metadata())
    return CallContext(deadline, headers)


async def stream(
    values: AsyncGenerator[_Value], encode: Callable[[_Value], _Reply], context: Call[_Request, _Reply]
) -> None:
    """Write everything `values` brings; it is closed however this ends."""
    async with aclosing(values):
        async for value in values:
            await context.write(encode(value))


class InferenceServicer(inference_grpc.InferenceServiceServicer):
    """``tandem.v1.InferenceService`` around an `InferenceService`."""

    def __init__(self, service: InferenceService, clock: Clock) -> None:
        self._service = service
        self._clock = clock

    async def Generate(
        self, request: pb.GenerateRequest, context: Call[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        """Stream the answer."""
        chunks = self._service.generate(codec.decode_request(request), call_context(context, self._clock))
        await stream(chunks, codec.encode_chunk, context)

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: Call[pb.TokenizeRequest, pb.TokenizeResponse]
    ) -> pb.TokenizeResponse:
        """Tokenise as Generate would."""
        result = await self._service.tokenize(codec.decode_tokenize(request))
        return pb.TokenizeResponse(token_ids=result.token_ids)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Call[pb.DetokenizeRequest, pb.DetokenizeResponse]
    ) -> pb.DetokenizeResponse:
        """The text of token ids."""
        text = await self._service.detokenize(request.model, tuple(request.token_ids))
        return pb.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Call[pb.ListModelsRequest, pb.ListModelsResponse]
    ) -> pb.ListModelsResponse:
        """The models served here."""
        cards = await self._service.list_models()
        return pb.ListModelsResponse(models=map(codec.encode_model, cards))

    async def GetServerInfo(
        self,
        request: pb.GetServerInfoRequest,
        context: Call[pb.GetServerInfoRequest, pb.GetServerInfoResponse],
    ) -> pb.GetServerInfoResponse:
        """Version, models and workers without their addresses."""
        return codec.encode_server_info(await self._service.server_info())


class WorkerServicer(worker_grpc.WorkerServiceServicer):
    """``tandem.internal.v1.WorkerService`` around a `WorkerService`."""

    def __init__(self, service: WorkerService, clock: Clock) -> None:
        self._service = service
        self._clock = clock

    async def Attach(
        self, request: worker.AttachRequest, context: Call[worker.AttachRequest, worker.AttachResponse]
    ) -> None:
        """Stream a gateway's step outputs."""
        gateway_id = internal_codec.decode_gateway_id(request.gateway_id)
        steps = self._service.attach(gateway_id, call_context(context, self._clock))
        await stream(steps, internal_codec.encode_step, context)

    async def Submit(
        self, request: worker.SubmitRequest, context: Call[worker.SubmitRequest, worker.SubmitResponse]
    ) -> worker.SubmitResponse:
        """Run a whole sequence."""
        await self._service.submit(
            internal_codec.decode_spec(request.spec, self._clock),
            internal_codec.decode_gateway_id(request.gateway_id),
            call_context(context, self._clock),
        )
        return worker.SubmitResponse()

    async def Reserve(
        self, request: worker.ReserveRequest, context: Call[worker.ReserveRequest, worker.ReserveResponse]
    ) -> worker.ReserveResponse:
        """Reserve blocks and answer with a ticket."""
        ticket = await self._service.reserve(
            internal_codec.decode_spec(request.spec, self._clock),
            internal_codec.decode_gateway_id(request.gateway_id),
            call_context(context, self._clock),
        )
        reply = worker.ReserveResponse()
        internal_codec.encode_ticket(ticket, reply.ticket)
        return reply

    async def Prefill(
        self, request: worker.PrefillRequest, context: Call[worker.PrefillRequest, worker.PrefillResponse]
    ) -> worker.PrefillResponse:
        """Compute a prompt and send its blocks."""
        result = await self._service.prefill(
            internal_codec.decode_spec(request.spec, self._clock),
            internal_codec.decode_ticket(request.ticket),
            internal_codec.decode_gateway_id(request.gateway_id),
            call_context(context, self._clock),
        )
        return internal_codec.encode_prefill_result(result)

    async def Cancel(
        self, request: worker.CancelRequest, context: Call[worker.CancelRequest, worker.CancelResponse]
    ) -> worker.CancelResponse:
        """Stop an attempt."""
        await self._service.cancel(internal_codec.decode_attempt_id(request.attempt_id))
        return worker.CancelResponse()

    async def Describe(
        self, request: worker.DescribeRequest, context: Call[worker.DescribeRequest, worker.DescribeResponse]
    ) -> worker.DescribeResponse:
        """This worker's record."""
        reply = worker.DescribeResponse()
        internal_codec.encode_record(await self._service.describe(), reply.record)
        return reply


class TransferServicer(transfer_grpc.TransferServiceServicer):
    """``tandem.internal.v1.TransferService`` around a `TransferService`."""

    def __init__(self, service: TransferService, clock: Clock) -> None:
        self._service = service
        self._clock = clock

    async def Handshake(
        self,
        request: transfer.HandshakeRequest,
        context: Call[transfer.HandshakeRequest, transfer.HandshakeResponse],
    ) -> transfer.HandshakeResponse:
        """Exchange identities."""
        theirs = internal_codec.decode_hello(request.hello)
        reply = transfer.HandshakeResponse()
        ours = await self._service.handshake(theirs, call_context(context, self._clock))
        internal_codec.encode_hello(ours, reply.hello)
        return reply

    async def Finish(
        self, request: transfer.FinishRequest, context: Call[transfer.FinishRequest, transfer.FinishResponse]
    ) -> transfer.FinishResponse:
        """A sender's final word."""
        word = internal_codec.decode_word(request)
        await self._service.finish(word, call_context(context, self._clock))
        return transfer.FinishResponse()

    async def Renew(
        self, request: transfer.RenewRequest, context: Call[transfer.RenewRequest, transfer.RenewResponse]
    ) -> transfer.RenewResponse:
        """Move leases later."""
        unknown = await self._service.renew(
            tuple(map(internal_codec.decode_transfer_id, request.transfer_ids)),
            call_context(context, self._clock),
        )
        return transfer.RenewResponse(unknown_transfer_ids=unknown)
