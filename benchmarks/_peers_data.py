"""The columns that benchmarks/peers.py measures on, made once and read by every process."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dubito

SEED = 0


@dataclass(frozen=True)
class Columns:
    """Columns of a folder, read when they are used.

    Attributes:
        folder: One .npy file per column.
        queries: How many rows are scored; None for all.
    """

    folder: Path
    queries: int | None = None

    def __getitem__(self, name: str) -> Tensor:
        """Of rows that are scored, the first ones; of those that are learned from ("train_..."), all."""
        values = torch.from_numpy(np.load(self.folder / f"{name}.npy"))
        return values if name.startswith("train_") else values[: self.queries].clone()

    def train(self, *names: str) -> dubito.Table:
        """A table of columns to learn from."""
        return dubito.Table(**{name: self[f"train_{name}"] for name in names})

    def test(self, *names: str) -> dubito.Table:
        """A table of columns to score."""
        return dubito.Table(**{name: self[name] for name in names})

    @cached_property
    def head(self) -> torch.nn.Linear:
        """The layer that made the logits."""
        weight, bias = self["train_weight"], self["train_bias"]
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight.data, layer.bias.data = weight, bias
        return layer.requires_grad_(False)


def write_columns(folder: Path, *, rows: int, classes: int, dims: int, million: int, seed: int = SEED) -> None:
    """Made-up columns of a network: non-negative features around the centre of their class, and a linear head.

    A tenth of the scored rows are out-of-distribution: of classes that the head does not have. `million_...` are
    scores and whether a row is positive; `noisy_label` are labels of which one in twenty is wrong.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(2 * classes, dims)).astype(np.float32)
    # Farther apart the more classes there are, so that about nine in ten images are predicted right.
    strength = np.float32((3.2 + 0.45 * np.log(classes)) / np.sqrt(dims))
    known = centres[:classes] - centres[:classes].mean(axis=0)
    weight = 1.6 * strength * known
    bias = -0.25 * strength * np.einsum("cd,cd->c", weight, known)

    def features(label: np.ndarray) -> np.ndarray:
        values = rng.normal(scale=0.9, size=(len(label), dims)).astype(np.float32)
        values += strength * centres[label]
        return np.maximum(values, 0, out=values)

    columns: dict[str, np.ndarray] = {"train_weight": weight, "train_bias": bias}
    for part in ("train_", ""):
        label = rng.permutation(np.arange(rows) % classes)
        shown = label.copy()
        if not part:
            ood = rng.random(rows) < 0.1
            shown[ood] += classes
            columns["ood"] = ood
        feature = features(shown)
        columns |= {f"{part}feature": feature, f"{part}label": label, f"{part}logit": feature @ weight.T + bias}
    wrong = rng.random(rows) < 0.05
    label = columns["train_label"]
    columns["wrong"] = wrong
    columns["noisy_label"] = np.where(wrong, (label + rng.integers(1, classes, rows)) % classes, label)
    positive = rng.random(million) < 0.2
    columns |= {
        "million_score": rng.beta(2 + 1.5 * positive, 3).astype(np.float32),
        "million_positive": positive,
    }
    for name, values in columns.items():
        np.save(folder / f"{name}.npy", values)


def write_votes(folder: Path, depth: int, *, data: Path, images: Path) -> None:
    """CIFAR-10's first 5,000 test images by a ResNet: logits, labels, and whether most people contradict these."""
    import sys  # noqa: PLC0415

    sys.path.append(str(Path(__file__).parents[1] / "experiments"))
    from _resnet_cifar import resnet  # type: ignore[import-not-found]  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    votes = np.load(data / "cifar10h" / "cifar10h-counts-first5000.npy")
    with np.load(images) as arrays:
        pictures, label = arrays["test_images"][: len(votes)], arrays["test_labels"][: len(votes)].astype(np.int64)
    network = resnet(depth, data / "cifar10_resnets")
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = ((torch.from_numpy(pictures).float() / 255 - mean) / std).permute(0, 3, 1, 2)
    with torch.inference_mode():
        logit = torch.cat([network(block) for block in x.split(250)])
    columns: dict[str, Any] = {
        "train_logit": logit.numpy(),
        "noisy_label": label,
        "wrong": votes.argmax(axis=1) != label,
    }
    for name, values in columns.items():
        np.save(folder / f"{name}.npy", values)


def write_photos(folder: Path, *, data: Path) -> None:
    """2,000 photographs of ImageNet's validation images by EfficientNet-Lite0: logits and labels."""
    folder.mkdir(parents=True, exist_ok=True)
    source = data / "imagenet_val_dev2000"
    images = dubito.open_images(source / "images256.zip", source / "labels.csv")
    table = dubito.extract("pypi:efficientnet_lite0", images, folder / "cache", label_space="model")
    np.save(folder / "train_logit.npy", table.whole("logit").float().numpy())
    np.save(folder / "noisy_label.npy", table.label.numpy())
