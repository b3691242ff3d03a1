"""Linear layers laid out for the CPU that runs them: prepacked oneDNN weights, or int8 ones.

Packing gives oneDNN the blocked layout that it would otherwise make of the weights in every call;
measured on two AVX2 cores it is worth 1.5 to 2 times at batches of 1 to 16.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tandem.config.choices import WeightFormat

_PACKED_FOR_ROWS = 16
"""The batch that the blocked layout is chosen for. It is as good for one row, and no worse for 512."""

# FBGEMM's AVX2 kernels add pairs of products in 16 bits: activations of 7 bits can't overflow them.
_INT8_STEPS = 63.0
_INT8_ZERO = 64


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` in float32, by oneDNN. Holds the only copy of the packed weight.

    TorchScript must be able to compile it: see `compiled`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + forward(x)``, in one operation."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, residual, self._weight, self._bias, "add")
        return out


class Int8Linear(nn.Module):
    """The same with int8 weights (a scale per output) and 7-bit activations (a scale per row), by FBGEMM.

    Scales per row keep each sequence's result independent of the others in its batch, and of the
    outliers in them. After LLM.int8() (Dettmers et al., 2022), without its outlier columns.
    TorchScript must be able to compile it: see `compiled`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        scales = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127.0
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        with warnings.catch_warnings():
            # torch means to drop these tensors after the release that we are pinned to.
            warnings.simplefilter("ignore", UserWarning)
            quantized = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
        self._weight = torch.ops.quantized.linear_prepack(quantized, None)
        self._bias = bias
        self._one_step = 1.0 / _INT8_STEPS
        self._zero = _INT8_ZERO

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        # A row of zeros must not become a row of NaN.
        scale = torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True).clamp_min_(1e-30)
        out: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / scale, self._one_step, self._zero, self._weight
        )
        out.mul_(scale)
        return out if self._bias is None else out.add_(self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + forward(x)``."""
        return self.forward(x).add_(residual)


CpuLinear = PackedLinear | Int8Linear


def make_linear(
    layers: Sequence[nn.Linear], weights: WeightFormat, *, input_scale: Tensor | None = None
) -> CpuLinear:
    """One layer that computes what `layers` do on the same input, their outputs side by side.

    `input_scale` [in] multiplies the input first, such as the weight of a norm.
    """
    weight = torch.cat(tuple(layer.weight.detach() for layer in layers))
    if input_scale is not None:
        weight = weight * input_scale.detach()
    biases = [torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers]
    has_bias = any(layer.bias is not None for layer in layers)
    bias = torch.cat(tuple(biases)).detach() if has_bias else None
    return PackedLinear(weight, bias) if weights is WeightFormat.FULL else Int8Linear(weight, bias)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN and FBGEMM take this weight: float32 on a CPU."""
    return weight.dtype is torch.float32 and weight.device.type == "cpu"


def pack_linears(module: nn.Module, weights: WeightFormat) -> None:
    """Replace every linear layer inside `module`, in place, one by one so that memory stays flat."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            if can_pack(child.weight):
                setattr(module, name, make_linear([child], weights))
        else:
            pack_linears(child, weights)
