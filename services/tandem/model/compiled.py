"""What TorchScript compiles: no Python between the operations of a layer, and no GIL.

At batch 1 most of a step's time outside the matrices is Python's. TorchScript needs no compiler on the
machine, unlike `torch.compile`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def compiled(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The same function or module, without Python inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script: Callable[_Parameters, _Result] = torch.jit.script(function)
    return script


@compiled
def normed(x: Tensor, eps: Tensor, one_nth: float) -> Tensor:
    """RMSNorm (Zhang & Sennrich, 2019) over the last axis, without its weight; `one_nth` is 1 / its size."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps, length, length, value=one_nth).rsqrt_()


@compiled
def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021) on [T, heads, dim]; `sin` carries the sign of the rotated half."""
    return torch.addcmul(x * cos, torch.roll(x, x.size(-1) // 2, -1), sin)


@compiled
def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of two halves (Shazeer, 2020)."""
    half = gate_up.size(-1) // 2
    return F.silu(gate_up.narrow(-1, 0, half)).mul_(gate_up.narrow(-1, half, half))


@compiled
def attend_one_each(
    qk: Tensor,
    value: Tensor,
    rows: Tensor,
    key_rows: Tensor,
    value_rows: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    num_keys: int,
    stale: Tensor | None,
    mask: Tensor | None,
    scaling: float,
) -> Tensor:
    """Paged attention of T sequences with one query token each; see `attention.PagedStep`.

    Rotated queries and keys [T, heads + kv_heads, dim] and values [T, kv_heads, dim] in, outputs
    [T, heads * dim] out. Writes the new keys and values first.
    """
    num_tokens, kv_heads, dim = value.shape
    heads = qk.size(1) - kv_heads
    row_size = kv_heads * dim
    key_rows.index_copy_(0, rows, qk.narrow(1, heads, kv_heads).reshape(num_tokens, row_size))
    value_rows.index_copy_(0, rows, value.reshape(num_tokens, row_size))
    key = keys.index_select(0, blocks).view(num_tokens, -1, kv_heads, dim)
    value = values.index_select(0, blocks).view(num_tokens, -1, kv_heads, dim)
    if stale is not None:
        key.view(-1, row_size).index_fill_(0, stale, 0.0)
        value.view(-1, row_size).index_fill_(0, stale, 0.0)
    out = F.scaled_dot_product_attention(
        qk.narrow(1, 0, heads).view(num_tokens, kv_heads, heads // kv_heads, dim),
        key.narrow(1, 0, num_keys).transpose(1, 2),
        value.narrow(1, 0, num_keys).transpose(1, 2),
        attn_mask=mask,
        scale=scaling,
    )
    return out.reshape(num_tokens, heads * dim)
