"""Who holds which block, in memory: the state behind every prefix index. No I/O, no time.

Each worker has a bit; a block maps to the bits of its holders, so following a chain is one dict
lookup and one integer AND a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tandem.ids import BlockHash, WorkerId
from tandem.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent


@dataclass(frozen=True, slots=True)
class Delta:
    """A run of events reduced to its outcome: perhaps forget all, then each hash at most once."""

    cleared: bool
    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


def coalesce(events: Iterable[KvEvent]) -> Delta:
    """The outcome of `events` in order; of several events on one hash only the last one counts."""
    cleared = False
    held: dict[BlockHash, bool] = {}
    for event in events:
        match event:
            case CacheCleared():
                cleared = True
                held.clear()
            case BlocksStored(hashes):
                held.update(dict.fromkeys(hashes, True))
            case BlocksRemoved(hashes):
                held.update(dict.fromkeys(hashes, False))
    return Delta(
        cleared,
        tuple(block for block, stored in held.items() if stored),
        tuple(block for block, stored in held.items() if not stored),
    )


@dataclass(slots=True)
class _Holder:
    bit: int
    blocks: set[BlockHash] = field(default_factory=set)


class PrefixMap:
    """Mutable map from block to holders, and back. Size is what is held now: nothing lingers."""

    def __init__(self) -> None:
        self._masks: dict[BlockHash, int] = {}
        self._holders: dict[WorkerId, _Holder] = {}
        self._used_bits = 0

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that anybody holds."""
        return len(self._masks)

    def num_held(self, worker_id: WorkerId) -> int:
        """Blocks that this worker holds."""
        holder = self._holders.get(worker_id)
        return len(holder.blocks) if holder else 0

    def held(self, worker_id: WorkerId) -> frozenset[BlockHash]:
        """A copy of what this worker holds."""
        holder = self._holders.get(worker_id)
        return frozenset(holder.blocks) if holder else frozenset()

    def store(self, worker_id: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """The worker holds these now. Idempotent."""
        holder = self._holders.get(worker_id)
        if holder is None:
            holder = self._holders[worker_id] = _Holder(self._free_bit())
        for block in hashes:
            holder.blocks.add(block)
            self._masks[block] = self._masks.get(block, 0) | holder.bit

    def remove(self, worker_id: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """The worker holds these no more. Unknown ones are ignored."""
        holder = self._holders.get(worker_id)
        if holder is None:
            return
        for block in hashes:
            if block in holder.blocks:
                holder.blocks.remove(block)
                self._forget(block, holder.bit)

    def drop(self, worker_id: WorkerId) -> None:
        """The worker holds nothing and its bit is free again. Idempotent."""
        holder = self._holders.pop(worker_id, None)
        if holder is None:
            return
        for block in holder.blocks:
            self._forget(block, holder.bit)
        self._used_bits &= ~holder.bit

    def apply(self, worker_id: WorkerId, delta: Delta) -> None:
        """One batch of one worker."""
        if delta.cleared:
            self.drop(worker_id)
        self.remove(worker_id, delta.removed)
        self.store(worker_id, delta.stored)

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """For each worker that holds `hashes[0]`: how many leading ones it holds."""
        if not hashes or not (alive := self._masks.get(hashes[0], 0)):
            return {}
        ended: list[tuple[int, int]] = []  # (bits of those whose run ended, its length)
        length = 0
        masks = self._masks
        for length, block in enumerate(hashes):
            still = alive & masks.get(block, 0)
            if still != alive:
                ended.append((alive ^ still, length))
                alive = still
                if not alive:
                    break
        if alive:
            ended.append((alive, length + 1))
        return {
            worker_id: num_blocks
            for worker_id, holder in self._holders.items()
            for bits, num_blocks in ended
            if holder.bit & bits
        }

    def _free_bit(self) -> int:
        bit = ~self._used_bits & (self._used_bits + 1)  # the lowest zero
        self._used_bits |= bit
        return bit

    def _forget(self, block: BlockHash, bit: int) -> None:
        mask = self._masks[block] & ~bit
        if mask:
            self._masks[block] = mask
        else:
            del self._masks[block]
