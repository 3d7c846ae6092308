"""Does an uncertainty head disturb the network that it is trained with? Fig. 3 of Kirchhof et al. (2024), small.

    python experiments/joint_training.py --data DIR [--set fashion|cifar10] [--epochs 10] [--seeds 3] [--figure PATH]

DIR holds FashionMNIST/raw (the four idx files) or cifar10.npz (train_images, train_labels, test_images, test_labels).
As in the paper, the network is pretrained, on the same images without a head, and then trained on, unfrozen: without a
head, with a head that predicts the loss (eq. 1) or ranks it (eq. 3), each with and without the stop-gradient; without
it also with ten times the weight, where a conflict would show more clearly. All start from the same weights and see the
same batches. After every epoch test accuracy, Recall@1 and R-AUROC of u are measured. Prints a table, and last one JSON
object with the median over seeds and the lowest and highest.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn
from torchvision.datasets import FashionMNIST

import dubito
from dubito.cache.runner import bar
from dubito.heads.joint import joint_loss, with_uncertainty
from dubito.metrics import r_auroc, recall_at_1

VARIANTS: dict[str, tuple[str | None, bool, float]] = {
    "no head": (None, False, 0.0),
    "l2": ("l2", False, 1.0),
    "l2 x 10": ("l2", False, 10.0),
    "l2 + stop": ("l2", True, 1.0),
    "ranking": ("ranking", False, 1.0),
    "ranking x 10": ("ranking", False, 10.0),
    "ranking + stop": ("ranking", True, 1.0),
}
"""The head's loss, whether the stop-gradient stands before it, and the weight of its loss (1 in the paper)."""
BATCH = 128
Half = tuple[Tensor, Tensor]
"""Images and labels."""


