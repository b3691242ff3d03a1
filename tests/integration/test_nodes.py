"""Workers and a gateway as processes run them (UCX, Redis, gRPC), side by side in this one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.otlp import otlp_collector
from tests.support.reference import greedy, random_prompt

from tandem.config.settings import Settings
from tandem.directory.base import Role
from tandem.directory.embedded import EmbeddedRedis
from tandem.errors import ConfigError, InvalidRequest, ModelLoadError, NoWorker, UnknownModel
from tandem.gateway.node import GatewayNode, open_gateway
from tandem.generation import CallContext, Phase
from tandem.ids import WorkerId
from tandem.request import Request, SamplingParams
from tandem.rpc.channels import ChannelPool
from tandem.rpc.clients import GrpcInference
from tandem.rpc.services import GenerateChunk
from tandem.system import SystemClock, SystemIds
from tandem.telemetry.names import phase_span
from tandem.telemetry.span_file import read_spans
from tandem.worker.node import WorkerNode, open_worker

CLOCK, IDS = SystemClock(), SystemIds()


def settings_for(mode: str = "always", **sections: dict[str, Any]) -> Settings:
    merged = {
        "model": {"ref": str(tiny_model()), "served_name": "tiny"},
        "engine": {"num_blocks": 200, "max_batch_tokens": 128},
        "gateway": {"port": 0, "disaggregation": mode},
    }
    return Settings(**{k: merged.get(k, {}) | sections.get(k, {}) for k in merged | sections})


@dataclass
class Nodes:
    """What is open, and a client's view of it."""

    gateway: GatewayNode
    workers: dict[str, WorkerNode]
    client: GrpcInference
    pool: ChannelPool
    redis_url: str

    async def ask(self, prompt: tuple[int, ...], max_tokens: int = 8) -> tuple[list[int], GenerateChunk]:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        tokens: list[int] = []
        request = Request(token_ids=prompt, sampling=sampling)
        async with aclosing(self.client.generate(request, CallContext())) as chunks:
            async for chunk in chunks:
                tokens += [token.token_id for token in chunk.tokens]
        return tokens, chunk

    async def wait_idle(self) -> None:
        async with asyncio.timeout(10):
            while not all(self._idle(node) for node in self.workers.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def _idle(self, node: WorkerNode) -> bool:
        load = node.core.loop.load()
        return node.core.num_open == 0 and load.num_free_blocks == node.core.record().num_blocks


@pytest.fixture(scope="module")
def redis_url():
    with EmbeddedRedis() as redis:
        yield redis.url


async def open_nodes(
    stack: AsyncExitStack, redis_url: str, settings: Settings, *roles: Role, tag: str = ""
) -> Nodes:
    workers: dict[str, WorkerNode] = {}
    for role in roles:
        name = f"{role.value}-{tag}0"
        workers[name] = await stack.enter_async_context(
            open_worker(
                settings, worker_id=WorkerId(name), role=role, redis_url=redis_url, clock=CLOCK, ids=IDS
            )
        )
    gateway = await stack.enter_async_context(
        open_gateway(settings, redis_url=redis_url, clock=CLOCK, ids=IDS)
    )
    pool = await stack.enter_async_context(ChannelPool())
    await gateway.directory.wait_until(
        lambda: {record.worker_id for record in gateway.directory.workers()} >= set(workers), 10.0
    )
    return Nodes(gateway, workers, GrpcInference(pool, gateway.address, CLOCK), pool, redis_url)


@pytest.fixture
async def nodes(redis_url: str, tmp_path: Path) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        settings = settings_for(telemetry={"trace_dir": tmp_path}, transfer={"lease_s": 2.0})
        nodes = await open_nodes(stack, redis_url, settings, Role.PREFILL, Role.DECODE)
        yield nodes
        await nodes.wait_idle()


async def test_answers_cross_ucx_and_leave_one_trace_with_every_phase(nodes: Nodes, tmp_path: Path) -> None:
    for length in (1, 16, 17, 150, 700):
        prompt = random_prompt(length, VOCAB_SIZE, seed=length)
        tokens, last = await nodes.ask(prompt)
        assert tuple(tokens) == greedy(tiny_model(), prompt, 8)
        where = {timing.phase: timing.attributes.get("worker") for timing in last.phases}
        assert (where[Phase.PREFILL], where[Phase.DECODE]) == ("prefill-0", "decode-0")
        (transfer,) = [timing for timing in last.phases if timing.phase is Phase.TRANSFER]
        assert transfer.attributes["transport"] == "ucx"
        spans = read_spans(tmp_path, last.trace_id)
        assert {phase_span(phase) for phase in Phase} <= {span.name for span in spans}
        known = {span.span_id for span in spans}
        assert [span.name for span in spans if span.parent_id not in known] == [
            "tandem.v1.InferenceService/Generate"
        ]


async def test_a_burst_of_first_requests_completes(nodes: Nodes) -> None:
    prompts = [random_prompt(20 + at, VOCAB_SIZE, seed=100 + at) for at in range(24)]
    answers = await asyncio.gather(*(nodes.ask(prompt) for prompt in prompts))
    assert [tuple(tokens) for tokens, _ in answers] == [greedy(tiny_model(), p, 8) for p in prompts]


@pytest.mark.parametrize("num_chunks", [1, 3])
async def test_p1_a_client_that_vanishes_leaves_nothing(nodes: Nodes, num_chunks: int) -> None:
    request = Request(
        token_ids=random_prompt(300, VOCAB_SIZE, seed=1),
        sampling=SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True),
    )
    pool = ChannelPool()
    client = GrpcInference(pool, nodes.gateway.address, CLOCK)
    chunks = client.generate(request, CallContext())
    for _ in range(num_chunks):
        await anext(chunks)
    await pool.aclose()  # the connection is gone, as when the client is killed
    await chunks.aclose()
    await nodes.wait_idle()
    tokens, _ = await nodes.ask(random_prompt(10, VOCAB_SIZE, seed=2))
    assert tuple(tokens) == greedy(tiny_model(), random_prompt(10, VOCAB_SIZE, seed=2), 8)


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (Request(prompt=""), InvalidRequest, "prompt: must not be empty"),
        (Request(token_ids=(5,), sampling=SamplingParams(max_tokens=0)), InvalidRequest, "max_tokens"),
        (Request(token_ids=(5,), sampling=SamplingParams(temperature=-1)), InvalidRequest, "temperature"),
        (Request(token_ids=(5,) * 4000), InvalidRequest, "shorten the prompt"),
        (Request(prompt="x", model="gpt-5"), UnknownModel, "'tiny'"),
    ],
    ids=["empty", "max_tokens", "temperature", "context", "model"],
)
async def test_p30_bad_input_is_told_over_the_wire(
    nodes: Nodes, request_: Request, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        await anext(nodes.client.generate(request_, CallContext()))


async def test_without_a_decode_worker_the_answer_says_so(redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        settings = settings_for(directory={"namespace": "lonely"}, engine={"block_size_tokens": 8})
        nodes = await open_nodes(stack, redis_url, settings, Role.PREFILL, tag="lonely-")
        with pytest.raises(NoWorker, match="decode"):
            await nodes.ask((5, 6, 7))


async def test_p15_a_worker_with_another_block_size_is_never_used(nodes: Nodes) -> None:
    async with AsyncExitStack() as stack:
        other = settings_for(engine={"block_size_tokens": 8})
        await open_nodes(stack, nodes.redis_url, other, Role.PREFILL, tag="other-")
        await nodes.gateway.directory.wait_until(lambda: len(nodes.gateway.directory.workers()) == 3, 10.0)
        for seed in range(6):
            _, last = await nodes.ask(random_prompt(30, VOCAB_SIZE, seed=200 + seed))
            assert "prefill-other-0" not in {timing.attributes.get("worker") for timing in last.phases}


async def test_p29_a_draining_worker_gets_no_new_work_and_leaves(nodes: Nodes) -> None:
    assert await nodes.workers["prefill-0"].drain()
    await nodes.gateway.directory.wait_until(
        lambda: any(r.state.value == "draining" for r in nodes.gateway.directory.workers()), 5.0
    )
    with pytest.raises(NoWorker):
        await nodes.ask((5, 6, 7))


async def test_a_port_in_use_is_named(redis_url: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = settings_for(gateway={"port": port})
        with pytest.raises(ConfigError, match=f"port {port} .*in use"):
            async with open_gateway(settings, redis_url=redis_url, clock=CLOCK, ids=IDS):
                pass


async def test_no_memory_for_the_kv_pool_names_the_cure(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.worker.node.available_memory_bytes", lambda: 300 << 20)
    settings = settings_for(engine={"num_blocks": 1 << 20})
    with pytest.raises(ConfigError, match=r"engine\.num_blocks"):
        async with open_worker(
            settings, worker_id=WorkerId("w"), role=Role.DECODE, redis_url=redis_url, clock=CLOCK, ids=IDS
        ):
            pass


async def test_a_model_that_is_not_there_is_named(redis_url: str) -> None:
    settings = settings_for(model={"ref": "/nowhere/model"})
    with pytest.raises(ModelLoadError, match="/nowhere/model"):
        async with open_gateway(settings, redis_url=redis_url, clock=CLOCK, ids=IDS):
            pass


async def test_spans_go_where_the_standard_variable_says(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with otlp_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        async with AsyncExitStack() as stack:
            nodes = await open_nodes(stack, redis_url, settings_for(), Role.PREFILL, Role.DECODE, tag="otlp-")
            _, last = await nodes.ask(random_prompt(40, VOCAB_SIZE, seed=3))
        spans = [span for span in collector.spans if span.trace_id == last.trace_id]
        assert {phase_span(phase) for phase in Phase} <= {span.name for span in spans}
