"""What a worker tells the prefix index: which blocks entered and left its cache."""

from __future__ import annotations

from dataclasses import dataclass

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
