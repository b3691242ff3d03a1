"""What only a real connection can do: break, hang, fill up, be late, be restarted."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.support.fake_services import (
    ATTEMPT,
    CHUNKS,
    GATEWAY,
    RECORD,
    SPEC,
    TICKET,
    FakeInference,
    FakeWorker,
)
from tests.support.tcp_proxy import TcpProxy

from tandem import errors
from tandem.clock import Deadline
from tandem.generation import CallContext
from tandem.kv.ticket import PeerAddress
from tandem.request import Request
from tandem.rpc.channels import ChannelPool, WireSettings
from tandem.rpc.clients import GrpcInference, GrpcWorker
from tandem.rpc.health import is_serving
from tandem.rpc.server import RpcServer
from tandem.rpc.services import GenerateChunk
from tandem.system import SystemClock
from tandem.v1 import generation_pb2, inference_service_pb2
from tandem.v1.inference_service_pb2_grpc import InferenceServiceStub

CLOCK = SystemClock()
REQUEST = Request(prompt="hi")
NOW = CallContext()
QUICK = WireSettings(keepalive_s=0.1, keepalive_timeout_s=0.2, connect_timeout_s=0.5)


@dataclass
class Recorder:
    """A `CallObserver` that remembers, and tells when a call ended."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    ended_one: asyncio.Event = field(default_factory=asyncio.Event)

    def started(self, method: str, headers: Mapping[str, str]) -> None:
        self.headers.append(headers)

    def ended(self, method: str, code: grpc.StatusCode, duration_s: float) -> None:
        assert duration_s >= 0
        self.calls.append((method.rpartition("/")[2], code.name))
        self.ended_one.set()


@dataclass
class Rig:
    """A server, and clients of it."""

    server: RpcServer
    pool: ChannelPool
    fake: FakeInference
    fake_worker: FakeWorker
    recorder: Recorder

    @property
    def inference(self) -> GrpcInference:
        return GrpcInference(self.pool, self.server.address, CLOCK)

    @property
    def worker(self) -> GrpcWorker:
        return GrpcWorker(self.pool, self.server.address, CLOCK)


@asynccontextmanager
async def rigged(settings: WireSettings | None = None, **options: Any) -> AsyncIterator[Rig]:
    fake, fake_worker, recorder = FakeInference(), FakeWorker(), Recorder()
    server = RpcServer(
        options.pop("address", "127.0.0.1:0"),
        clock=CLOCK,
        inference=fake,
        worker=fake_worker,
        transfer=fake_worker,
        settings=settings,
        observer=recorder,
        grace_s=options.pop("grace_s", 0.0),
        **options,
    )
    async with server, ChannelPool(settings) as pool:
        yield Rig(server, pool, fake, fake_worker, recorder)
    assert server.num_in_flight == 0


async def collect(stream: AsyncIterator[Any]) -> list[Any]:
    return [value async for value in stream]


# Deadlines


async def test_a_deadline_ends_the_call_on_both_sides() -> None:
    async with rigged() as rig:
        rig.fake_worker.staged.hold = True
        with pytest.raises(errors.DeadlineExceeded):
            await rig.worker.reserve(SPEC, GATEWAY, CallContext(Deadline.after(CLOCK, 0.3)))
        await rig.fake_worker.staged.closed.wait()
        assert rig.fake_worker.staged.ended_by is asyncio.CancelledError
        await rig.recorder.ended_one.wait()
        assert rig.recorder.calls[0] in (("Reserve", "DEADLINE_EXCEEDED"), ("Reserve", "CANCELLED"))


async def test_a_deadline_ends_a_stream_in_its_middle() -> None:
    async with rigged() as rig:
        rig.fake.staged.hold = True
        stream = rig.inference.generate(REQUEST, CallContext(Deadline.after(CLOCK, 0.3)))
        assert await anext(stream) == CHUNKS[0]
        with pytest.raises(errors.DeadlineExceeded):
            await anext(stream)
        await rig.fake.staged.closed.wait()


async def test_a_deadline_that_has_passed_costs_no_call() -> None:
    async with rigged() as rig:
        late = CallContext(Deadline.after(CLOCK, -1.0))
        with pytest.raises(errors.DeadlineExceeded):
            await rig.worker.reserve(SPEC, GATEWAY, late)
        with pytest.raises(errors.DeadlineExceeded):
            await collect(rig.inference.generate(REQUEST, late))
        assert rig.recorder.calls == []


