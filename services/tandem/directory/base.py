"""Who is there and who holds what: the state plane's nouns, whatever stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tandem.generation import WorkerLoad as WorkerLoad
from tandem.ids import BlockHash, Epoch, WorkerId
from tandem.kv.events import KvEvent
from tandem.kv.ticket import PeerAddress


class Role(Enum):
    """The pool a worker belongs to. It decides routing only: the engine is the same."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(Enum):
    """Only READY workers get new work; DRAINING ones still serve what they hold."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker's entry. Vanishes when its lease is not renewed."""

    address: PeerAddress
    role: Role
    state: WorkerState
    model_id: str
    layout_fingerprint: str
    block_size_tokens: int
    num_blocks: int
    max_context_tokens: int
    load: WorkerLoad
    capabilities: Mapping[str, str] = field(default_factory=dict)

    @property
    def worker_id(self) -> WorkerId:
        """The worker's name."""
        return self.address.worker_id

    @property
    def epoch(self) -> Epoch:
        """Which life of the worker this is."""
        return self.address.epoch


class Membership(Protocol):
    """The worker directory. Reads come from a local mirror and never wait."""

    async def announce(self, record: WorkerRecord, ttl_s: float) -> None:
        """Register or renew. An older epoch than the one known is refused with `Fenced`."""
        ...

    async def leave(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Remove the worker and everything it published. No-op for another epoch."""
        ...

    def workers(self) -> tuple[WorkerRecord, ...]:
        """All workers whose lease holds, by name. From memory."""
        ...


class PrefixIndex(Protocol):
    """Which worker holds which block. A stale answer may cost a cache hit, never correctness.

    One index is one namespace: the layout fingerprint. A worker announces before it publishes.
    """

    async def publish(
        self, worker_id: WorkerId, epoch: Epoch, sequence: int, events: Sequence[KvEvent]
    ) -> None:
        """Apply one batch of a worker's events. `sequence` counts batches from 1 in each epoch.

        A sequence already applied is a no-op, so a batch whose answer was lost can be sent again.
        Raises `Fenced` for an older epoch, `OutOfSequence` when a batch is missing or the worker has
        no lease (cure: a batch that starts with `CacheCleared`, under any later sequence), and
        `Unavailable` within a second or so when the store doesn't answer.
        """
        ...

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """For each worker that holds the first block: how many leading blocks it holds. From memory."""
        ...


class Directory(Protocol):
    """Both halves over one store, which it owns: `async with`, or call `aclose`."""

    @property
    def membership(self) -> Membership:
        """Who is there."""
        ...

    @property
    def index(self) -> PrefixIndex:
        """Who holds what."""
        ...

    async def wait_until(self, predicate: Callable[[], bool], timeout_s: float) -> None:
        """Return once `predicate()` is true, looked at after every change; else `DeadlineExceeded`."""
        ...

    async def aclose(self) -> None:
        """End every task and connection. Idempotent."""
        ...
