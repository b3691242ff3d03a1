"""Decoder layers of the Llama shape in fewer, larger operations.

At one token a step most of a layer's time outside of its matrices goes into launching small
operations. So query, key and value are one product, gate and up another, residuals are added by the
product before them, and what lies between products is compiled. What is
computed is the transformers layer's own definition; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from tandem.config.choices import WeightFormat
from tandem.model.attention import PagedStep
from tandem.model.compiled import attend_one_each, compiled, normed, rotated, swiglu
from tandem.model.linear import CpuLinear, can_pack, make_linear

_SHAPES = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
"""Layers known to be: norm, attention with rotary halves, residual, norm, gated MLP, residual."""


class _Products(nn.Module):
    """A layer's matrices and its norms, and the whole layer for a step of one token a sequence.

    Written for TorchScript: `forward` is compiled and computes what `LeanLayer.forward` does.
    """

    def __init__(self, source: Any, weights: WeightFormat) -> None:
        super().__init__()
        attention, mlp = source.self_attn, source.mlp
        first, second = source.input_layernorm, source.post_attention_layernorm
        # A norm's weight goes into the product behind it.
        self.qkv: CpuLinear = make_linear(
            [attention.q_proj, attention.k_proj, attention.v_proj], weights, input_scale=first.weight
        )
        self.out: CpuLinear = make_linear([attention.o_proj], weights)
        self.gate_up: CpuLinear = make_linear(
            [mlp.gate_proj, mlp.up_proj], weights, input_scale=second.weight
        )
        self.down: CpuLinear = make_linear([mlp.down_proj], weights)
        self.first_eps = torch.tensor(first.variance_epsilon)
        self.second_eps = torch.tensor(second.variance_epsilon)
        self.one_nth = 1.0 / len(first.weight)
        self.heads: int = attention.config.num_attention_heads
        self.kv_heads: int = attention.config.num_key_value_heads
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        key_rows: Tensor,
        value_rows: Tensor,
        keys: Tensor,
        values: Tensor,
        blocks: Tensor,
        num_keys: int,
        stale: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """``[T, hidden]`` to the same; the rest as `PagedStep.rotation` and `PagedStep.one_each` say."""
        qkv = self.qkv(normed(x, self.first_eps, self.one_nth))
        qkv = qkv.view(x.size(0), self.heads + 2 * self.kv_heads, self.head_dim)
        qk = rotated(qkv.narrow(1, 0, self.heads + self.kv_heads), cos, sin)
        value = qkv.narrow(1, self.heads + self.kv_heads, self.kv_heads)
        out = attend_one_each(
            qk, value, rows, key_rows, value_rows, keys, values, blocks, num_keys, stale, mask, self.scaling
        )
        x = self.out.add(out, x)
        gate_up = self.gate_up(normed(x, self.second_eps, self.one_nth))
        return self.down.add(swiglu(gate_up), x)


class _HeadNorm:
    """An RMSNorm over each head (Qwen 3)."""

    def __init__(self, norm: Any) -> None:
        self._weight: Tensor = norm.weight.detach()
        self._eps = torch.tensor(norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return normed(x, self._eps, 1.0 / len(self._weight)).mul_(self._weight)


class LeanLayer(nn.Module):
    """Stands in for one decoder layer; takes its weights over, in another layout."""

    def __init__(self, layer: nn.Module, weights: WeightFormat) -> None:
        super().__init__()
        source = cast(Any, layer)
        attention, activation = source.self_attn, source.mlp.act_fn
        self._layer: int = attention.layer_idx
        self._window: int | None = getattr(
            attention, "sliding_window", getattr(attention.config, "sliding_window", None)
        )
        self._products = _Products(source, weights)
        self._query_norm = _HeadNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._key_norm = _HeadNorm(attention.k_norm) if hasattr(attention, "k_norm") else None
        silu = isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
        self._activation: Callable[[Tensor], Tensor] | None = None if silu else activation
        usual = silu and self._query_norm is None
        self._one_each = compiled(self._products) if usual else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        paged: PagedStep,
        **_: Any,
    ) -> Tensor:
        """``[1, T, hidden]`` to the same, as the layer it stands for."""
        x = hidden_states[0]
        cos, sin = paged.rotation(*position_embeddings)
        one_each = paged.one_each(self._layer, self._window)
        if self._one_each is not None and one_each is not None:
            out: Tensor = self._one_each(x, cos, sin, *one_each)
            return out[None]
        own = self._products
        x = own.out.add(self._attend(normed(x, own.first_eps, own.one_nth), cos, sin, paged), x)
        return own.down.add(self._gated(own.gate_up(normed(x, own.second_eps, own.one_nth))), x)[None]

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self._activation is None:
            return swiglu(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self._activation(gate).mul_(up)

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, paged: PagedStep) -> Tensor:
        own = self._products
        qkv = own.qkv(x).view(len(x), own.heads + 2 * own.kv_heads, own.head_dim)
        qk, value = qkv.split((own.heads + own.kv_heads, own.kv_heads), dim=1)
        if self._query_norm is not None and self._key_norm is not None:
            query, key = qk.split((own.heads, own.kv_heads), dim=1)
            qk = torch.cat((self._query_norm(query), self._key_norm(key)), dim=1)
        query, key = rotated(qk, cos, sin).split((own.heads, own.kv_heads), dim=1)
        paged.write(self._layer, key, value)
        return paged.attend(self._layer, query, own.scaling, self._window, None).reshape(len(x), -1)


def make_lean(module: nn.Module, weights: WeightFormat) -> None:
    """Replace the decoder layers of known shape inside `module`, in place; leave all others."""
    for parent in module.modules():
        if not isinstance(parent, nn.ModuleList):
            continue
        for index, layer in enumerate(parent):
            if type(layer).__name__ in _SHAPES and can_pack(cast(Any, layer).self_attn.q_proj.weight):
                parent[index] = LeanLayer(layer, weights)
