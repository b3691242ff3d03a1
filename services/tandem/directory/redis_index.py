"""The prefix index in Redis: written by workers in fenced batches, mirrored in each gateway.

What a worker publishes belongs to one *generation*, a number drawn by Redis. A new life of the worker
and a "clear all" each start a new one, so both take constant time; what the old generation left
is purged in small steps by whoever notices, and the purge checks in Redis that it is really dead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.directory.follower import Entry
from tandem.directory.memory import fenced, gap, no_lease, overfull
from tandem.directory.prefix_map import Delta, PrefixMap, coalesce
from tandem.directory.redis_membership import epoch_text
from tandem.directory.redis_store import Argument, RedisStore
from tandem.directory.watch import Watch
from tandem.errors import ConfigError, InternalError
from tandem.ids import BlockHash, Epoch, WorkerId
from tandem.kv.events import KvEvent
from tandem.kv.hashing import HASH_BYTES

_STREAM_LENGTH = 1024
_STREAM_LIFE_MS = 24 * 3600 * 1000
_SCAN_COUNT = 2048
_PURGE_STEP = 512

_PUBLISH = """
local ns, id, epoch, seq = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local clear, stored, removed = ARGV[5] == '1', ARGV[6], ARGV[7]
local lease = redis.call('HMGET', KEYS[1], 'epoch', 'num_blocks')
local newest = redis.call('GET', KEYS[2])
if newest and newest > epoch then return {'fenced'} end
if lease[1] ~= epoch then return {'no_lease'} end

local state = redis.call('HMGET', KEYS[3], 'epoch', 'gen', 'seq')
local same_life = state[1] == epoch
local last = same_life and tonumber(state[3]) or 0
if seq <= last then return {'applied'} end
if not clear and seq ~= last + 1 then return {'gap', last} end

local gen, dead = state[2], ''
if clear or not same_life then
  if state[2] then dead = state[1] .. '|' .. state[2] end
  gen = redis.call('INCR', 'idx-gen')
  redis.call('SADD', 'owners', ns .. '|' .. epoch .. '|' .. gen .. '|' .. id)
end
local own = 'own:' .. ns .. ':' .. id .. ':' .. gen
if not clear and redis.call('SCARD', own) > tonumber(lease[2]) then return {'overfull', lease[2]} end
redis.call('HSET', KEYS[3], 'epoch', epoch, 'gen', gen, 'seq', seq)

local blk, tag, size = 'blk:' .. ns .. ':', epoch .. '.' .. gen, tonumber(ARGV[8])
for i = 1, #removed, size do
  local hash = removed:sub(i, i + size - 1)
  if redis.call('SREM', own, hash) == 1 then redis.call('HDEL', blk .. hash, id) end
end
for i = 1, #stored, size do
  local hash = stored:sub(i, i + size - 1)
  redis.call('SADD', own, hash)
  redis.call('HSET', blk .. hash, id, tag)
end
if clear or not same_life or #stored + #removed > 0 then
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[9], '*', 'n', redis.call('INCR', KEYS[5]),
             'id', id, 'epoch', epoch, 'gen', gen, 'stored', stored, 'removed', removed)
end
redis.call('PEXPIRE', KEYS[4], ARGV[10])
redis.call('PEXPIRE', KEYS[5], ARGV[10])
return {'done', dead}
"""

_PURGE = """
local ns, epoch, gen, id, step = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local state = redis.call('HMGET', KEYS[1], 'epoch', 'gen')
if state[1] == epoch and state[2] == gen then
  if redis.call('HGET', KEYS[2], 'epoch') == epoch then return -1 end
  redis.call('DEL', KEYS[1])
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[6], '*', 'n', redis.call('INCR', KEYS[4]),
             'id', id, 'epoch', epoch, 'gen', gen, 'gone', '1')