async def test_p8_a_quick_question_without_a_deadline_has_one_all_the_same() -> None:
    async with rigged() as rig:
        rig.fake_worker.staged.hold = True
        worker = GrpcWorker(rig.pool, rig.server.address, CLOCK, call_timeout_s=0.2)
        with pytest.raises(errors.DeadlineExceeded):
            await worker.cancel(ATTEMPT)


# Errors


async def test_p31_a_bug_is_told_without_its_text_and_logged_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rigged() as rig:
        rig.fake.staged.error = ValueError("canary prompt")
        with caplog.at_level(logging.DEBUG), pytest.raises(errors.InternalError) as caught:
            await rig.inference.list_models()
    assert "canary" not in str(caught.value)
    assert "canary" not in caplog.text
    assert "ValueError" in caplog.text
    assert "fake_services.py" in caplog.text, "the log says where it was raised"


async def test_a_bad_message_is_refused_naming_the_field() -> None:
    async with rigged() as rig:
        with pytest.raises(errors.InvalidRequest) as caught:
            await rig.worker.cancel("not hex")  # type: ignore[arg-type]
        assert caught.value.field == "attempt_id"
        assert rig.fake_worker.staged.calls == []
        assert rig.recorder.calls == [("Cancel", "INVALID_ARGUMENT")]


async def test_a_server_that_answers_nonsense_is_an_internal_error() -> None:
    async with rigged() as rig:
        rig.fake_worker.describe = _nonsense  # type: ignore[method-assign]
        with pytest.raises(errors.InternalError, match=r"answered nonsense: worker\.worker_id"):
            await rig.worker.describe()


async def _nonsense() -> Any:

    return dataclasses.replace(RECORD, address=PeerAddress("", 0, "", b""))  # type: ignore[arg-type]


async def test_an_unknown_method_is_refused() -> None:
    async with rigged() as rig:
        call = rig.pool.get(rig.server.address).unary_unary(
            "/tandem.v1.InferenceService/Nope",
            request_serializer=Empty.SerializeToString,
            response_deserializer=Empty.FromString,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(Empty())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_any_grpc_client_gets_standard_codes_and_defaults() -> None:
    async with rigged() as rig:
        stub = InferenceServiceStub(rig.pool.get(rig.server.address))
        request = inference_service_pb2.GenerateRequest(prompt="hi")
        replies = [reply async for reply in stub.Generate(request)]
        assert [reply.text for reply in replies] == ["Hel", "lo 🌍", ""]
        assert replies[-1].finish_reason == generation_pb2.FINISH_REASON_LENGTH
        assert rig.fake.staged.calls[0][0] == REQUEST
        rig.fake.staged.error = errors.UnknownModel("no such model")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(inference_service_pb2.ListModelsRequest())
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, "no such model")


# Sizes and flow


async def test_p28_a_message_over_the_bound_is_refused_in_both_directions() -> None:
    async with rigged(WireSettings(max_message_bytes=1 << 20)) as rig:
        big = "x" * (2 << 20)
        with pytest.raises(errors.MessageTooLarge, match="shorten"):
            await collect(rig.inference.generate(Request(prompt=big), NOW))
        rig.fake.chunks = (GenerateChunk(text=big),)
        with pytest.raises(errors.MessageTooLarge):
            await collect(rig.inference.generate(REQUEST, NOW))
        rig.fake.chunks = CHUNKS
        assert await collect(rig.inference.generate(REQUEST, NOW)) == list(CHUNKS), "the connection lives on"