def main() -> None:
    """Every variant and seed, a table, a figure, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--set", choices=["fashion", "cifar10"], default="fashion")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--pretrain", type=int, default=3, help="epochs without a head, before")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=10000, help="for training")
    parser.add_argument("--test-images", type=int, default=5000)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)  # so small a network gains nothing from more
    train, test = read(args.data, args.set, args.images, args.test_images)
    curves: dict[str, list[list[dict[str, float]]]] = {name: [] for name in VARIANTS}
    epochs = args.seeds * (args.pretrain + len(VARIANTS) * args.epochs)
    with bar("joint training", epochs, unit="epochs") as advance:
        for seed in range(1, args.seeds + 1):
            start = pretrained(train, args.pretrain, seed)
            advance(args.pretrain)
            for name in VARIANTS:
                curves[name].append([])
                for point in trained(start, name, train, test, epochs=args.epochs, seed=seed):
                    curves[name][-1].append(point)
                    advance(1)
    result = {name: summary(runs) for name, runs in curves.items()}
    print(as_table(result))
    if args.figure:
        draw(curves, args.figure)
    settings = {key: getattr(args, key) for key in ("set", "epochs", "pretrain", "seeds", "images", "test_images")}
    print(json.dumps({"settings": settings, "variants": result}))


def read(data: Path, name: str, images: int, test_images: int) -> tuple[Half, Half]:
    """The first images of both halves, scaled to mean 0 and deviation 1 by those of training."""
    if name == "fashion":
        halves = [FashionMNIST(str(data), train=train) for train in (True, False)]
        pixels = [half.data[:, None].float() for half in halves]
        labels = [half.targets for half in halves]
    else:
        with np.load(data / "cifar10.npz") as file:
            pixels = [
                torch.from_numpy(file[f"{half}_images"]).permute(0, 3, 1, 2).float() for half in ("train", "test")
            ]
            labels = [torch.from_numpy(file[f"{half}_labels"]).long() for half in ("train", "test")]
    mean, deviation = pixels[0].mean(), pixels[0].std()
    x, x_test = ((part - mean) / deviation for part in pixels)
    return (x[:images], labels[0][:images]), (x_test[:test_images], labels[1][:test_images])


def network(channels: int) -> nn.Sequential:
    """Three strided convolutions, a pool, and a linear classifier on 64 features."""
    layers: list[nn.Module] = []
    for before, after in ((channels, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def batches(train: Half, seed: int, epoch: int) -> list[tuple[Tensor, Tensor]]:
    """One epoch, shuffled by seed and epoch alone, so that all variants see the same."""
    order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(1000 * seed + epoch))
    return [(train[0][rows], train[1][rows]) for rows in order.split(BATCH)]


def pretrained(train: Half, epochs: int, seed: int) -> dict[str, Tensor]:
    """The weights that all variants start from."""
    torch.manual_seed(seed)
    module = network(train[0].shape[1])
    step = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for epoch in range(epochs):
        learn(step, lambda x, y: F.cross_entropy(module(x), y), batches(train, seed, 500 + epoch))
    return module.state_dict()


def trained(
    start: dict[str, Tensor], name: str, train: Half, test: Half, *, epochs: int, seed: int
) -> Iterator[dict[str, float]]:
    """Train one variant; yields what it has reached after every epoch."""
    module = network(train[0].shape[1])
    module.load_state_dict(start)
    loss, stop_gradient, weight = VARIANTS[name]
    model = module if loss is None else with_uncertainty(module, stop_gradient=stop_gradient, seed=seed)

    def alone(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def jointly(x: Tensor, y: Tensor) -> Tensor:
        logit, u = model(x)
        return joint_loss(F.cross_entropy(logit, y, reduction="none"), u, loss=loss, weight=weight)

    step = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(step, epochs)
    for epoch in range(epochs):
        learn(step, alone if loss is None else jointly, batches(train, seed, epoch))
        cosine.step()
        yield measured(module, None if loss is None else model.head_module, test)


def learn(step: torch.optim.Optimizer, loss: Callable[[Tensor, Tensor], Tensor], data: list[Half]) -> None:
    """One epoch."""
    for x, y in data:
        step.zero_grad()
        loss(x, y).backward()
        step.step()


def measured(module: nn.Module, head: nn.Module | None, test: Half) -> dict[str, float]:
    """Accuracy and Recall@1 of the network, R-AUROC of the head, on images that neither was trained on."""
    model = dubito.wrap(module)
    z = torch.cat([model.features(x) for x in test[0].split(500)])
    result = {
        "accuracy": float((model.logits(z).argmax(1) == test[1]).float().mean()),
        "recall_at_1": recall_at_1(z, test[1]),
    }
    if head is not None:
        with torch.no_grad():
            result["r_auroc"] = r_auroc(head(z), z, test[1])
    return result


def summary(runs: list[list[dict[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Of every measure the median after each epoch, and the lowest and highest of the last."""
    result = {}
    for key in runs[0][0]:
        values = np.array([[at[key] for at in run] for run in runs])
        result[key] = {
            "median_by_epoch": np.median(values, 0).round(4).tolist(),
            "last_lowest_highest": [round(values[:, -1].min(), 4), round(values[:, -1].max(), 4)],
        }
    return result


def as_table(result: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """Median over seeds after the last epoch, and in brackets after the best one."""
    lines = [f"{'':16}{'accuracy':>18}{'Recall@1':>18}{'R-AUROC':>18}      last epoch (best epoch), median over seeds"]
    for name, keys in result.items():
        cells = []
        for key in ("accuracy", "recall_at_1", "r_auroc"):
            curve = keys[key]["median_by_epoch"] if key in keys else None
            cells.append("-" if curve is None else f"{curve[-1]:.3f} ({max(curve):.3f})")
        lines.append(f"{name:16}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def draw(curves: dict[str, list[list[dict[str, float]]]], to: Path) -> None:
    """One panel a measure: medians as lines, the range of seeds as bands."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (only the figure needs it)
    except ModuleNotFoundError:
        print("No figure: pip install matplotlib")
        return
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for panel, key in zip(panels, ("accuracy", "recall_at_1", "r_auroc"), strict=True):
        for number, (name, runs) in enumerate(curves.items()):
            if key in runs[0][0]:
                values = np.array([[at[key] for at in run] for run in runs])
                epochs, colour = np.arange(1, values.shape[1] + 1), f"C{number}"
                panel.plot(epochs, np.median(values, 0), "--" if "stop" in name else "-", color=colour, label=name)
                panel.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.12)
        panel.set(xlabel="epoch", title=key)
    panels[0].legend(fontsize="small")
    figure.savefig(to, dpi=120)


if __name__ == "__main__":
    main()
