"""The block hash chain: who may share which block, computed alike in every process.

``h_i = SHA-256(h_{i-1} || tokens_i)`` cut to 128 bits, tokens as little-endian uint32; the chain
starts at a root made of everything that must keep two prompts apart. After vLLM's automatic prefix
caching (Kwon et al., 2023), with a cryptographic hash so that a collision can't be forged.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Sequence

from tandem.ids import BlockHash

HASH_BYTES = 16
_ROOT_TAG = b"tandem/chain-root/1"


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """16 bytes that keep one tenant's prefixes from another's; unguessable without `secret`."""
    return hmac.new(secret, tenant.encode(), hashlib.sha256).digest()[:HASH_BYTES]


def chain_root(layout_fingerprint: str, *, salt: bytes = b"", adapter: str = "") -> bytes:
    """The hash before the first block. The fingerprint covers model, dtype, block size, version."""
    digest = hashlib.sha256(_ROOT_TAG)
    for part in (layout_fingerprint.encode(), adapter.encode(), salt):
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()[:HASH_BYTES]


def next_hash(parent: bytes, block_tokens: bytes) -> BlockHash:
    """One link of the chain; `block_tokens` is one full block as little-endian uint32."""
    return BlockHash(hashlib.sha256(parent + block_tokens).digest()[:HASH_BYTES])


def hash_blocks(root: bytes, token_ids: Sequence[int], block_size_tokens: int) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids`, in order; a part-full last block has none."""
    raw = array("I", token_ids).tobytes()
    stride = 4 * block_size_tokens
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(raw) - stride + 1, stride):
        parent = next_hash(parent, raw[start : start + stride])
        hashes.append(parent)
    return hashes
