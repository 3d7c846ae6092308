"""Synthetic tables whose losses can be learned from their features."""

import torch

from dubito.table import Table

collect_ignore = ["child.py"]


def learnable(n: int = 400, d: int = 8, seed: int = 0) -> Table:
    """The loss is a smooth function of two features; labels are classes that lie in clusters."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (n,), generator=generator)
    feature = torch.randn(n, d, generator=generator)
    feature[:, 2:6] += 1.5 * torch.eye(4)[label]
    loss = torch.nn.functional.softplus(2 * feature[:, 0] + feature[:, 1])
    return Table(feature=feature, loss=loss, label=label)
