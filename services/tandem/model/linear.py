"""Linear layers laid out for the CPU that runs them."""

from __future__ import annotations

from torch import nn

from tandem.config.choices import WeightFormat


def pack(module: nn.Module, weights: WeightFormat) -> None:
    """Replace every linear layer of `module`, in place."""