@pytest.mark.parametrize("direction", ["request", "answer"])
async def test_p28_a_client_without_our_bound_gets_resource_exhausted(direction: str) -> None:
    unbounded = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    big = "x" * (2 << 20)
    async with rigged(WireSettings(max_message_bytes=1 << 20)) as rig:
        if direction == "answer":
            rig.fake.chunks = (GenerateChunk(text=big),)
        async with grpc.aio.insecure_channel(rig.server.address, options=unbounded) as channel:
            request = inference_service_pb2.GenerateRequest(prompt=big if direction == "request" else "hi")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(InferenceServiceStub(channel).Generate(request))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_p32_a_slow_reader_is_waited_for_and_stalls_nobody() -> None:
    async with rigged() as rig:
        written = 0
        ended_before_closed: list[bool] = []

        async def flood() -> AsyncIterator[GenerateChunk]:
            nonlocal written
            try:
                while True:
                    written += 1
                    yield GenerateChunk(text="x" * (1 << 16))
            finally:
                ended_before_closed.append(rig.recorder.calls[-1][0] == "Generate")

        rig.fake.generate = lambda request, context: flood()  # type: ignore[method-assign]
        stream = rig.inference.generate(REQUEST, NOW)
        await anext(stream)
        for _ in range(200):
            await rig.inference.list_models()
        assert written < 200, "what a slow reader makes us hold is bounded (64 KiB each)"
        rig.recorder.ended_one.clear()
        await stream.aclose()  # type: ignore[attr-defined]
        await rig.recorder.ended_one.wait()
        assert ended_before_closed == [False], "cancelled while it waits to write, it closes its iterator"


# Broken and silent connections


async def test_p7_a_client_that_vanishes_cancels_its_calls_and_learns_of_the_cut() -> None:
    async with rigged() as rig, TcpProxy(rig.server.port) as proxy:
        rig.fake.staged.hold = True
        stream = GrpcInference(rig.pool, proxy.address, CLOCK).generate(REQUEST, NOW)
        await anext(stream)
        rig.fake_worker.staged.hold = True
        unary = asyncio.ensure_future(
            GrpcWorker(rig.pool, proxy.address, CLOCK).prefill(SPEC, TICKET, GATEWAY, NOW)
        )
        await rig.fake_worker.staged.entered.wait()
        proxy.cut()
        with pytest.raises(errors.PeerLost, match=proxy.address):
            await anext(stream)
        with pytest.raises(errors.PeerLost):
            await unary
        await rig.fake.staged.closed.wait()
        await rig.fake_worker.staged.closed.wait()
        assert rig.fake_worker.staged.ended_by is asyncio.CancelledError


async def test_p8_a_peer_that_hangs_is_noticed_from_both_sides() -> None:
    async with rigged(QUICK) as rig, TcpProxy(rig.server.port) as proxy:
        rig.fake_worker.staged.hold = True
        call = asyncio.ensure_future(
            GrpcWorker(rig.pool, proxy.address, CLOCK).prefill(SPEC, TICKET, GATEWAY, NOW)
        )
        await rig.fake_worker.staged.entered.wait()
        proxy.freeze()
        async with asyncio.timeout(10):  # gRPC's own bound, were ours not set, is a minute
            with pytest.raises(errors.PeerLost):
                await call
            await rig.fake_worker.staged.closed.wait()


async def test_p28_a_silent_call_outlives_many_keepalive_intervals() -> None:
    # A server that pings rarely itself, as its pings would make up for those of the client.
    async with rigged(WireSettings(keepalive_s=1.5)) as rig, ChannelPool(QUICK) as eager:
        rig.fake.staged.hold = True
        stream = GrpcInference(eager, rig.server.address, CLOCK).generate(REQUEST, NOW)
        await anext(stream)
        # Time is what is under test: gRPC sends at most a ping a second, and a server that forbids
        # them hangs up at the fourth.
        await asyncio.sleep(4.5)
        rig.fake.staged.go_on.set()
        assert await collect(stream) == list(CHUNKS[1:])


async def test_p8_a_peer_that_hangs_after_a_long_silence_is_noticed_as_fast() -> None:
    lazy = WireSettings(keepalive_s=1.5, keepalive_timeout_s=60.0)
    async with rigged(lazy) as rig, ChannelPool(QUICK) as eager, TcpProxy(rig.server.port) as proxy:
        rig.fake.staged.hold = True
        stream = GrpcInference(eager, proxy.address, CLOCK).generate(REQUEST, NOW)
        await anext(stream)
        await asyncio.sleep(3.5)  # after a few pings without data gRPC would rest for a minute
        proxy.freeze()
        async with asyncio.timeout(5):
            with pytest.raises(errors.PeerLost):
                await anext(stream)


