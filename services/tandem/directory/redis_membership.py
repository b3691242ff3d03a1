"""The worker directory in Redis: a lease a worker, and a mirror of them all in each gateway.

When Redis is out of reach no lease can be renewed, so the mirror stops the leases' clocks at the
last contact and goes on serving what it knew, for at most `outage_grace_s`. After the outage a worker
that is not in Redis yet has one more lease to come back; then time rules again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from tandem.clock import Clock
from tandem.directory.base import WorkerRecord
from tandem.directory.follower import Entry
from tandem.directory.memory import fenced
from tandem.directory.record_codec import decode_record, encode_record
from tandem.directory.redis_store import RedisStore
from tandem.directory.watch import Watch
from tandem.errors import ConfigError, TandemError
from tandem.ids import Epoch, WorkerId

_LOG = logging.getLogger(__name__)
WORKER_STREAM = b"wrk-events"
_FENCE_MS = 24 * 3600 * 1000
_STREAM_LENGTH = 4096

_ANNOUNCE = """
local newest = redis.call('GET', KEYS[2])
if newest and newest > ARGV[2] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[6])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'record', ARGV[3], 'ttl_ms', ARGV[4], 'num_blocks', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[7], '*', 'n', redis.call('INCR', KEYS[5]),
           'record', ARGV[3], 'ttl_ms', ARGV[4])
return 1
"""

_LEAVE = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', 'n', redis.call('INCR', KEYS[4]),
           'left', ARGV[1], 'epoch', ARGV[2])
return 1
"""

_SNAPSHOT = """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local key = 'wrk:' .. id
  local fields = redis.call('HMGET', key, 'record', 'ttl_ms')
  if fields[1] then
    found[#found + 1] = {fields[1], fields[2], redis.call('PTTL', key)}
  else
    redis.call('SREM', KEYS[1], id)
  end
end
return found
"""


def epoch_text(epoch: Epoch) -> str:
    """20 digits, so that Lua compares epochs as text: its numbers are too short for nanoseconds."""
    if epoch < 0:
        raise ConfigError(f"a worker's epoch must not be negative, not {epoch}")
    return f"{epoch:020d}"


@dataclass(frozen=True, slots=True)
class _Lease:
    record: WorkerRecord
    ttl_s: float
    expires_at_s: float


class RedisMembership:
    """Implements `Membership`; as a `StreamSink` it is its own mirror. Workers only write."""

    def __init__(
        self, store: RedisStore, clock: Clock, watch: Watch, *, outage_grace_s: float = 120.0
    ) -> None:
        self._store = store
        self._clock = clock
        self._watch = watch
        self._outage_grace_s = outage_grace_s
        self._leases: dict[WorkerId, _Lease] = {}
        self._contact_at_s: float | None = None
        self._lost_at_s: float | None = None

    async def announce(self, record: WorkerRecord, ttl_s: float) -> None:
        """Register or renew; see `Membership`. Raises `Fenced`, `Unavailable`."""
        worker_id, ttl_ms = record.worker_id, max(1, round(ttl_s * 1000))
        accepted = await self._store.script(
            _ANNOUNCE,
            [f"wrk:{worker_id}", f"epo:{worker_id}", "wrks", WORKER_STREAM, WORKER_STREAM + b":n"],
            [
                worker_id,
                epoch_text(record.epoch),
                encode_record(record),
                ttl_ms,
                record.num_blocks,
                max(_FENCE_MS, ttl_ms),
                _STREAM_LENGTH,
            ],
        )
        if not accepted:
            raise fenced(worker_id, record.epoch)

    async def leave(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Give the lease back; `RedisDirectory` purges what was published. Raises `Unavailable`."""
        await self._store.script(
            _LEAVE,
            [f"wrk:{worker_id}", "wrks", WORKER_STREAM, WORKER_STREAM + b":n"],
            [worker_id, epoch_text(epoch), _STREAM_LENGTH],
        )

    def workers(self) -> tuple[WorkerRecord, ...]:
        """All workers whose lease holds, by name. From memory, in Redis outages too."""
        moment_s = self._lease_time_s()
        if moment_s is None:
            return ()
        return tuple(
            lease.record for _, lease in sorted(self._leases.items()) if lease.expires_at_s > moment_s
        )

    def epoch_of(self, worker_id: WorkerId) -> Epoch | None:
        """The epoch of a worker whose lease holds."""
        lease, moment_s = self._leases.get(worker_id), self._lease_time_s()
        if lease is None or moment_s is None or lease.expires_at_s <= moment_s:
            return None
        return lease.record.epoch

    @property
    def in_contact(self) -> bool:
        """The mirror is complete and Redis answered when last asked."""
        return self._contact_at_s is not None and self._lost_at_s is None

    async def rebuild(self, *, after_outage: bool) -> None:
        """See `StreamSink`."""
        found = await self._store.script(_SNAPSHOT, ["wrks"], [])
        now_s = self._clock.monotonic_s()
        leases: dict[WorkerId, _Lease] = {}
        for data, ttl_ms, left_ms in found:
            try:
                record = decode_record(data)
            except TandemError as error:
                _LOG.warning("a worker is left out: %s", error)
                continue
            leases[record.worker_id] = _Lease(record, int(ttl_ms) / 1000, now_s + int(left_ms) / 1000)
        if after_outage:
            for record in self.workers():  # known and alive when contact was lost
                lease = self._leases[record.worker_id]
                leases.setdefault(record.worker_id, replace(lease, expires_at_s=now_s + lease.ttl_s))
        self._leases = leases

    def apply(self, entry: Entry) -> None:
        """See `StreamSink`."""
        if (left := entry.get(b"left")) is not None:
            worker_id = WorkerId(left.decode())
            known = self._leases.get(worker_id)
            if known is not None and known.record.epoch == int(entry[b"epoch"]):
                del self._leases[worker_id]
            return
        record = decode_record(entry[b"record"])
        ttl_s = int(entry[b"ttl_ms"]) / 1000
        self._leases[record.worker_id] = _Lease(record, ttl_s, self._clock.monotonic_s() + ttl_s)

    def tick(self) -> None:
        """See `StreamSink`. Expired leases leave memory."""
        self._contact_at_s = now_s = self._clock.monotonic_s()
        self._lost_at_s = None
        for worker_id in [key for key, lease in self._leases.items() if lease.expires_at_s <= now_s]:
            del self._leases[worker_id]
        self._watch.notify()

    def lost(self) -> None:
        """See `StreamSink`. Leases stand still from the last contact on."""
        if self._lost_at_s is None and self._contact_at_s is not None:
            self._lost_at_s = self._contact_at_s
        self._watch.notify()

    def _lease_time_s(self) -> float | None:
        """The moment at which leases are judged; None when nothing may be served any more."""
        now_s = self._clock.monotonic_s()
        if self._lost_at_s is None:
            return now_s
        return self._lost_at_s if now_s - self._lost_at_s <= self._outage_grace_s else None
