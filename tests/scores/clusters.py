"""A table of clusters that densities are fitted on."""

import torch

from dubito.table import Table


def data(n: int = 300, d: int = 6, c: int = 3, *, seed: int = 0, name: str = "table in memory") -> Table:
    """Positive features around three means, with labels and logits."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % c
    means = 6 + 2 * torch.randn(c, d, generator=torch.Generator().manual_seed(99))
    feature = (means[label] + torch.randn(n, d, generator=generator)).abs()
    return Table(feature=feature, label=label, logit=torch.eye(c)[label], name=name)
