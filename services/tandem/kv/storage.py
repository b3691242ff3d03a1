"""The memory that KV blocks live in. One tensor, block-major: a block is one contiguous message."""

from __future__ import annotations

import torch
import xxhash

from tandem.ids import BlockId
from tandem.kv.layout import KvDtype, KvLayout

_TORCH_DTYPES = {KvDtype.FLOAT32: torch.float32, KvDtype.BFLOAT16: torch.bfloat16}


class KvStorage:
    """`num_blocks` blocks of one layout, in host memory. Zeroed, so that every page is really there.

    Threads may touch different blocks at once; who may touch which is the engine's and the
    hand-off's business.
    """

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.tensor = torch.zeros((num_blocks, *layout.block_shape), dtype=_TORCH_DTYPES[layout.dtype])
        """``[blocks, layers, 2, block_size, kv_heads, head_dim]``; axis 2 is key, value."""
        self._bytes = self.tensor.view(torch.uint8).numpy().data.cast("B")

    def block(self, block_id: BlockId) -> memoryview:
        """The bytes of one block, writable, ``layout.block_bytes`` long. No copy."""
        start = block_id * self.layout.block_bytes
        return self._bytes[start : start + self.layout.block_bytes]

    def checksum(self, block_id: BlockId) -> int:
        """XXH3-64 of one block's bytes."""
        return xxhash.xxh3_64_intdigest(self.block(block_id))
