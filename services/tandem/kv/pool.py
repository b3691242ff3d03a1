"""Who holds which block of one worker's KV storage: reference counts, free blocks, eviction order.

Block ids are plain ints in here. Not thread-safe, except `cache.events`: one engine thread owns a pool.
After vLLM's block pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from tandem.errors import ConfigError
from tandem.ids import BlockHash
from tandem.kv.hashing import next_hash
from tandem.kv.prefix_cache import PrefixCache


class BlockPool:
    """Every block is in one of three states:

    - held: one or more sequences use it; it may be cached as well
    - idle: nobody uses it, but its content is cached; evicted least recently used first
    - blank: nobody uses it and nothing of worth is in it
    """

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        hasher: Callable[[bytes, bytes], BlockHash] = next_hash,
    ) -> None:
        if num_blocks < 1 or block_size_tokens < 1:
            raise ConfigError(
                f"engine.num_blocks ({num_blocks}) and block_size_tokens ({block_size_tokens}) "
                "must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.cache = PrefixCache(block_size_tokens, hasher)
        self._num_refs = [0] * num_blocks
        self._blank = list(reversed(range(num_blocks)))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `take` could hand out: blank and idle ones."""
        return len(self._blank) + len(self._idle)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take, the last one perhaps part full."""
        return -(-num_tokens // self.block_size_tokens)

    def num_spare(self, shared: Iterable[int]) -> int:
        """Free blocks that would be left after taking `shared`, which may be idle now."""
        return self.num_free - sum(block in self._idle for block in shared)

    def take(self, num_new: int, shared: Sequence[int] = ()) -> list[int] | None:
        """Hold `shared` (cached blocks) once more and `num_new` blocks anew; returns the new ones.

        All or nothing: None, and nothing is changed, when the free blocks don't suffice. Idle blocks
        lose their content when handed out.
        """
        if num_new > self.num_spare(shared):
            return None
        for block in shared:
            self._idle.pop(block, None)
            self._num_refs[block] += 1
        return [self._take_one() for _ in range(num_new)]

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one hold on each of a sequence's blocks, in position order.

        The last positions are evicted first, since the first ones are the likelier to be shared.
        """
        for block in reversed(blocks):
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                if block in self.cache:
                    self._idle[block] = None
                else:
                    self._blank.append(block)
            elif self._num_refs[block] < 0:
                raise AssertionError(f"block {block} was released more often than taken")

    def _take_one(self) -> int:
        if not self._blank:
            oldest = next(iter(self._idle))
            for block in self.cache.evict(oldest):
                if block in self._idle:
                    del self._idle[block]
                    self._blank.append(block)
        block = self._blank.pop()
        self._num_refs[block] = 1
        return block
