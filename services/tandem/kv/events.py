"""What a worker tells the prefix index: which blocks entered and left its cache."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from tandem.ids import BlockHash


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """These full blocks can now be shared."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks were evicted."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing is held any more."""


KvEvent = BlocksStored | BlocksRemoved | CacheCleared


class EventLog:
    """What the prefix index has not been told yet, as a net effect: memory stays within the pool's size.

    The one object of the pool that two threads touch: the engine's writes, the event loop's drains.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: dict[BlockHash, None] = {}
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    def stored(self, block_hash: BlockHash) -> None:
        """A block entered the cache."""
        with self._lock:
            self._held[block_hash] = None
            if block_hash in self._removed:
                del self._removed[block_hash]
            else:
                self._stored[block_hash] = None

    def removed(self, block_hash: BlockHash) -> None:
        """A block left the cache."""
        with self._lock:
            self._held.pop(block_hash, None)
            if block_hash in self._stored:
                del self._stored[block_hash]
            else:
                self._removed[block_hash] = None

    def drain(self) -> list[KvEvent]:
        """What changed since the last call; forgets it."""
        with self._lock:
            removed, self._removed = self._removed, {}
            stored, self._stored = self._stored, {}
        events: list[KvEvent] = []
        if removed:
            events.append(BlocksRemoved(tuple(removed)))
        if stored:
            events.append(BlocksStored(tuple(stored)))
        return events

    def snapshot(self) -> list[KvEvent]:
        """All that is held, told from the start: for an index that lost what it knew."""
        with self._lock:
            held = tuple(self._held)
            self._stored, self._removed = {}, {}
        return [CacheCleared(), BlocksStored(held)] if held else [CacheCleared()]
