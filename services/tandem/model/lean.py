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
from tandem.model.compiled import normed, rotated, swiglu
from tandem.model.linear import CpuLinear, can_pack, make_linear

_SHAPES = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
"""Layers known to be: norm, attention with rotary halves, residual, norm, gated MLP, residual."""


class _Norm:
    """An RMSNorm whose weight the product after it has taken in."""

    def __init__(self, norm: Any) -> None:
        self._eps = torch.tensor(norm.variance_epsilon)
        self._one_nth = 1.0 / len(norm.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return normed(x, self._eps, self._one_nth)


class _WeightedNorm(_Norm):
    """An RMSNorm with its weight, where no product follows."""

    def __init__(self, norm: Any) -> None:
        super().__init__(norm)
        self._weight: Tensor = norm.weight.detach()

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).mul_(self._weight)


class LeanLayer(nn.Module):
    """Stands in for one decoder layer; takes its weights over, in another layout."""

    def __init__(self, layer: nn.Module, weights: WeightFormat) -> None:
        super().__init__()
        source = cast(Any, layer)
        attention, mlp = source.self_attn, source.mlp
        self._layer: int = attention.layer_idx
        self._scaling: float = attention.scaling
        self._window: int | None = getattr(
            attention, "sliding_window", getattr(attention.config, "sliding_window", None)
        )
        self._head_dim: int = attention.head_dim
        self._num_heads: int = attention.config.num_attention_heads
        self._num_kv_heads: int = attention.config.num_key_value_heads
        self._attention_norm = _Norm(source.input_layernorm)
        self._mlp_norm = _Norm(source.post_attention_layernorm)
        self._query_norm = _WeightedNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._key_norm = _WeightedNorm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self._qkv: CpuLinear = make_linear(
            [attention.q_proj, attention.k_proj, attention.v_proj],
            weights,
            input_scale=source.input_layernorm.weight,
        )
        self._out: CpuLinear = make_linear([attention.o_proj], weights)
        self._gate_up: CpuLinear = make_linear(
            [mlp.gate_proj, mlp.up_proj], weights, input_scale=source.post_attention_layernorm.weight
        )
        self._down: CpuLinear = make_linear([mlp.down_proj], weights)
        silu = isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation"
        self._activation: Callable[[Tensor], Tensor] | None = None if silu else mlp.act_fn

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        paged: PagedStep,
        **_: Any,
    ) -> Tensor:
        """``[1, T, hidden]`` to the same, as the layer it stands for."""
        x = hidden_states[0]
        x = self._out.add(self._attend(self._attention_norm(x), position_embeddings, paged), x)
        return self._down.add(self._gated(self._gate_up(self._mlp_norm(x))), x)[None]

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self._activation is None:
            return swiglu(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self._activation(gate).mul_(up)

    def _attend(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], paged: PagedStep) -> Tensor:
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qkv = self._qkv(x).view(len(x), heads + 2 * kv_heads, self._head_dim)
        qk, value = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if self._query_norm is not None and self._key_norm is not None:
            qk = torch.cat((self._query_norm(qk[:, :heads]), self._key_norm(qk[:, heads:])), dim=1)
        qk = rotated(qk, *paged.rotation(*position_embeddings))
        return paged.write_and_attend(self._layer, qk, value, self._scaling, self._window)


def make_lean(module: nn.Module, weights: WeightFormat) -> None:
    """Replace the decoder layers of known shape inside `module`, in place; leave all others."""
    for parent in module.modules():
        if not isinstance(parent, nn.ModuleList):
            continue
        for index, layer in enumerate(parent):
            if type(layer).__name__ in _SHAPES and can_pack(cast(Any, layer).self_attn.q_proj.weight):
                parent[index] = LeanLayer(layer, weights)