async def test_p12_nobody_there_is_known_at_once() -> None:
    async with rigged() as rig:
        address = rig.server.address
        await rig.server.stop()
        with pytest.raises(errors.PeerLost, match=address):
            await rig.worker.describe()


async def test_p9_a_server_that_comes_back_is_found_again() -> None:
    async with ChannelPool(QUICK) as pool:
        async with rigged(QUICK) as first:
            address = first.server.address
            client = GrpcWorker(pool, address, CLOCK)
            await client.describe()
        with pytest.raises(errors.PeerLost):
            await client.describe()
        async with rigged(QUICK, address=address), asyncio.timeout(10):
            channel = pool.get(address)
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
            await client.describe()


# Channels


async def test_one_channel_an_address() -> None:
    async with ChannelPool() as pool:
        assert pool.get("127.0.0.1:1") is pool.get("127.0.0.1:1")
        assert pool.get("127.0.0.1:1") is not pool.get("127.0.0.1:2")
        assert len(pool) == 2
        await pool.discard("127.0.0.1:1")
        await pool.discard("127.0.0.1:1")
        assert len(pool) == 1
    await pool.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        pool.get("127.0.0.1:1")


async def test_closing_a_channel_fails_its_calls_without_cancelling_their_tasks() -> None:
    async with rigged() as rig:
        rig.fake.staged.hold = True
        rig.fake_worker.staged.hold = True
        client = rig.worker
        stream = rig.inference.generate(REQUEST, NOW)
        await anext(stream)
        unary = asyncio.ensure_future(client.prefill(SPEC, TICKET, GATEWAY, NOW))
        reader = asyncio.ensure_future(anext(stream))
        await rig.fake_worker.staged.entered.wait()
        await rig.pool.discard(rig.server.address)
        with pytest.raises(errors.PeerLost, match="closed during the call"):
            await unary
        with pytest.raises(errors.PeerLost, match="closed during the call"):
            await reader
        with pytest.raises(errors.PeerLost, match="is closed"):
            await client.describe()
        await rig.fake.staged.closed.wait()
        await rig.fake_worker.staged.closed.wait()


# The server's life


async def _ask_until_refused(client: GrpcInference) -> None:
    """New calls are refused as soon as the stop has reached gRPC."""
    while True:
        await client.list_models()


async def test_stop_lets_calls_finish_within_the_grace_period() -> None:
    async with rigged(grace_s=30.0) as rig:
        rig.fake.staged.hold = True
        client = rig.inference
        stream = client.generate(REQUEST, NOW)
        await anext(stream)
        stopping = asyncio.ensure_future(rig.server.stop())
        with pytest.raises(errors.PeerLost):
            await _ask_until_refused(client)
        assert not stopping.done()
        rig.fake.staged.go_on.set()
        assert await collect(stream) == list(CHUNKS[1:])
        await stopping


async def test_stop_cancels_what_outlasts_the_grace_period_and_waits_for_its_end() -> None:
    async with rigged() as rig:
        rig.fake_worker.staged.hold = True
        call = asyncio.ensure_future(rig.worker.prefill(SPEC, TICKET, GATEWAY, NOW))
        await rig.fake_worker.staged.entered.wait()
        assert rig.server.num_in_flight == 1
        await rig.server.stop(grace_s=0.1)
        assert rig.fake_worker.staged.closed.is_set()
        assert rig.server.num_in_flight == 0
        with pytest.raises(errors.PeerLost):
            await call
        await rig.server.stop()
        assert rig.recorder.calls == [("Prefill", "CANCELLED")]


async def test_stop_returns_only_when_cancelled_calls_have_cleaned_up() -> None:
    async with rigged() as rig:
        working, cleaning, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def prefill(*call: Any) -> Any:
            try:
                working.set()
                await asyncio.Event().wait()
            finally:
                cleaning.set()
                await may_end.wait()

        rig.fake_worker.prefill = prefill  # type: ignore[method-assign]
        call = asyncio.ensure_future(rig.worker.prefill(SPEC, TICKET, GATEWAY, NOW))
        await working.wait()
        stopping = asyncio.ensure_future(rig.server.stop())
        await cleaning.wait()
        with pytest.raises(errors.PeerLost):
            await call
        done, _ = await asyncio.wait([stopping], timeout=0.2)
        assert not done
        may_end.set()
        await stopping
        assert rig.server.num_in_flight == 0


