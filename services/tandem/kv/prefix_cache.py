"""Which filled blocks can be shared: a trie of token blocks below each chain root.

The trie is walked by the tokens themselves, so a hash that collides can't lead to another prompt's
keys and values; the hash is only the name under which the cluster's index knows a block. Every
block in the trie has its parent there too: when one leaves, all below it leave. After SGLang's
radix cache (Zheng et al., 2024), cut to whole blocks as in vLLM.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.ids import BlockHash
from tandem.kv.events import EventLog
from tandem.kv.hashing import next_hash


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One node: a full block in its context. The root of a chain has neither parent nor block.

    `attached` turns false when the node leaves the trie, for holders that kept a reference.
    """

    hash: bytes
    parent: CachedBlock | None = None
    tokens: bytes = b""
    block_id: int | None = None
    children: dict[bytes, CachedBlock] = field(default_factory=dict)
    attached: bool = True


class PrefixCache:
    """The trie. Knows nothing of reference counts or free lists: `BlockPool` owns those."""

    def __init__(
        self, block_size_tokens: int, hasher: Callable[[bytes, bytes], BlockHash] = next_hash
    ) -> None:
        self.events = EventLog()
        self._block_size_tokens = block_size_tokens
        self._hasher = hasher
        self._roots: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    @property
    def num_roots(self) -> int:
        """Chain roots with at least one block: back to 0 when nothing is cached."""
        return len(self._roots)

    def match(self, root: bytes, token_ids: array[int], max_blocks: int) -> list[CachedBlock]:
        """The longest cached run of leading full blocks of `token_ids`, at most `max_blocks`."""
        found: list[CachedBlock] = []
        node = self._roots.get(root)
        while node is not None and len(found) < max_blocks:
            node = node.children.get(self._tokens_of(token_ids, len(found)))
            if node is not None:
                found.append(node)
        return found

    def extend(
        self,
        root: bytes,
        last: CachedBlock | None,
        token_ids: array[int],
        block_ids: array[int],
        first: int,
        end: int,
    ) -> CachedBlock | None:
        """Make blocks ``[first, end)`` of a sequence shareable; returns the node of the last one.

        `last` is what the previous call for this sequence returned (None at first). A block whose
        twin is already cached stays private to the sequence. If `last` has left the trie meanwhile,
        the sequence's leading blocks enter again.
        """
        if last is None or not last.attached:
            first = 0
            last = self._roots.get(root)
            if last is None:
                if end == 0:
                    return None
                last = self._roots[root] = CachedBlock(hash=root)
        for position in range(first, end):
            tokens = self._tokens_of(token_ids, position)
            last = last.children.get(tokens) or self._insert(last, tokens, block_ids[position])
        return last

    def evict(self, block_id: int) -> list[int]:
        """Take the block and all that continue it out of the trie; returns their ids, itself first."""
        top = self._by_block[block_id]
        parent = top.parent
        assert parent is not None
        del parent.children[top.tokens]
        if parent.parent is None and not parent.children:
            parent.attached = False
            del self._roots[parent.hash]
        gone: list[int] = []
        pending = [top]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            assert node.block_id is not None
            node.attached = False
            del self._by_block[node.block_id]
            self.events.removed(BlockHash(node.hash))
            gone.append(node.block_id)
        return gone

    def _insert(self, parent: CachedBlock, tokens: bytes, block_id: int) -> CachedBlock:
        node = CachedBlock(self._hasher(parent.hash, tokens), parent, tokens, block_id)
        parent.children[tokens] = node
        self._by_block[block_id] = node
        self.events.stored(BlockHash(node.hash))
        return node

    def _tokens_of(self, token_ids: array[int], position: int) -> bytes:
        start = position * self._block_size_tokens
        return token_ids[start : start + self._block_size_tokens].tobytes()
