"""Does an uncertainty rise on out-of-distribution images? AUROC of OOD against in-distribution images, by data set.

    AUROC = Pr(u(ood) > u(in-distribution)) + Pr(equal) / 2; one half: u does not rise

Kirchhof et al., Pretrained Visual Uncertainties (2024), section 4.5 and Figure 8, pool CUB, CARS and SOP as OOD images
into one value, 0.503, and conclude that there is no epistemic uncertainty. Pooled, opposite values cancel: recomputed
from the authors' files, the three are 0.15, 0.53 and 0.47. So here every data set has a value of its own, and a finding
says where the pooled value hides opposite ones. Intervals are bootstraps over images.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from dubito.errors import TableError
from dubito.evaluate.evaluate import check_fitted_scores, uncertainties
from dubito.metrics import Interval, auroc, interval, join_ood
from dubito.result import Axes, Result, axes, plot_intervals
from dubito.table import Table
from dubito.types import Json, Score
from dubito.validate import check_bootstrap, check_rows, check_same_model


def ood_auroc_by_dataset(
    scores: Mapping[str, Score],
    in_distribution: Table,
    ood: Mapping[str, Table],
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> "OodAurocByDataset":
    """AUROC of every score for each OOD table against the in-distribution one, and for all of them pooled.

    Args:
        scores: Fitted scores by name.
        in_distribution: Images like those that the model or the head was trained on, but not the very same.
        ood: Out-of-distribution images, by data set.
        confidence: Confidence of the bootstrap intervals.
        resamples: Number of bootstrap resamples.
        seed: Seed of the bootstrap.
    """
    check_bootstrap(by="ood_auroc_by_dataset", confidence=confidence, resamples=resamples, seed=seed)
    check_fitted_scores(scores, by="ood_auroc_by_dataset")
    if not ood:
        raise TableError("ood_auroc_by_dataset needs at least one OOD table; got none. Pass {'cub200': table, ...}.")
    for name, table in ood.items():
        check_rows(table, by=f"ood_auroc_by_dataset ({name})")
        check_same_model(in_distribution, {f"ood '{name}'": table}, by="ood_auroc_by_dataset")
    bootstrap = partial(interval, auroc, confidence=confidence, resamples=resamples, seed=seed)
    u_id = uncertainties(scores, in_distribution, by=f"ood_auroc_by_dataset ({in_distribution.name})")
    u_ood = {name: uncertainties(scores, table, by=f"ood_auroc_by_dataset ({name})") for name, table in ood.items()}
    by_dataset: dict[str, dict[str, Interval]] = {}
    pooled: dict[str, Interval] = {}
    for score, u in u_id.items():
        by_dataset[score] = {name: bootstrap(*join_ood(u, values[score])) for name, values in u_ood.items()}
        pooled[score] = bootstrap(*join_ood(u, torch.cat([values[score] for values in u_ood.values()])))
    rows = {name: len(table) for name, table in ood.items()}
    return OodAurocByDataset(in_distribution.name, len(in_distribution), rows, by_dataset, pooled)


@final
@dataclass(frozen=True)
class OodAurocByDataset(Result):
    """How well each score separates OOD from in-distribution images.

    Attributes:
        in_distribution: Name of the in-distribution table.
        in_distribution_rows: Number of its images.
        rows: Number of images, by OOD data set.
        by_dataset: AUROC by score and data set; above one half, the OOD images are the more uncertain ones.
        pooled: AUROC by score, all OOD images together as they are: a larger data set weighs more.
    """

    in_distribution: str
    in_distribution_rows: int
    rows: dict[str, int]
    by_dataset: dict[str, dict[str, Interval]]
    pooled: dict[str, Interval]

    def title(self) -> str:
        """What is separated from what."""
        return f"AUROC of OOD images against {self.in_distribution} ({self.in_distribution_rows} images)"

    def records(self) -> list[dict[str, Any]]:
        """One row per score."""
        return [{"score": score, **row, "pooled": self.pooled[score]} for score, row in self.by_dataset.items()]

    def heading(self, key: str) -> str:
        """Data sets keep their names."""
        return key

    def findings(self) -> list[str]:
        """A sentence for each score whose pooled value hides intervals on both sides of one half."""
        sentences = []
        for score, row in self.by_dataset.items():
            below = ", ".join(f"{name} {one.value:.3f}" for name, one in row.items() if one.high < 0.5)
            above = ", ".join(f"{name} {one.value:.3f}" for name, one in row.items() if one.low > 0.5)
            if below and above:
                sentences.append(
                    f"{score}: the pooled {self.pooled[score].value:.3f} hides opposite values. Less uncertain than "
                    f"the in-distribution images: {below}; more uncertain: {above}."
                )
        return sentences

    def to_dict(self) -> Json:
        """Everything as plain values, with the published pooled value of Figure 8, ViT-Base."""
        return {**super().to_dict(), "findings": self.findings(), "published_pooled": 0.503}

    def plot(self, ax: Axes | None = None) -> Axes:
        """The AUROC of every data set and pooled, one colour per score."""
        rows = {score: {**row, "pooled": self.pooled[score]} for score, row in self.by_dataset.items()}
        picture = plot_intervals(axes(ax), rows)
        picture.axvline(0.5, color="grey", linestyle="--")
        picture.set(xlabel=f"AUROC against {self.in_distribution}")
        return picture
