"""The directory of one process: the reference that the Redis one is tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tandem.clock import Clock
from tandem.directory.base import WorkerRecord
from tandem.directory.prefix_map import PrefixMap, coalesce
from tandem.directory.watch import Watch
from tandem.errors import Fenced, OutOfSequence
from tandem.ids import BlockHash, Epoch, WorkerId
from tandem.kv.events import KvEvent


@dataclass(frozen=True, slots=True)
class _Lease:
    record: WorkerRecord
    expires_at_s: float


class MemoryMembership:
    """Implements `Membership`. Expired leases are dropped at every call."""

    def __init__(self, clock: Clock, watch: Watch) -> None:
        self._clock = clock
        self._watch = watch
        self._leases: dict[WorkerId, _Lease] = {}
        self._newest: dict[WorkerId, Epoch] = {}

    async def announce(self, record: WorkerRecord, ttl_s: float) -> None:
        """Register or renew; see `Membership`."""
        newest = self._newest.get(record.worker_id)
        if newest is not None and newest > record.epoch:
            raise fenced(record.worker_id, record.epoch)
        self._newest[record.worker_id] = record.epoch
        self._leases[record.worker_id] = _Lease(record, self._clock.monotonic_s() + ttl_s)
        self._watch.notify()

    async def leave(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Remove this life of the worker; see `Membership`."""
        lease = self._leases.get(worker_id)
        if lease is not None and lease.record.epoch == epoch:
            del self._leases[worker_id]
            self._watch.notify()

    def workers(self) -> tuple[WorkerRecord, ...]:
        """All workers whose lease holds, by name."""
        now_s = self._clock.monotonic_s()
        for worker_id in [key for key, lease in self._leases.items() if lease.expires_at_s <= now_s]:
            del self._leases[worker_id]
        return tuple(self._leases[worker_id].record for worker_id in sorted(self._leases))

    def newest_epoch(self, worker_id: WorkerId) -> Epoch | None:
        """The newest life ever announced."""
        return self._newest.get(worker_id)


class MemoryPrefixIndex:
    """Implements `PrefixIndex`. What workers without a lease published goes at the next call."""

    def __init__(self, membership: MemoryMembership, watch: Watch) -> None:
        self._membership = membership
        self._watch = watch
        self._map = PrefixMap()
        self._sequences: dict[WorkerId, tuple[Epoch, int]] = {}

    async def publish(
        self, worker_id: WorkerId, epoch: Epoch, sequence: int, events: Sequence[KvEvent]
    ) -> None:
        """Apply one batch; see `PrefixIndex`."""
        self._reap()
        newest = self._membership.newest_epoch(worker_id)
        if newest is not None and newest > epoch:
            raise fenced(worker_id, epoch)
        lease = next((r for r in self._membership.workers() if r.worker_id == worker_id), None)
        if lease is None:
            raise no_lease(worker_id)
        _, last = self._sequences.get(worker_id, (epoch, 0))
        if sequence <= last:
            return
        delta = coalesce(events)
        if not delta.cleared:
            if sequence != last + 1:
                raise gap(worker_id, sequence, last)
            if self._map.num_held(worker_id) > lease.num_blocks:
                raise overfull(worker_id, lease.num_blocks)
        self._map.apply(worker_id, delta)
        self._sequences[worker_id] = (epoch, sequence)
        self._watch.notify()

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Leading blocks held, for each worker that holds the first."""
        self._reap()
        return self._map.match(hashes)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks known."""
        self._reap()
        return self._map.num_blocks

    def _reap(self) -> None:
        alive = {record.worker_id: record.epoch for record in self._membership.workers()}
        for worker_id, (epoch, _) in list(self._sequences.items()):
            if alive.get(worker_id) != epoch:
                del self._sequences[worker_id]
                self._map.drop(worker_id)


class MemoryDirectory:
    """Implements `Directory` for one process: `LocalCluster`, tests and simulations."""

    def __init__(self, clock: Clock) -> None:
        self._watch = Watch()
        self.membership = MemoryMembership(clock, self._watch)
        self.index = MemoryPrefixIndex(self.membership, self._watch)

    async def wait_until(self, predicate: Callable[[], bool], timeout_s: float) -> None:
        """See `Directory`. A lease's end is no change: advance the clock, then look."""
        await self._watch.until(predicate, timeout_s)

    async def aclose(self) -> None:
        """Nothing to end."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def fenced(worker_id: WorkerId, epoch: Epoch) -> Fenced:
    """An older life speaks."""
    return Fenced(
        f"worker {worker_id!r} with epoch {epoch} is an older life than the one registered; "
        "stop this process, or give it another worker id"
    )


def no_lease(worker_id: WorkerId) -> OutOfSequence:
    """A worker publishes without being registered."""
    return OutOfSequence(f"worker {worker_id!r} has no lease; announce it, then clear and republish")


def gap(worker_id: WorkerId, sequence: int, last: int) -> OutOfSequence:
    """A batch is missing."""
    return OutOfSequence(
        f"worker {worker_id!r} sent batch {sequence} and {last + 1} was expected; clear and republish"
    )


def overfull(worker_id: WorkerId, num_blocks: int) -> OutOfSequence:
    """A worker claims more blocks than it has: removals were lost."""
    return OutOfSequence(
        f"worker {worker_id!r} claims more than its {num_blocks} blocks; clear and republish"
    )
