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
    A masked key must still be finite (-inf + NaN is NaN, and so is 0 * NaN), whatever an earlier
    owner or bytes in flight have left there: tables are padded with the sequence's own first block,
    which is full, and `stale` [M] are the rows of the gathered copy to zero, None if there are none.
    """

    rows: Tensor | None
    blocks: Tensor
    positions: Tensor
    """[G, n] of the queries."""
    num_keys: int
    """The longest context among them."""
    stale: Tensor | None
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """[G, 1, n, keys], 0 where a query may look and -inf elsewhere; None: everywhere. Computed once."""
        if window not in self._masks:
            keys = torch.arange(self.num_keys)
            queries = self.positions[:, None, :, None]
            allowed = keys <= queries
            if window is not None:
                allowed = allowed & (keys > queries - window)
            everywhere = bool(allowed.all())
            self._masks[window] = None if everywhere else torch.where(allowed, 0.0, float("-inf"))
        return self._masks[window]

    def is_whole_prompt(self, window: int | None) -> bool:
        """One sequence from its first token on: what torch's causal attention is made for."""
        num_sequences, num_queries = self.positions.shape
        return (
            num_sequences == 1
            and num_queries == self.num_keys > 1
            and (window is None or window >= self.num_keys)
        )


class PagedMemory:
    """A KV storage seen layer by layer. The views are made once: a step at batch 1 would feel them."""

    def __init__(self, storage: KvStorage) -> None:
        self.layout = layout = storage.layout
        tensor, size = storage.tensor, layout.block_size_tokens
        rows = tensor.view(-1, layout.num_kv_heads * layout.head_dim)
        layers = range(layout.num_layers)
        self.blocks = [(tensor[:, layer, 0], tensor[:, layer, 1]) for layer in layers]
        """Keys and values of each layer, both [blocks, block_size, kv_heads, head_dim]."""
        # One numbering of rows fits every layer, counted from where the layer's rows begin.
        self.rows = [(rows[2 * layer * size :], rows[(2 * layer + 1) * size :]) for layer in layers]
        """Keys and values of each layer, a token a row, [rows, kv_heads * head_dim]."""

    def rows_of(self, slots: NDArray[np.int64]) -> Tensor:
        """The rows of `slots` in each of `rows`."""
        size = self.layout.block_size_tokens
        block, offset = np.divmod(slots, size)
        return torch.from_numpy(block * (self.layout.num_layers * 2 * size) + offset)


