"""Who is there and who holds what: the state plane's nouns, whatever stores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

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
class WorkerLoad:
    """A worker's own account of its load at one moment."""

    num_free_blocks: int
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0


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
        """Register or renew. An older epoch than the one known is refused with `Refused`."""
        ...

    async def leave(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Remove the worker and everything it published. No-op for another epoch."""
        ...

    def workers(self) -> tuple[WorkerRecord, ...]:
        """All workers whose lease holds, by name. From memory."""
        ...


class PrefixIndex(Protocol):
    """Which worker holds which block. A stale answer may cost a cache hit, never correctness."""

    async def publish(
        self, worker_id: WorkerId, epoch: Epoch, sequence: int, events: Sequence[KvEvent]
    ) -> None:
        """Apply one batch of a worker's events. `sequence` counts batches from 1 in each epoch."""
        ...

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """For each worker that holds the first block: how many leading blocks it holds. From memory."""
        ...