end
local own, blk, tag = KEYS[5], 'blk:' .. ns .. ':', epoch .. '.' .. gen
local hashes = redis.call('SPOP', own, step)
for _, hash in ipairs(hashes) do
  if redis.call('HGET', blk .. hash, id) == tag then redis.call('HDEL', blk .. hash, id) end
end
if #hashes < step then
  redis.call('SREM', KEYS[6], ns .. '|' .. epoch .. '|' .. gen .. '|' .. id)
  if redis.call('SCARD', KEYS[6]) == 0 then redis.call('XTRIM', KEYS[3], 'MAXLEN', 0) end
end
return #hashes
"""

_CURRENT = """
local found = {}
for _, owner in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local ns, epoch, gen, id = owner:match('^([^|]*)|([^|]*)|([^|]*)|(.*)$')
  if ns == ARGV[1] then
    local state = redis.call('HMGET', 'pub:' .. ns .. ':' .. id, 'epoch', 'gen')
    if state[1] == epoch and state[2] == gen then found[#found + 1] = owner end
  end
end
return found
"""


class Owner(NamedTuple):
    """One generation of one worker's published blocks."""

    namespace: str
    epoch: Epoch
    generation: int
    worker_id: WorkerId

    @classmethod
    def parse(cls, member: bytes) -> Owner:
        """From its entry in `owners`."""
        namespace, epoch, generation, worker_id = member.decode().split("|", 3)
        return cls(namespace, Epoch(int(epoch)), int(generation), WorkerId(worker_id))

    @property
    def own_key(self) -> str:
        """The set of its blocks."""
        return f"own:{self.namespace}:{self.worker_id}:{self.generation}"


def index_stream(namespace: str) -> bytes:
    """The stream of changes of one namespace."""
    return f"idx-events:{namespace}".encode()


async def list_owners(store: RedisStore) -> list[Owner]:
    """Every generation that still has something in Redis, of every namespace."""
    return [Owner.parse(member) for member in await store.command("SMEMBERS", "owners")]


async def purge(store: RedisStore, owner: Owner) -> None:
    """Remove all that a dead generation published; a living one is left alone. Idempotent.

    Works in steps of some hundred blocks, so Redis never stalls others. Raises `Unavailable`.
    """
    stream = index_stream(owner.namespace)
    keys: list[bytes | str] = [
        f"pub:{owner.namespace}:{owner.worker_id}",
        f"wrk:{owner.worker_id}",
        stream,
        stream + b":n",
        owner.own_key,
        "owners",
    ]
    arguments: list[Argument] = [
        owner.namespace,
        epoch_text(owner.epoch),
        owner.generation,
        owner.worker_id,
        _PURGE_STEP,
        _STREAM_LENGTH,
    ]
    while await store.script(_PURGE, keys, arguments) == _PURGE_STEP:
        pass


@dataclass(frozen=True, slots=True)
class _Life:
    epoch: Epoch
    generation: int


class RedisPrefixIndex:
    """Implements `PrefixIndex`; as a `StreamSink` it is its own mirror. Workers only write.

    `epoch_of` says from memory which life of a worker holds a lease: others are never matched.
    """

    def __init__(
        self,
        store: RedisStore,
        namespace: str,
        epoch_of: Callable[[WorkerId], Epoch | None],
        watch: Watch,
    ) -> None:
        if not namespace or "|" in namespace or ":" in namespace:
            raise ConfigError(f"an index namespace is a layout fingerprint (hex), not {namespace!r}")
        self._store = store
        self._namespace = namespace
        self._epoch_of = epoch_of
        self._watch = watch
        self._map = PrefixMap()
        self._lives: dict[WorkerId, _Life] = {}

    async def publish(
        self, worker_id: WorkerId, epoch: Epoch, sequence: int, events: Sequence[KvEvent]
    ) -> None:
        """Apply one batch; see `PrefixIndex`. A thousand or so hashes a batch keep Redis responsive."""
        delta = coalesce(events)
        stream = index_stream(self._namespace)
        keys: list[bytes | str] = [
            f"wrk:{worker_id}",
            f"epo:{worker_id}",
            f"pub:{self._namespace}:{worker_id}",
            stream,
            stream + b":n",
        ]
        arguments: list[Argument] = [
            self._namespace,
            worker_id,
            epoch_text(epoch),
            sequence,
            int(delta.cleared),
            _joined(delta.stored),
            _joined(delta.removed),
            HASH_BYTES,
            _STREAM_LENGTH,
            _STREAM_LIFE_MS,
        ]
        outcome, *detail = await self._store.script(_PUBLISH, keys, arguments)
        match outcome:
            case b"done":
                if detail[0]:
                    dead_epoch, generation = detail[0].split(b"|")
                    dead = Owner(self._namespace, Epoch(int(dead_epoch)), int(generation), worker_id)
                    await purge(self._store, dead)
            case b"applied":
                pass
            case b"fenced":
                raise fenced(worker_id, epoch)
            case b"no_lease":
                raise no_lease(worker_id)
            case b"gap":
                raise gap(worker_id, sequence, int(detail[0]))
            case b"overfull":
                raise overfull(worker_id, int(detail[0]))
            case _:
                raise InternalError(f"the publish script answered {outcome!r}")

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Leading blocks held, for each living worker that holds the first. From memory."""
        return {
            worker_id: num_blocks
            for worker_id, num_blocks in self._map.match(hashes).items()
            if self._epoch_of(worker_id) == self._lives[worker_id].epoch
        }

    @property
    def num_blocks(self) -> int:
        """Distinct blocks in the mirror."""
        return self._map.num_blocks

    def held(self, worker_id: WorkerId) -> frozenset[BlockHash]:
        """What the mirror believes the worker to hold, whether or not it lives."""
        return self._map.held(worker_id)

    async def rebuild(self, *, after_outage: bool) -> None:
        """See `StreamSink`. Reads page by page; the old mirror answers until the new one is whole."""
        del after_outage  # a lost index costs hits only
        fresh = PrefixMap()
        lives: dict[WorkerId, _Life] = {}
        for member in await self._store.script(_CURRENT, ["owners"], [self._namespace]):
            owner = Owner.parse(member)
            known = lives.get(owner.worker_id)
            if known is not None and known.generation > owner.generation:
                continue
            lives[owner.worker_id] = _Life(owner.epoch, owner.generation)
            fresh.store(owner.worker_id, ())
            cursor: int | None = None
            while cursor != 0:
                reply = await self._store.command("SSCAN", owner.own_key, cursor or 0, "COUNT", _SCAN_COUNT)
                cursor = int(reply[0])
                fresh.store(owner.worker_id, map(BlockHash, reply[1]))
        self._map, self._lives = fresh, lives

    def apply(self, entry: Entry) -> None:
        """See `StreamSink`. Generations only grow; what an older one says is past."""
        worker_id = WorkerId(entry[b"id"].decode())
        life = _Life(Epoch(int(entry[b"epoch"])), int(entry[b"gen"]))
        known = self._lives.get(worker_id)
        if known is not None and known.generation > life.generation:
            return
        if b"gone" in entry:
            if known == life:
                del self._lives[worker_id]
                self._map.drop(worker_id)
            return
        delta = Delta(known != life, _split(entry[b"stored"]), _split(entry[b"removed"]))
        self._lives[worker_id] = life
        self._map.apply(worker_id, delta)

    def tick(self) -> None:
        """See `StreamSink`."""
        self._watch.notify()

    def lost(self) -> None:
        """See `StreamSink`. Routing goes on with what is known."""


def _joined(hashes: Sequence[BlockHash]) -> bytes:
    for block in hashes:
        if len(block) != HASH_BYTES:
            raise InternalError(f"a block hash has {len(block)} bytes and {HASH_BYTES} are needed")
    return b"".join(hashes)


def _split(joined: bytes) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(joined[start : start + HASH_BYTES]) for start in range(0, len(joined), HASH_BYTES))