class PagedStep:
    """What one step's attention needs, the same for all layers: where to write and what to read."""

    def __init__(
        self,
        memory: PagedMemory,
        *,
        slots: NDArray[np.int64],
        query_starts: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        block_tables: NDArray[np.int32],
    ) -> None:
        """Arrays as in `engine.batch.BatchInput`."""
        self._memory = memory
        self._kv_heads, self._head_dim = memory.layout.num_kv_heads, memory.layout.head_dim
        self._rows = memory.rows_of(slots)
        size = memory.layout.block_size_tokens
        self._groups = tuple(_groups(query_starts, context_lens, block_tables, size))
        self._rotation: tuple[Tensor, Tensor] | None = None

    def rotation(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """A rotary embedding's [1, T, dim] as [T, 1, dim], with the sign of the rotated half in `sin`."""
        if self._rotation is None:
            half = sin.shape[-1] // 2
            signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
            self._rotation = cos[0].unsqueeze(1), signed.unsqueeze(1)
        return self._rotation

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put keys and values [T, kv_heads, head_dim] of one layer into the step's slots."""
        key_rows, value_rows = self._memory.rows[layer]
        shape = (len(self._rows), self._kv_heads * self._head_dim)
        key_rows.index_copy_(0, self._rows, key.reshape(shape))
        value_rows.index_copy_(0, self._rows, value.reshape(shape))

    def attend(
        self, layer: int, query: Tensor, scaling: float | None, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention outputs [T, heads, head_dim] of queries of that shape."""
        first = self._groups[0]
        if first.rows is None:
            return self._attend_group(first, layer, query, scaling, window, softcap)
        out = torch.empty(query.shape, dtype=query.dtype)
        for group in self._groups:
            out[group.rows] = self._attend_group(group, layer, query[group.rows], scaling, window, softcap)
        return out

    def one_each(self, layer: int, window: int | None) -> tuple[Any, ...] | None:
        """What `compiled.attend_one_each` needs of this step; None unless every sequence has one query."""
        group = self._groups[0]
        if group.rows is not None or group.positions.shape[1] != 1:
            return None
        memory = self._memory
        places = (self._rows, *memory.rows[layer], *memory.blocks[layer])
        return (*places, group.blocks, group.num_keys, group.stale, group.mask(window))

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
        kv_heads = self._kv_heads
        keys, values = self._memory.blocks[layer]
        key, value = self._gather(group, keys), self._gather(group, values)
        if softcap is None and group.is_whole_prompt(window):
            out = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None], key, value, is_causal=True, scale=scaling, enable_gqa=True
            )
            return out[0].transpose(0, 1)
        # Queries that share a key head stand side by side, so that no key is repeated (GQA).
        per_kv_head = num_heads // kv_heads
        mask = group.mask(window)
        if num_queries == 1:
            q = query.view(num_sequences, kv_heads, per_kv_head, head_dim)
            out = _scaled_dot_product(q, key, value, mask, scaling, softcap)
            return out.reshape(num_sequences, num_heads, head_dim)
        q = query.reshape(num_sequences, num_queries, kv_heads, per_kv_head, head_dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(num_sequences, kv_heads, per_kv_head * num_queries, head_dim)
        if mask is not None:
            mask = mask.repeat(1, 1, per_kv_head, 1)
        out = _scaled_dot_product(q, key, value, mask, scaling, softcap)
        out = out.view(num_sequences, kv_heads, per_kv_head, num_queries, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(num_sequences * num_queries, num_heads, head_dim)

    def _gather(self, group: _Group, blocks: Tensor) -> Tensor:
        """A layer's keys or values of a group, [G, kv_heads, keys, head_dim]."""
        shape = (len(group.positions), -1, self._kv_heads, self._head_dim)
        gathered = blocks.index_select(0, group.blocks).view(shape)
        if group.stale is not None:
            gathered.view(-1, self._kv_heads * self._head_dim).index_fill_(0, group.stale, 0.0)
        return gathered.narrow(1, 0, group.num_keys).transpose(1, 2)


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    if softcap is None:
        if mask is not None:
            mask = mask.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    # Gemma 2 squashes the scores (Gemma Team, 2024), which torch's fused attention can't.
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
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
        contexts, counts = context_lens[members], num_blocks[members]
        tables = block_tables[members, :widest]
        tables = np.where(np.arange(widest) < counts[:, None], tables, tables[:, :1])
        yield _Group(
            rows=None if everyone else torch.from_numpy(rows.astype(np.int64)),
            blocks=torch.from_numpy(tables.reshape(-1).astype(np.int64)),
            positions=torch.from_numpy(
                (contexts[:, None] - num_queries + np.arange(num_queries)).astype(np.int64)
            ),
            num_keys=int(contexts.max()),
            stale=_stale_rows(contexts, counts, widest, block_size_tokens),
        )


def _stale_rows(
    contexts: NDArray[np.int32], counts: NDArray[np.int32], widest: int, block_size_tokens: int
) -> Tensor | None:
    """Rows [M] that hold no token in the last blocks of sequences gathered `widest` blocks wide each."""
    if (contexts == contexts[0]).all():
        return None  # what lies beyond is cut off
    positions = contexts[:, None] + np.arange(block_size_tokens - 1)
    inside = positions < counts[:, None] * block_size_tokens
    starts = np.arange(len(contexts))[:, None] * widest * block_size_tokens
    return torch.from_numpy((starts + positions)[inside].astype(np.int64))


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
