"""Does an uncertainty rise on images from elsewhere? AUROC of foreign against known images, per data set and pooled.

    AUROC = Pr(u(foreign) > u(known)) + Pr(equal) / 2        one half: nothing tells them apart

Kirchhof et al., Pretrained Visual Uncertainties (2024), section 4.5 and Figure 8, pool CUB, CARS and SOP into one
value, 0.503, and read it as "no epistemic uncertainty". Pooled, opposite values cancel: recomputed from the authors'
files, the three are 0.15, 0.53 and 0.47. So here every data set has its own value, and where the pooled one hides them,
it is said. Pooled are all foreign images as they are; a larger data set weighs more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.errors import TableError
from dubito.evaluate.uncertainties import check_fitted_scores, uncertainties
from dubito.metrics import Interval, auroc, interval
from dubito.result import aligned, cell
from dubito.table import Table
from dubito.types import Json, Score

PUBLISHED_POOLED = 0.503
"""The pooled value of the paper's Figure 8, ViT-Base."""


def ood_auroc_by_dataset(
    scores: Mapping[str, Score],
    known: Table,
    foreign: Mapping[str, Table],
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> "Shift":
    """AUROC of every score for each foreign table against the known one, and for all of them together.

    Args:
        scores: Fitted scores by name.
        known: Images like those that the model or the head was trained on, but not the very same.
        foreign: By data set, images from elsewhere.
        confidence: Of the bootstrap intervals.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.
    """
    check_fitted_scores(scores, by="ood_auroc_by_dataset")
    if not foreign:
        raise TableError(
            "ood_auroc_by_dataset needs at least one foreign table; got none. Give some by name: {'cub200': table}."
        )
    bootstrap = partial(interval, auroc, confidence=confidence, resamples=resamples, seed=seed)
    at_home = uncertainties(scores, known, by=f"ood_auroc_by_dataset ({known.name})")
    away = {name: uncertainties(scores, table, by=f"ood_auroc_by_dataset ({name})") for name, table in foreign.items()}
    by_set: dict[str, dict[str, Interval]] = {}
    pooled: dict[str, Interval] = {}
    for score, u in at_home.items():
        others = {name: rows[score] for name, rows in away.items()}
        by_set[score] = {name: bootstrap(*_against(u, other)) for name, other in others.items()}
        pooled[score] = bootstrap(*_against(u, torch.cat(list(others.values()))))
    return Shift(known.name, len(known), {name: len(table) for name, table in foreign.items()}, by_set, pooled)


@final
@dataclass(frozen=True)
class Shift:
    """How far each score tells foreign images from known ones: print it, or take it as JSON.

    Attributes:
        known: The name of the known table.
        known_rows: How many images it has.
        rows: By foreign data set, how many images.
        by_set: By score and data set; above one half, the foreign images are the more uncertain ones.
        pooled: By score, all foreign images together.
    """

    known: str
    known_rows: int
    rows: dict[str, int]
    by_set: dict[str, dict[str, Interval]]
    pooled: dict[str, Interval]

    def findings(self) -> list[str]:
        """A sentence for each score whose pooled value hides data sets that lie on opposite sides of one half."""
        return [sentence for score in self.by_set if (sentence := self._finding(score))]

    def to_json(self) -> Json:
        """Plain numbers."""
        return {
            "known": self.known,
            "known_rows": self.known_rows,
            "rows": self.rows,
            "scores": {
                score: {name: value._asdict() for name, value in row.items()} | {"pooled": self.pooled[score]._asdict()}
                for score, row in self.by_set.items()
            },
            "findings": self.findings(),
            "published_pooled": PUBLISHED_POOLED,
        }

    def lines(self) -> list[list[str]]:
        """A header and one line a score, as text cells."""
        body = [
            [score, *(cell(value) for value in row.values()), cell(self.pooled[score])]
            for score, row in self.by_set.items()
        ]
        return [["score", *self.rows, "pooled"], *body]

    def __str__(self) -> str:
        title = f"AUROC of foreign images against {self.known} ({self.known_rows} images)"
        return "\n".join([title, *aligned(self.lines()), *self.findings()])

    def _finding(self, score: str) -> str:
        """By intervals: a value that may be one half lies on neither side."""
        below = {name: value.value for name, value in self.by_set[score].items() if value.high < 0.5}
        above = {name: value.value for name, value in self.by_set[score].items() if value.low > 0.5}
        if not below or not above:
            return ""
        return (
            f"{score}: the pooled {self.pooled[score].value:.3f} hides opposite values. Less uncertain than the known "
            f"images: {_listed(below)}; more uncertain: {_listed(above)}."
        )


def _against(known: Float[Tensor, "n"], foreign: Float[Tensor, "m"]) -> tuple[Tensor, Tensor]:
    u = torch.cat([known, foreign])
    return u, torch.arange(len(u)) >= len(known)


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())
