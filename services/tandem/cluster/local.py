"""A whole cluster in one process, object to object: the same code without ports, Redis or Ray.

What tests and notebooks use. KV blocks still go through a transport, tickets and final words.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from tandem.clock import Clock
from tandem.config.choices import TransportKind
from tandem.config.settings import Settings
from tandem.directory.base import Role, WorkerRecord
from tandem.directory.memory import MemoryDirectory
from tandem.errors import PeerLost
from tandem.gateway.core import GatewayCore
from tandem.gateway.links import WorkerLinks
from tandem.gateway.node import build_gateway, served_model
from tandem.ids import Epoch, GatewayId, IdSource, WorkerId
from tandem.kv.ticket import PeerAddress
from tandem.model.load import LoadedModel
from tandem.routing.router import Router
from tandem.system import SystemClock, SystemIds
from tandem.telemetry.tracing import Tracing
from tandem.transport.registry import open_transport
from tandem.worker.core import WorkerCore, WorkerIdentity
from tandem.worker.node import build_engine, load
from tandem.worker.registration import Registration


@dataclass(slots=True)
class LocalCluster:
    """What runs. Workers by name, ``prefill-0``, ``decode-0`` …"""

    gateway: GatewayCore
    links: WorkerLinks
    router: Router
    directory: MemoryDirectory
    workers: Mapping[WorkerId, WorkerCore]


@dataclass(slots=True)
class _LocalPeers:
    """Implements `links.Peers` and finds transfer services: everyone is an object here."""

    workers: dict[WorkerId, WorkerCore] = field(default_factory=dict)

    def worker(self, record: WorkerRecord) -> WorkerCore:
        return self._find(record.worker_id, record.epoch)

    async def forget(self, record: WorkerRecord) -> None:
        return None

    def transfer(self, peer: PeerAddress) -> WorkerCore:
        return self._find(peer.worker_id, peer.epoch)

    def _find(self, worker_id: WorkerId, epoch: Epoch) -> WorkerCore:
        worker = self.workers.get(worker_id)
        if worker is None or worker.identity.epoch != epoch:
            raise PeerLost(f"worker {worker_id} with epoch {epoch} is not here any more")
        return worker


@asynccontextmanager
async def open_local_cluster(
    settings: Settings,
    *,
    clock: Clock | None = None,
    ids: IdSource | None = None,
    tracing: Tracing | None = None,
    transport: TransportKind = TransportKind.INPROC,
) -> AsyncIterator[LocalCluster]:
    """`cluster.num_prefill` and `cluster.num_decode` workers and a gateway, until the block ends.

    The weights are loaded once and shared. `settings.model.ref` is a local folder.
    """
    clock, ids = clock or SystemClock(), ids or SystemIds()
    tracing = tracing or Tracing("local", ids.hex128())
    loaded = load(settings)
    peers = _LocalPeers()
    async with AsyncExitStack() as stack:
        stack.callback(tracing.shutdown)
        directory = await stack.enter_async_context(MemoryDirectory(clock))
        roles = [Role.PREFILL] * settings.cluster.num_prefill + [Role.DECODE] * settings.cluster.num_decode
        for number, role in enumerate(roles):
            index = number if role is Role.PREFILL else number - settings.cluster.num_prefill
            identity = WorkerIdentity(
                WorkerId(f"{role.value}-{index}"), Epoch(clock.wall_ns()), role, settings.model.name
            )
            core = await stack.enter_async_context(
                _open_worker(settings, loaded, identity, peers, clock, ids, tracing, transport)
            )
            registration = Registration(core, directory, settings.directory)
            stack.push_async_callback(registration.aclose)
            await registration.start()
        gateway, links, router = build_gateway(
            settings,
            served_model(settings),
            directory,
            peers,
            gateway_id=GatewayId(f"gateway-{ids.hex128()}"),
            clock=clock,
            ids=ids,
            tracer=tracing.tracer,
        )
        stack.push_async_callback(links.aclose)
        yield LocalCluster(gateway, links, router, directory, peers.workers)


@asynccontextmanager
async def _open_worker(
    settings: Settings,
    loaded: LoadedModel,
    identity: WorkerIdentity,
    peers: _LocalPeers,
    clock: Clock,
    ids: IdSource,
    tracing: Tracing,
    transport_kind: TransportKind,
) -> AsyncIterator[WorkerCore]:
    engine, storage = build_engine(settings, loaded, clock)
    async with open_transport(transport_kind) as transport:
        core = WorkerCore(
            identity,
            engine,
            loaded.layout,
            storage,
            transport,
            clock=clock,
            ids=ids,
            tracer=tracing.tracer,
            peers=peers.transfer,
            transfer=settings.transfer,
        )
        await core.start()
        peers.workers[identity.worker_id] = core
        try:
            yield core
        finally:
            await core.aclose()
