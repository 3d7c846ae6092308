"""Tables with a known last layer: features of a ReLU, and logits that are linear in them."""

import torch
from torch import Tensor

from dubito.table import Table

D, C = 10, 5


def layer() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(9)
    weight = torch.randn(C, D, generator=draw, dtype=torch.float64)
    return weight, torch.randn(C, generator=draw, dtype=torch.float64)


def linear(n: int = 300, seed: int = 0, *, signed: bool = False, lift: float = 3.0) -> Table:
    """Logits W z + b + lift; `lift` keeps the largest ones positive."""
    draw = torch.Generator().manual_seed(seed)
    spread = torch.arange(1, D + 1, dtype=torch.float64) / 4
    z = torch.randn(n, D, generator=draw, dtype=torch.float64) * spread + 0.5
    z = z if signed else z.relu()
    weight, bias = layer()
    return Table(feature=z, logit=z @ weight.T + bias + lift)
