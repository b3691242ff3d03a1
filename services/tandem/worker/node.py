"""A worker as a process runs it: model, engine, KV plane, control port and its place in the directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.clock import Clock
from tandem.config.memory import available_memory_bytes, require_kv_memory
from tandem.config.settings import Settings
from tandem.directory.base import Role, WorkerState
from tandem.directory.redis_directory import RedisDirectory
from tandem.engine.engine import Engine
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sampler import Sampler
from tandem.engine.settings import EngineSettings
from tandem.ids import Epoch, IdSource, WorkerId
from tandem.kv.storage import KvStorage
from tandem.kv.ticket import PeerAddress
from tandem.model.load import LoadedModel, load_model
from tandem.rpc.address import join_address
from tandem.rpc.channels import ChannelPool
from tandem.rpc.clients import GrpcTransfer
from tandem.rpc.server import RpcServer
from tandem.telemetry.metrics import CollectorRegistry, MetricsServer, WorkerMetrics
from tandem.telemetry.rpc_spans import RpcSpanObserver
from tandem.telemetry.tracing import set_up_tracing
from tandem.transport.registry import open_transport
from tandem.worker.core import WorkerCore, WorkerIdentity
from tandem.worker.registration import Registration
from tandem.worker.self_test import check_engine, check_transport


@dataclass(frozen=True, slots=True)
class WorkerNode:
    """A worker that is registered and ready."""

    address: str
    core: WorkerCore
    registration: Registration
    drain_s: float

    @property
    def worker_id(self) -> WorkerId:
        """Its name."""
        return self.core.identity.worker_id

    async def drain(self) -> bool:
        """Take no new work and let what runs end (P29); true when nothing is left after `worker.drain_s`."""
        self.core.state = WorkerState.DRAINING
        await self.registration.announce()
        return await self.core.drain(self.drain_s)

    async def wait_closed(self) -> None:
        """Return when the worker must stop: a newer life of it is known, or its engine died."""
        await self.registration.lost.wait()


@asynccontextmanager
async def open_worker(
    settings: Settings, *, worker_id: WorkerId, role: Role, redis_url: str, clock: Clock, ids: IdSource
) -> AsyncIterator[WorkerNode]:
    """Load, test, serve and register; then, at the block's end, leave the directory and free all.

    `settings.model.ref` is a local folder (`model.pull.ensure_model` makes one of anything else).
    Raises `ModelLoadError`, `ConfigError` (no memory, port in use), `Fenced`, `Unavailable`.
    """
    loaded = await asyncio.to_thread(load, settings)
    async with AsyncExitStack() as stack:
        tracing = set_up_tracing(role.value, worker_id, trace_dir=settings.telemetry.trace_dir)
        stack.callback(tracing.shutdown)
        directory = await stack.enter_async_context(
            RedisDirectory(
                redis_url,
                f"{settings.directory.namespace}-{loaded.layout.fingerprint}",
                clock,
                timeout_s=settings.directory.command_timeout_s,
            )
        )
        pool = await stack.enter_async_context(ChannelPool())
        transport = await stack.enter_async_context(open_transport(settings.transfer.transport))
        await check_transport(transport, clock, ids)
        engine, storage = build_engine(settings, loaded, clock)
        await asyncio.to_thread(check_engine, engine)
        registry = CollectorRegistry()
        metrics = WorkerMetrics(registry, engine.settings.num_blocks)
        if settings.telemetry.metrics_port is not None:
            stack.enter_context(
                MetricsServer(registry, settings.telemetry.metrics_host, settings.telemetry.metrics_port)
            )

        def transfer_service(peer: PeerAddress) -> GrpcTransfer:
            return GrpcTransfer(pool, peer.control, clock)

        core = WorkerCore(
            WorkerIdentity(worker_id, Epoch(clock.wall_ns()), role, settings.model.name),
            engine,
            loaded.layout,
            storage,
            transport,
            clock=clock,
            ids=ids,
            tracer=tracing.tracer,
            peers=transfer_service,
            transfer=settings.transfer,
            metrics=metrics,
        )
        stack.push_async_callback(core.aclose)
        await core.start()
        server = RpcServer(
            join_address(settings.worker.host, settings.worker.control_port),
            clock=clock,
            worker=core,
            transfer=core,
            observer=RpcSpanObserver(tracing.tracer),
        )
        await stack.enter_async_context(server)
        core.identity = replace(core.identity, control=server.address)
        registration = Registration(core, directory, settings.directory)
        stack.push_async_callback(registration.aclose)
        await registration.start()
        yield WorkerNode(server.address, core, registration, settings.worker.drain_s)


def load(settings: Settings) -> LoadedModel:
    """Load the model, once it is certain that its KV pool will fit. Blocks."""
    return load_model(
        Path(settings.model.ref),
        dtype=settings.model.dtype,
        weights=settings.model.weights,
        block_size_tokens=settings.engine.block_size_tokens,
        num_threads=settings.worker.num_threads,
    )


def build_engine(settings: Settings, loaded: LoadedModel, clock: Clock) -> tuple[Engine, KvStorage]:
    """An engine and the KV memory that it and its transfers share. Raises `ConfigError`."""
    num_blocks = settings.engine.num_blocks_for(loaded.layout.block_bytes)
    require_kv_memory(num_blocks, loaded.layout.block_bytes, available_memory_bytes())
    storage = KvStorage(loaded.layout, num_blocks)
    engine_settings = EngineSettings(
        num_blocks=num_blocks,
        max_context_tokens=loaded.max_context_tokens,
        eos_token_ids=loaded.eos_token_ids,
        block_size_tokens=settings.engine.block_size_tokens,
        max_batch_tokens=settings.engine.max_batch_tokens,
        max_num_sequences=settings.engine.max_num_sequences,
        max_waiting=settings.engine.max_waiting,
    )
    return Engine(engine_settings, ModelRunner(loaded, storage), Sampler(), clock), storage