async def test_port_zero_is_replaced_by_the_one_chosen() -> None:
    async with rigged() as rig:
        assert rig.server.port > 0
        assert rig.server.address == f"127.0.0.1:{rig.server.port}"


async def test_a_port_in_use_is_said_plainly() -> None:
    async with rigged() as rig:
        second = RpcServer(rig.server.address, clock=CLOCK)
        expected = f"port {rig.server.port} on 127.0.0.1 is in use"
        with pytest.raises(errors.ConfigError, match=expected):
            await second.start()
        await second.stop()
        await rig.worker.describe()


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("50051", "is not host:port"),
        ("127.0.0.1:http", "is not host:port"),
        ("127.0.0.1:70000", "is not host:port"),
        (":50051", "is not host:port"),
        ("192.0.2.1:0", "is not an address of this machine"),
        ("no.such.host.invalid:0", "can't be resolved"),
    ],
)
async def test_a_bad_address_is_said_plainly(address: str, problem: str) -> None:
    with pytest.raises(errors.ConfigError, match=problem):
        await RpcServer(address, clock=CLOCK).start()


async def test_localhost_can_be_bound() -> None:
    async with rigged(address="localhost:0") as rig:
        await rig.worker.describe()


# Health, reflection, observers


async def test_p23_health_is_what_the_owner_says() -> None:
    async with rigged(serving=False) as rig:
        channel = rig.pool.get(rig.server.address)
        assert not await is_serving(channel, timeout_s=5)
        await rig.server.set_serving(True)
        for service in ("", "tandem.v1.InferenceService", "tandem.internal.v1.TransferService"):
            assert await is_serving(channel, timeout_s=5, service=service)
        assert not await is_serving(channel, timeout_s=5, service="nope")
        assert rig.recorder.calls[-1] == ("Check", "NOT_FOUND")
    async with ChannelPool() as pool:
        assert not await is_serving(pool.get(rig.server.address), timeout_s=1), "unreachable"


async def test_p29_watchers_see_the_end_coming() -> None:
    async with rigged(grace_s=0.2) as rig:
        stub = health_pb2_grpc.HealthStub(rig.pool.get(rig.server.address))
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.ensure_future(rig.server.stop())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await stopping
        watch.cancel()


@pytest.mark.parametrize("reflect", [True, False])
async def test_reflection_is_behind_a_flag(reflect: bool) -> None:
    async with rigged(reflect=reflect) as rig:
        stub = reflection_pb2_grpc.ServerReflectionStub(rig.pool.get(rig.server.address))
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        if reflect:
            reply = await call.read()
            names = {service.name for service in reply.list_services_response.service}
            assert {"tandem.v1.InferenceService", "grpc.health.v1.Health"} <= names
            call.cancel()
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_observer_is_told_of_every_call_and_its_trace() -> None:
    async with rigged() as rig:
        trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        foreign = {"x-secret": "1", "tracestate": "a\nb"}
        await collect(rig.inference.generate(REQUEST, CallContext(trace_headers=trace | foreign)))
        assert rig.recorder.headers == [trace]
        assert rig.fake.staged.calls[0][1].trace_headers == trace
        rig.fake.staged.error = errors.Overloaded("full")
        with pytest.raises(errors.Overloaded):
            await rig.inference.list_models()
        await rig.inference.generate(REQUEST, NOW).aclose()  # type: ignore[attr-defined]
        assert rig.recorder.calls == [("Generate", "OK"), ("ListModels", "RESOURCE_EXHAUSTED")]


async def test_the_observer_sees_a_client_go() -> None:
    async with rigged() as rig:
        rig.fake.staged.hold = True
        stream = rig.inference.generate(REQUEST, NOW)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await rig.recorder.ended_one.wait()
        assert rig.recorder.calls == [("Generate", "CANCELLED")]


def test_it_runs_on_uvloop() -> None:
    async def scenario() -> None:
        async with rigged() as rig:
            assert await collect(rig.inference.generate(REQUEST, NOW)) == list(CHUNKS)
            rig.fake.staged.hold = True
            stream = rig.inference.generate(REQUEST, NOW)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            await rig.fake.staged.closed.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
