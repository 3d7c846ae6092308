"""The MLPs of Kirsch (2024), appendix A.1, trained one after the other and kept on disk: a kill costs one of them.

    784 - 64 w - 32 w - 10,  ReLU and dropout of 0.1 after each hidden layer,  w the width factor

The paper trains with SGD, learning rate 0.01, batches of 128, for 100 epochs. Here an epoch of the widest ensemble
takes minutes. So fewer epochs have a higher rate, and a momentum of 0.9, such that the way travelled is the same,

    rate / (1 - momentum) * epochs = 0.01 * 100

and products of matrices are in bfloat16.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.datasets import MNIST, FashionMNIST

from dubito.cache.runner import bar, kept_memory
from dubito.metrics import auroc

BATCH, MOMENTUM, DROPOUT = 128, 0.9, 0.1
WAY = 0.01 * 100
"""Learning rate times epochs in the paper."""
SETS = {"MNIST": MNIST, "Fashion-MNIST": FashionMNIST}


def mlp(width: int, *, seed: int = 0) -> nn.Sequential:
    """Untrained."""
    torch.manual_seed(seed)
    first, second = 64 * width, 32 * width
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, first), nn.ReLU(), nn.Dropout(DROPOUT)),
        *(nn.Linear(first, second), nn.ReLU(), nn.Dropout(DROPOUT)),
        nn.Linear(second, 10),
    )


def read(data: Path, name: str, *, train: bool, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 28, 28) between 0 and 1, and labels (n), as torchvision keeps them on disk."""
    half = SETS[name](str(data), train=train)
    return half.data[:limit, None].float() / 255, half.targets[:limit]


def trained(module: nn.Sequential, x: Tensor, y: Tensor, epochs: int, *, seed: int, title: str) -> nn.Sequential:
    """The same module after so many epochs, in eval mode; the order of images depends on seed and epoch alone."""
    rate = WAY / epochs * (1 - MOMENTUM)
    step = torch.optim.SGD(module.parameters(), lr=rate, momentum=MOMENTUM, fused=True)
    torch.manual_seed(seed)  # of the dropout
    module.train()
    with kept_memory(), bar(title, epochs * len(x)) as advance:
        for epoch in range(epochs):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
            for rows in order.split(BATCH):
                with torch.autocast("cpu", torch.bfloat16):
                    logits = module(x[rows])
                loss = F.cross_entropy(logits.float(), y[rows])
                step.zero_grad()
                loss.backward()
                step.step()
                advance(len(rows))
    return module.eval()


def member(folder: Path, width: int, seed: int, train: tuple[Tensor, Tensor], epochs: int) -> nn.Sequential:
    """From the folder if it is there, otherwise trained and put there."""
    path, module = folder / f"mlp_x{width}_epochs{epochs}_seed{seed}.safetensors", mlp(width, seed=seed)
    if path.exists():
        module.load_state_dict(load_file(path))
        return module.eval()
    module = trained(module, *train, epochs, seed=seed, title=f"width x{width}, member {seed}")
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file(module.state_dict(), part)
    part.rename(path)
    return module


@torch.no_grad()
def logits_of(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """(m, n, c), in blocks of rows."""
    return torch.stack([torch.cat([module(part) for part in x.split(1000)]) for module in modules])


def apart(in_distribution: Tensor, ood: Tensor) -> float:
    """How well an uncertainty tells OOD images."""
    return auroc(
        torch.cat([in_distribution, ood]), torch.arange(len(in_distribution) + len(ood)) >= len(in_distribution)
    )
