"""The small networks of Pearce et al. (2021), appendix C, MNIST and Fashion-MNIST for them, and one way to train them.

The paper gives layers and epochs. Batch size, optimiser and dropout rate are not in its text; ours are 128, Adam with a
learning rate of 0.001, and 0.5. Convolutions have no padding, except in VGG blocks, where four would not fit otherwise.
Pixels are between 0 and 1.
"""

import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn
from torchvision.datasets import MNIST, FashionMNIST

from dubito.cache.runner import bar, kept_memory
from dubito.metrics import accuracy, auroc, nll
from dubito.scores.softmax import entropy, max_probability

BATCH, LR = 128, 1e-3
SETS = {"MNIST": MNIST, "Fashion-MNIST": FashionMNIST}
Half = tuple[Tensor, Tensor]
"""Images (n, 1, h, w) and labels (n)."""


def lenet(width: int = 16, classes: int = 3, *, activation: type[nn.Module] = nn.ReLU, seed: int = 0) -> nn.Sequential:
    """C.1 to C.4.1: three convolutions, two pools, H features, K classes; the last layer is a linear one."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5), activation()),
        *(nn.Conv2d(32, 64, 3), activation(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3), activation(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128 * 4 * 4, width), activation()),
        nn.Linear(width, classes),
    )


def nine_by_nine(classes: int = 10, *, seed: int = 0) -> nn.Sequential:
    """C.4.2: for images of 9 x 9 pixels."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 2), nn.ReLU(), nn.Flatten()),
        nn.Linear(64, classes),
    )


def vgg(blocks: int, classes: int = 10, *, seed: int = 0) -> nn.Sequential:
    """C.4.3: one to four blocks of two convolutions, a pool and a batchnorm; then dropout and 512 features."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    before = 1
    for width in (32, 64, 128, 128)[:blocks]:
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(width)]
        before = width
    side = 28 >> blocks
    layers += [nn.Flatten(), nn.Dropout(0.5), nn.Linear(before * side**2, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, classes))


def read(data: Path, name: str, *, train: bool, limit: int | None = None) -> Half:
    """The first images of one half of 'MNIST' or 'Fashion-MNIST', as torchvision keeps them on disk."""
    half = SETS[name](str(data), train=train)
    return half.data[:limit, None].float() / 255, half.targets[:limit]


def trained(module: nn.Sequential, train: Half, epochs: int, *, seed: int, title: str = "train") -> nn.Sequential:
    """The same module after so many epochs of cross-entropy, in eval mode; batches depend on seed and epoch alone."""
    learning = [weight for weight in module.parameters() if weight.requires_grad]
    step = torch.optim.Adam(learning, lr=LR)
    x, y = train
    module.train()
    with kept_memory(), bar(title, epochs * len(x)) as advance:
        for epoch in range(epochs):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
            for rows in order.split(BATCH):
                loss = F.cross_entropy(module(x[rows]), y[rows])
                step.zero_grad()
                loss.backward()
                step.step()
                advance(len(rows))
    return module.eval()


@torch.no_grad()
def logits_of(module: nn.Module, x: Tensor) -> Tensor:
    """In blocks."""
    return torch.cat([module(part) for part in x.split(500)])


def measured(in_distribution: Tensor, label: Tensor, ood: Tensor) -> dict[str, float]:
    """Accuracy and cross-entropy of in-distribution images, and how well uncertainty detects OOD ones, from logits."""
    positive = torch.arange(len(in_distribution) + len(ood)) >= len(in_distribution)
    both = torch.cat([in_distribution, ood])
    return {
        "accuracy": accuracy(in_distribution, label),
        "cross_entropy": nll(in_distribution, label),
        "max_probability": auroc(max_probability(both), positive),
        "entropy": auroc(entropy(both), positive),
    }


def mean_and_error(values: list[float]) -> dict[str, float]:
    """Over runs; one run has no standard error, which is told as 0."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {"mean": round(statistics.mean(values), 4), "error": round(error, 4)}
