"""The shape of a KV block, and the fingerprint that two workers must share to exchange blocks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

LAYOUT_VERSION = 1
DEFAULT_BLOCK_SIZE_TOKENS = 16


class KvDtype(Enum):
    """Element type of keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is KvDtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Storage is ``[blocks, layers, 2, block_size, kv_heads, head_dim]``: one block, one message.

    `model_revision` is a digest of the model's weights and configuration, and of how they were
    quantised: whatever changes a key or value changes it.
    """

    model_revision: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KvDtype
    block_size_tokens: int = DEFAULT_BLOCK_SIZE_TOKENS

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """``(layers, 2, block_size, kv_heads, head_dim)``; axis 1 is key, value."""
        return (self.num_layers, 2, self.block_size_tokens, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block across all layers."""
        num_elements = self.num_layers * 2 * self.block_size_tokens * self.num_kv_heads * self.head_dim
        return num_elements * self.dtype.num_bytes

    @property
    def fingerprint(self) -> str:
        """16 hex digits; equal exactly when blocks can be exchanged byte for byte."""
        text = "/".join(
            (
                f"tandem-kv-{LAYOUT_VERSION}",
                self.model_revision,
                self.dtype.value,
                "x".join(map(str, self.block_shape)),
            )
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take, the last one perhaps part full."""
        return -(-num_tokens // self.block_size_tokens)
