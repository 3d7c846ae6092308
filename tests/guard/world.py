"""A small world for guards: a tiny network, its table with labels that hard images get wrong, and pictures."""

import torch
from torch import nn

import dubito
from dubito.models.wrap import WrappedClassifier
from dubito.table import Table

CLASSES = ["ant", "bee", "cat", "dog", "eel"]


def network(seed: int = 0) -> WrappedClassifier:
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    return dubito.wrap(module, classes=CLASSES, name="tiny")


def inputs(n: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 6, 6, generator=draw) * (0.5 + torch.rand(n, 1, 1, 1, generator=draw))


def labelled(table: Table, seed: int = 1) -> Table:
    """With the model's own answers as labels, except for some of the doubtful images."""
    u = dubito.Entropy().score(table)
    rank = u.argsort().argsort() / len(u)
    wrong = torch.rand(len(u), generator=torch.Generator().manual_seed(seed)) < rank**3 / 2
    return table.extended(label=(table.logit.argmax(1) + wrong.long()) % len(CLASSES))


def blobs(n: int, seed: int = 0, c: int = 4, noise: float = 1.0) -> Table:
    """Arrays alone: features around class means, and logits of them."""
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(c, (n,), generator=draw)
    feature = 2.5 * torch.eye(c, c + 2)[label] + noise * torch.randn(n, c + 2, generator=draw)
    return Table(feature=feature, logit=2 * feature[:, :c], label=label, name="blobs")


def named(table: Table, prefix: str = "") -> Table:
    """With names of files as ids."""
    return table.extended(id=[f"{prefix}{row}.png" for row in range(len(table))])
