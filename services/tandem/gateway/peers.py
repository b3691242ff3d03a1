"""Workers over gRPC, one client for each life of a worker."""

from __future__ import annotations

from tandem.clock import Clock
from tandem.directory.base import WorkerRecord
from tandem.ids import Epoch, WorkerId
from tandem.rpc.channels import ChannelPool
from tandem.rpc.clients import GrpcWorker


class GrpcPeers:
    """Implements `links.Peers`. The pool stays its owner's."""

    def __init__(self, pool: ChannelPool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self._workers: dict[tuple[WorkerId, Epoch], tuple[str, GrpcWorker]] = {}

    def worker(self, record: WorkerRecord) -> GrpcWorker:
        """See `Peers`."""
        key = (record.worker_id, record.epoch)
        if key not in self._workers:
            control = record.address.control
            self._workers[key] = (control, GrpcWorker(self._pool, control, self._clock))
        return self._workers[key][1]

    async def forget(self, record: WorkerRecord) -> None:
        """See `Peers`. A channel that a newer life uses too stays open."""
        control, _ = self._workers.pop((record.worker_id, record.epoch), (None, None))
        if control is not None and all(control != other for other, _ in self._workers.values()):
            await self._pool.discard(control)
