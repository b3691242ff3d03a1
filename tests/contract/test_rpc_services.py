"""One suite for the services as objects and the services over gRPC: callers can't tell them apart."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.fake_services import (
    ATTEMPT,
    CARD,
    CHUNKS,
    GATEWAY,
    HELLO,
    RECORD,
    SPEC,
    TICKET,
    TRANSFER,
    FakeInference,
    FakeWorker,
)

from tandem import errors
from tandem.clock import Deadline
from tandem.errors import TandemError
from tandem.generation import CallContext, PrefillResult, TokenOutput
from tandem.ids import Epoch
from tandem.kv.ticket import FinalWord, PeerAddress, TransferOutcome
from tandem.request import ChatMessage, Request, SamplingParams, Slo
from tandem.rpc.channels import ChannelPool
from tandem.rpc.clients import GrpcInference, GrpcTransfer, GrpcWorker
from tandem.rpc.server import RpcServer
from tandem.rpc.services import (
    GenerateChunk,
    InferenceService,
    ServerInfo,
    TokenizeResult,
    TransferService,
    WorkerService,
)
from tandem.system import SystemClock

CLOCK = SystemClock()
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
WORD = FinalWord(TRANSFER, ATTEMPT, Epoch(7), TransferOutcome.OK, 3, (2**64 - 1,), TokenOutput(5))
REQUEST = Request(
    model="smollm2",
    messages=(ChatMessage("system", "be brief"), ChatMessage("user", "grüß dich 🌍")),
    sampling=SamplingParams(temperature=0.7, max_tokens=5, stop=("\n",), logit_bias={7: -1.5}, n=2),
    priority=-3,
    slo=Slo(ttft_s=0.5),
    session_id="s",
    tenant="t",
)


@dataclass
class Side:
    """What a test holds: the services as a caller sees them, and the fakes behind them."""

    inference: InferenceService
    worker: WorkerService
    transfer: TransferService
    fake_inference: FakeInference
    fake_worker: FakeWorker


@pytest.fixture(params=["direct", "grpc"])
async def side(request: pytest.FixtureRequest) -> AsyncIterator[Side]:
    inference, worker = FakeInference(), FakeWorker()
    if request.param == "direct":
        yield Side(inference, worker, worker, inference, worker)
        return
    server = RpcServer(
        "127.0.0.1:0", clock=CLOCK, inference=inference, worker=worker, transfer=worker, grace_s=0.0
    )
    async with server, ChannelPool() as pool:
        at = (pool, server.address, CLOCK)
        yield Side(GrpcInference(*at), GrpcWorker(*at), GrpcTransfer(*at), inference, worker)


def arrived(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Calls as seen by the service, without the deadlines that clients add to those that have none."""
    return [
        tuple(dataclasses.replace(x, deadline=None) if isinstance(x, CallContext) else x for x in call)
        for call in calls
    ]


async def collect(stream: AsyncIterator[Any]) -> list[Any]:
    return [value async for value in stream]


# What goes in arrives, what comes out returns


async def test_generate_streams_what_the_service_says(side: Side) -> None:
    assert await collect(side.inference.generate(REQUEST, CallContext())) == list(CHUNKS)
    [(request, context)] = side.fake_inference.staged.calls
    assert request == REQUEST
    assert context == CallContext()


async def test_the_other_questions_of_users(side: Side) -> None:
    calls = side.fake_inference.staged.calls
    asked = Request(model="smollm2", prompt="hi")
    assert await side.inference.tokenize(asked) == TokenizeResult((1, 2, 3))
    assert await side.inference.detokenize("smollm2", [1, 2]) == "text"
    assert await side.inference.list_models() == (CARD,)
    info = await side.inference.server_info()
    assert calls == [(asked,), ("smollm2", (1, 2)), (), ()]
    hidden = dataclasses.replace(RECORD, address=PeerAddress(RECORD.worker_id, RECORD.epoch, "", b""))
    assert info in (ServerInfo("0.1.0", (CARD,), (RECORD,)), ServerInfo("0.1.0", (CARD,), (hidden,)))


async def test_what_a_gateway_asks_of_a_worker(side: Side) -> None:
    context = CallContext(trace_headers=TRACE)
    await side.worker.submit(SPEC, GATEWAY, context)
    assert await side.worker.reserve(SPEC, GATEWAY, context) == TICKET
    assert await side.worker.prefill(SPEC, TICKET, GATEWAY, context) == PrefillResult(
        TokenOutput(5, -0.5), 16, CHUNKS[-1].phases
    )
    await side.worker.cancel(ATTEMPT)
    assert await side.worker.describe() == RECORD
    assert await collect(side.worker.attach(GATEWAY, context)) == list(side.fake_worker.steps)
    assert arrived(side.fake_worker.staged.calls) == [
        (SPEC, GATEWAY, context),
        (SPEC, GATEWAY, context),
        (SPEC, TICKET, GATEWAY, context),
        (ATTEMPT,),
        (),
        (GATEWAY, context),
    ]


async def test_what_a_sender_asks_of_a_receiver(side: Side) -> None:
    context = CallContext(trace_headers=TRACE)
    assert await side.transfer.handshake(HELLO, context) == HELLO
    await side.transfer.finish(WORD, context)
    assert await side.transfer.renew((TRANSFER, TRANSFER), context) == (TRANSFER,)
    assert arrived(side.fake_worker.staged.calls) == [
        (HELLO, context),
        (WORD, context),
        ((TRANSFER,) * 2, context),
    ]


