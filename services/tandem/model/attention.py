"""Paged attention behind transformers' attention interface: one flat batch, KV in block storage.

A model's own code computes queries, keys and values of all T tokens of a step at once; this writes
the new keys and values into their slots and attends each sequence to its own blocks. After
PagedAttention (Kwon et al., 2023), on torch's scaled dot-product attention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from tandem.errors import InternalError, ModelLoadError
from tandem.kv.layout import KvLayout
from tandem.kv.storage import KvStorage

PAGED = "tandem_paged"
"""The name under which transformers knows this attention."""

_KNOWN_EXTRAS = frozenset(
    {"position_ids", "use_cache", "is_causal", "position_embeddings", "output_attentions"}
)


@dataclass(slots=True)
class _Group:
    """G sequences with n query tokens each, attended together over the same number of slots.

    `rows` [G * n] are their flat rows; None: all rows, in order. `blocks` [G * B] are their block
    ids; short tables are padded. Keys beyond a query's own position are masked, padding with them.
    """

    rows: Tensor | None
    blocks: Tensor
    positions: Tensor
    """[G, n] of the queries."""
    num_slots: int
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """[G, 1, n, slots], true where a query may look; None when all may look everywhere. Computed once."""
        if window not in self._masks:
            keys = torch.arange(self.num_slots)
            queries = self.positions[:, None, :, None]
            allowed = keys <= queries
            if window is not None:
                allowed = allowed & (keys > queries - window)
            self._masks[window] = None if bool(allowed.all()) else allowed
        return self._masks[window]


class PagedStep:
    """What one step's attention needs, the same for all layers: where to write and what to read."""

    def __init__(
        self,
        storage: KvStorage,
        *,
        slots: NDArray[np.int64],
        query_starts: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        block_tables: NDArray[np.int32],
    ) -> None:
        """Arrays as in `engine.BatchInput`."""
        layout = storage.layout
        size = layout.block_size_tokens
        self._layout = layout
        self._rows = storage.tensor.view(-1, layout.num_kv_heads * layout.head_dim)
        self._tensor = storage.tensor
        block, offset = np.divmod(slots, size)
        first_row = block * (layout.num_layers * 2 * size) + offset
        self._first_row = torch.from_numpy(first_row)
        self._groups = tuple(_groups(query_starts, context_lens, block_tables, size))

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put keys and values [T, kv_heads, head_dim] of one layer into the step's slots."""
        size = self._layout.block_size_tokens
        rows = self._first_row + layer * 2 * size
        num_tokens = len(rows)
        self._rows.index_copy_(0, rows, key.reshape(num_tokens, -1))
        self._rows.index_copy_(0, rows + size, value.reshape(num_tokens, -1))

    def attend(
        self, layer: int, query: Tensor, scaling: float | None, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention outputs [T, heads, head_dim] of queries of that shape."""
        if len(self._groups) == 1 and self._groups[0].rows is None:
            return self._attend_group(self._groups[0], layer, query, scaling, window, softcap)
        out = torch.empty_like(query)
        for group in self._groups:
            rows = group.rows
            if rows is None:
                raise InternalError("a group without rows must be alone")
            out[rows] = self._attend_group(group, layer, query[rows], scaling, window, softcap)
        return out

    def _attend_group(
        self,
        group: _Group,
        layer: int,
        query: Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        num_sequences, num_queries = group.positions.shape
        num_heads, head_dim = query.shape[-2:]
        kv_heads = self._layout.num_kv_heads
        per_kv_head = num_heads // kv_heads
        # [G * B, 2, size, kv_heads, dim] -> two of [G, kv_heads, slots, dim]
        blocks = self._tensor[:, layer].index_select(0, group.blocks)
        kv = blocks.view(num_sequences, -1, 2, self._layout.block_size_tokens, kv_heads, head_dim)
        key, value = (
            kv[:, :, which].reshape(num_sequences, group.num_slots, kv_heads, head_dim).transpose(1, 2)
            for which in (0, 1)
        )
        mask = group.mask(window)
        # Queries that share a key head stand side by side, so that no key is repeated (GQA).
        q = query.view(num_sequences, num_queries, kv_heads, per_kv_head, head_dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(num_sequences, kv_heads, per_kv_head * num_queries, head_dim)
        if mask is not None:
            mask = mask.expand(-1, per_kv_head, -1, -1).reshape(num_sequences, 1, -1, group.num_slots)
        out = _scaled_dot_product(q, key, value, mask, scaling, softcap)
        out = out.view(num_sequences, kv_heads, per_kv_head, num_queries, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(num_sequences * num_queries, num_heads, head_dim)


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    # Gemma 2 squashes the scores (Gemma Team, 2024), which torch's fused attention can't.
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value


def _groups(
    query_starts: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    block_tables: NDArray[np.int32],
    block_size_tokens: int,
) -> Iterator[_Group]:
    """Decoding sequences of similar length together, every longer chunk on its own."""
    lengths = np.diff(query_starts)
    num_blocks = -(-context_lens // block_size_tokens)
    alike: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for sequence in range(len(context_lens)):
        if lengths[sequence] == 1:
            alike[1, int(num_blocks[sequence] - 1).bit_length()].append(sequence)
        else:
            alike[int(lengths[sequence]), -1 - sequence].append(sequence)
    for (num_queries, _), members in alike.items():
        widest = int(num_blocks[members].max())
        starts = query_starts[members]
        rows = (starts[:, None] + np.arange(num_queries)).reshape(-1)
        everyone = len(alike) == 1
        yield _Group(
            rows=None if everyone else torch.from_numpy(rows.astype(np.int64)),
            blocks=torch.from_numpy(block_tables[members, :widest].reshape(-1).astype(np.int64)),
            positions=torch.from_numpy(
                (context_lens[members, None] - num_queries + np.arange(num_queries)).astype(np.int64)
            ),
            num_slots=widest * block_size_tokens,
        )


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged: PagedStep | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer. ``[1, heads, T, dim]`` in, ``[1, T, heads, dim]`` out."""
    if paged is None:
        raise InternalError(f"{type(module).__name__} did not pass on the step; it can't be served")
    for name, extra in extras.items():
        if name not in _KNOWN_EXTRAS and extra is not None:
            raise ModelLoadError(f"{type(module).__name__} needs {name} in attention, which is not supported")
    layer: int = cast(Any, module).layer_idx
    paged.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = paged.attend(layer, query[0].transpose(0, 1).contiguous(), scaling, sliding_window, softcap)
    return out[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """`paged_attention` masks by itself."""


def register() -> None:
    """Make `PAGED` known to transformers. Idempotent."""
    AttentionInterface.register(PAGED, paged_attention)
    AttentionMaskInterface.register(PAGED, _no_mask)


def require_supported(module: nn.Module, layout: KvLayout) -> None:
    """Raise `ModelLoadError` for a model whose attention would not come through here, layer by layer."""
    layers = {
        cast(Any, part).layer_idx
        for part in module.modules()
        if hasattr(part, "layer_idx") and hasattr(part, "scaling")
    }
    if layers != set(range(layout.num_layers)):
        raise ModelLoadError(
            f"{type(module).__name__}: not every layer has plain attention; supported are decoder-only "
            "models such as Llama, Qwen, Mistral, Gemma and SmolLM"
        )
