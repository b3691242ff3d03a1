"""A gateway as a process runs it: model files, directory, router and the public gRPC port."""

from __future__ import annotations

import random
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem.clock import Clock
from tandem.config.settings import Settings
from tandem.directory.base import Directory
from tandem.directory.redis_directory import RedisDirectory
from tandem.gateway.core import GatewayCore
from tandem.gateway.dispatch import Dispatcher
from tandem.gateway.links import Peers, WorkerLinks
from tandem.gateway.peers import GrpcPeers
from tandem.gateway.prompt import PromptReader, ServedModel
from tandem.ids import GatewayId, IdSource
from tandem.kv.layout import KvDtype
from tandem.model.card import ModelFiles
from tandem.model.tokenizer import Tokenizer
from tandem.routing.admission import Admission
from tandem.routing.query import RouterPolicy
from tandem.routing.router import Router
from tandem.rpc.address import join_address
from tandem.rpc.channels import ChannelPool
from tandem.rpc.server import RpcServer
from tandem.rpc.services import ModelCard
from tandem.telemetry.metrics import CollectorRegistry, DirectoryMetrics, GatewayMetrics, MetricsServer
from tandem.telemetry.rpc_spans import RpcSpanObserver
from tandem.telemetry.spans import Tracer
from tandem.telemetry.tracing import set_up_tracing


@dataclass(frozen=True, slots=True)
class GatewayNode:
    """A gateway that serves at `address` (``host:port``)."""

    address: str
    core: GatewayCore
    directory: RedisDirectory


@asynccontextmanager
async def open_gateway(
    settings: Settings, *, redis_url: str, clock: Clock, ids: IdSource
) -> AsyncIterator[GatewayNode]:
    """Serve until the block ends; then drain for `gateway.drain_s`, and leave nothing behind.

    `settings.model.ref` is a local folder (`model.pull.ensure_model` makes one of anything else).
    Raises `ModelLoadError`, `ConfigError`.
    """
    gateway_id = GatewayId(f"gateway-{ids.hex128()}")
    model = served_model(settings)
    async with AsyncExitStack() as stack:
        tracing = set_up_tracing("gateway", gateway_id, trace_dir=settings.telemetry.trace_dir)
        stack.callback(tracing.shutdown)
        registry = CollectorRegistry()
        metrics = GatewayMetrics(registry, model.card.model_id)
        if settings.telemetry.metrics_port is not None:
            stack.enter_context(
                MetricsServer(registry, settings.telemetry.metrics_host, settings.telemetry.metrics_port)
            )
        directory = await stack.enter_async_context(
            RedisDirectory(
                redis_url,
                f"{settings.directory.namespace}-{model.layout_fingerprint}",
                clock,
                timeout_s=settings.directory.command_timeout_s,
            )
        )
        DirectoryMetrics(registry, lambda: directory.in_contact)
        await directory.ping()
        await directory.start()
        pool = await stack.enter_async_context(ChannelPool())
        core, links, _ = build_gateway(
            settings,
            model,
            directory,
            GrpcPeers(pool, clock),
            gateway_id=gateway_id,
            clock=clock,
            ids=ids,
            tracer=tracing.tracer,
            metrics=metrics,
        )
        stack.push_async_callback(links.aclose)
        server = RpcServer(
            join_address(settings.gateway.host, settings.gateway.port),
            clock=clock,
            inference=core,
            observer=RpcSpanObserver(tracing.tracer),
            reflect=settings.gateway.reflection,
            grace_s=settings.gateway.drain_s,
        )
        await stack.enter_async_context(server)
        stack.callback(core.admission.drain)
        yield GatewayNode(server.address, core, directory)


def served_model(settings: Settings) -> ServedModel:
    """Read what a gateway needs of the model's folder. Blocks; raises `ModelLoadError`."""
    folder = Path(settings.model.ref)
    files = ModelFiles.read(folder)
    layout = files.layout(
        KvDtype(settings.model.dtype.value), settings.model.weights, settings.engine.block_size_tokens
    )
    num_blocks = settings.engine.num_blocks_for(layout.block_bytes)
    max_context_tokens = min(files.max_context_tokens, num_blocks * settings.engine.block_size_tokens)
    return ServedModel(
        card=ModelCard(settings.model.name, files.revision, max_context_tokens, files.vocab_size),
        tokenizer=Tokenizer(folder),
        layout_fingerprint=layout.fingerprint,
        block_size_tokens=layout.block_size_tokens,
        block_bytes=layout.block_bytes,
        eos_token_ids=files.eos_token_ids,
    )


def build_gateway(
    settings: Settings,
    model: ServedModel,
    directory: Directory,
    peers: Peers,
    *,
    gateway_id: GatewayId,
    clock: Clock,
    ids: IdSource,
    tracer: Tracer,
    metrics: GatewayMetrics | None = None,
) -> tuple[GatewayCore, WorkerLinks, Router]:
    """The objects of a gateway, whatever carries its calls. Close the links when done."""
    links = WorkerLinks(gateway_id, peers)
    secret = settings.gateway.tenant_secret
    router = Router(RouterPolicy(mode=settings.gateway.disaggregation), random.SystemRandom().randrange)
    dispatcher = Dispatcher(
        router,
        directory,
        links,
        layout_fingerprint=model.layout_fingerprint,
        block_bytes=model.block_bytes,
        clock=clock,
        ids=ids,
    )
    reader = PromptReader(
        model,
        max_prompt_bytes=settings.gateway.max_prompt_bytes,
        tenant_secret=secret.get_secret_value().encode() if secret else secrets.token_bytes(16),
    )
    core = GatewayCore(
        model,
        reader,
        dispatcher,
        directory,
        Admission(settings.gateway.max_requests, clock),
        clock=clock,
        ids=ids,
        tracer=tracer,
        metrics=metrics,
    )
    return core, links, router