async def test_deadlines_arrive_as_the_time_that_is_left(side: Side) -> None:
    deadline = Deadline.after(CLOCK, 500.0)
    spec = dataclasses.replace(SPEC, deadline=Deadline.after(CLOCK, 900.0))
    await side.worker.submit(spec, GATEWAY, CallContext(deadline))
    [(seen_spec, _, seen_context)] = side.fake_worker.staged.calls
    assert seen_context.deadline.at_s == pytest.approx(deadline.at_s, abs=2.0)
    assert seen_spec.deadline.at_s == pytest.approx(spec.deadline.at_s, abs=2.0)


async def test_p28_five_megabytes_cross(side: Side) -> None:
    request = Request(prompt="x" * (5 << 20))
    side.fake_inference.chunks = (GenerateChunk(text="y" * (5 << 20)),)
    [chunk] = await collect(side.inference.generate(request, CallContext()))
    assert len(chunk.text) == 5 << 20
    assert side.fake_inference.staged.calls[0][0] == request


async def test_many_calls_at_once(side: Side) -> None:
    answers = await asyncio.gather(
        *(collect(side.inference.generate(REQUEST, CallContext())) for _ in range(50))
    )
    assert all(answer == list(CHUNKS) for answer in answers)


# Errors


ERRORS: list[TandemError] = [
    errors.InvalidRequest("sampling.top_p", "must be in (0, 1], not 7"),
    errors.UnknownModel("no model 'x' here; served: smollm2"),
    errors.Overloaded("full: grüße", retry_after_s=2.5),
    errors.OutOfBlocks(wanted=9, free=2, retry_after_s=0.25),
    errors.Draining("shutting down"),
    errors.NoWorker("no decode worker is ready"),
    errors.DeadlineExceeded("late"),
    errors.Cancelled("gone"),
    errors.LayoutMismatch("block size 16, not 32"),
    errors.TicketRefused("unknown ticket"),
    errors.TransferFailed("checksum of block 3"),
    errors.InternalError("a bug"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", ["stream", "unary", "transfer"])
async def test_errors_reach_the_caller_as_they_were_raised(side: Side, error: TandemError, call: str) -> None:
    staged = side.fake_inference.staged if call == "stream" else side.fake_worker.staged
    staged.error = error
    seen: list[GenerateChunk] = []

    async def read() -> None:
        async for chunk in side.inference.generate(REQUEST, CallContext()):
            seen.append(chunk)  # noqa: PERF401 - what came before the error counts

    calls = {
        "stream": read,
        "unary": lambda: side.worker.prefill(SPEC, TICKET, GATEWAY, CallContext()),
        "transfer": lambda: side.transfer.finish(WORD, CallContext()),
    }
    with pytest.raises(TandemError) as caught:
        await calls[call]()
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)
    assert seen == (list(CHUNKS) if call == "stream" else [])


# Cancellation


async def test_p1_closing_a_stream_closes_the_service_s_iterator(side: Side) -> None:
    side.fake_inference.staged.hold = True
    async with aclosing(side.inference.generate(REQUEST, CallContext())) as stream:  # type: ignore[type-var]
        assert await anext(stream) == CHUNKS[0]
        assert not side.fake_inference.staged.closed.is_set()
    await side.fake_inference.staged.closed.wait()
    assert side.fake_inference.staged.ended_by in (GeneratorExit, asyncio.CancelledError)


async def test_p1_cancelling_the_reader_of_a_stream_ends_the_service_s_iterator(side: Side) -> None:
    staged = side.fake_worker.staged
    staged.hold = True
    attached = asyncio.Event()

    async def read() -> None:
        async for _ in side.worker.attach(GATEWAY, CallContext()):
            attached.set()

    task = asyncio.ensure_future(read())
    await attached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await staged.closed.wait()
    assert staged.ended_by is asyncio.CancelledError


@pytest.mark.parametrize("method", ["prefill", "reserve", "finish"])
async def test_p1_cancelling_a_call_cancels_it_in_the_service(side: Side, method: str) -> None:
    staged = side.fake_worker.staged
    staged.hold = True
    calls = {
        "prefill": lambda: side.worker.prefill(SPEC, TICKET, GATEWAY, CallContext()),
        "reserve": lambda: side.worker.reserve(SPEC, GATEWAY, CallContext()),
        "finish": lambda: side.transfer.finish(WORD, CallContext()),
    }
    task = asyncio.ensure_future(calls[method]())
    await staged.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await staged.closed.wait()
    assert staged.ended_by is asyncio.CancelledError


async def test_a_stream_that_nobody_reads_never_starts(side: Side) -> None:
    stream = side.inference.generate(REQUEST, CallContext())
    await stream.aclose()  # type: ignore[attr-defined]
    assert side.fake_inference.staged.calls == []


async def test_two_inputs_are_refused_when_the_stream_is_read(side: Side) -> None:
    side.fake_inference.staged.error = errors.InvalidRequest("input", "the service's own words")
    stream = side.inference.generate(Request(prompt="a", token_ids=(1,)), CallContext())
    with pytest.raises(errors.InvalidRequest) as caught:
        await collect(stream)
    assert caught.value.field == "input"
