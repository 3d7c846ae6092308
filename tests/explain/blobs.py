"""Tables of clusters, scores that are easy to follow, and one diagnosis of them."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from dubito.explain.diagnosis import Diagnosis, diagnose
from dubito.table import Table
from dubito.types import Score

QUICK = {"resamples": 40}


UNSURE, SURE = [5.0, 5.0, -100.0], [3.0, 0.0, 0.0]
"""H = log 2 and 0.37, but of 0.1 x logits log 2 and 1.09: the first is more uncertain, then less."""


@dataclass
class First(Score):
    """The first feature, as it is."""

    name = "first"
    kind = "epistemic"
    needs = ("feature",)

    def score_batch(self, batch: Table) -> torch.Tensor:
        return batch.feature[:, 0]


@dataclass
class Watched(Score):
    """The first feature again, after having seen others."""

    fits: ClassVar[list[list[float]]] = []

    name = "watched"
    kind = "epistemic"
    needs = ("feature",)
    learns_from = ("feature",)
    learned = ("seen_",)

    def learn(self, table: Table) -> None:
        self.seen_ = len(table)
        Watched.fits.append(table.feature[:, 0].tolist())

    def score_batch(self, batch: Table) -> torch.Tensor:
        return batch.feature[:, 0]


def blobs(n: int, *, scale: float = 6.0, seed: int = 0, name: str = "table in memory", classes: int = 4) -> Table:
    """Features around the weights of their classes; the smaller the scale, the less so."""
    weight = torch.nn.functional.normalize(torch.randn(classes, 8, generator=torch.Generator().manual_seed(99)), dim=1)
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % classes
    feature = scale * weight[label] + torch.randn(n, 8, generator=draw)
    return Table(feature=feature, logit=3 * feature @ weight.T, label=label, name=name)


def example() -> Diagnosis:
    """Two OOD sets, one far from the in-distribution images and one near."""
    ood = {"far": blobs(150, scale=0.0, seed=2), "near": blobs(90, scale=4.0, seed=3)}
    return diagnose(blobs(200, seed=1, name="caches/mine"), ood, train=blobs(400), resamples=200)
