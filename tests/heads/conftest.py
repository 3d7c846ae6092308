"""Synthetic tables whose losses can be learned from their features, and a small network to be trained with a head."""

import torch
from torch import Tensor, nn

from dubito.heads import Training, UncertaintyHead
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


def train_head(table: Table, *, held_out=None, folder=None, progress=False, **settings) -> Training:
    """One head with these settings, trained."""
    return UncertaintyHead(**settings).train(table, held_out=held_out, folder=folder, progress=progress)


class Cnn(nn.Module):
    """BatchNorm, whose buffers move, and dropout, which draws random numbers."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2))
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.body(x).mean((2, 3))))


def cnn() -> Cnn:
    """Always with the same weights."""
    torch.manual_seed(0)
    return Cnn()


def batches(size: int, steps: int = 3, n: int = 6) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 3, size, size, generator=draw), torch.randint(5, (n,), generator=draw)) for _ in range(steps)
    ]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
