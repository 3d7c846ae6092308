"""How does an uncertainty do on data sets that nobody trained for? R-AUROC of every score on each, without refitting.

    Recall@1 = share of images whose nearest other image has the same class
    R-AUROC  = AUROC of u against "the nearest other image has another class"

Kirchhof et al., Pretrained Visual Uncertainties (2024), sections 4.1, 4.2 and appendix B (Table 2), which reports the
entropy of the classifier next to the head. Classes may be the data set's own: only whether two labels are equal counts.
Neighbours are searched once per data set, for all scores. Intervals are bootstraps over images; their neighbours stay.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, final

from dubito.errors import TableError
from dubito.evaluate.evaluate import check_fitted_scores, has_both, uncertainties
from dubito.metrics import Interval, MedianSpread, auroc, interval, mean, median_spread, neighbour_matches
from dubito.result import Axes, Result, axes, plain, plot_intervals
from dubito.scores import Entropy
from dubito.table import Table
from dubito.types import Json, Score
from dubito.validate import check_bootstrap, check_choice


class Published(NamedTuple):
    """A line of the paper's Table 2, R-AUROC of ViT-Base: pretrained uncertainties, and the classifier's entropy."""

    head: MedianSpread
    entropy: float


PUBLISHED: Mapping[str, Published] = MappingProxyType(
    {
        "imagenet21k": Published(MedianSpread(0.791, 0.001), 0.798),
        "caltech101": Published(MedianSpread(0.758, 0.006), 0.808),
        "pets": Published(MedianSpread(0.740, 0.008), 0.724),
        "cifar10": Published(MedianSpread(0.739, 0.002), 0.716),
        "cifar100": Published(MedianSpread(0.706, 0.002), 0.696),
        "sun397": Published(MedianSpread(0.691, 0.002), 0.697),
        "flowers102": Published(MedianSpread(0.659, 0.009), 0.679),
        "dtd": Published(MedianSpread(0.649, 0.006), 0.610),
        "cub200": Published(MedianSpread(0.626, 0.008), 0.608),
        "sop": Published(MedianSpread(0.607, 0.001), 0.591),
        "cars196": Published(MedianSpread(0.589, 0.003), 0.554),
        "treeversity1": Published(MedianSpread(0.560, 0.003), 0.565),
        "svhn": Published(MedianSpread(0.495, 0.005), 0.524),
    }
)
"""Table 2 by the names of `dubito.protocols.benchmarks`; the head was trained on imagenet21k."""


def transfer(
    scores: Mapping[str, Score],
    tables: Mapping[str, Table],
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> "Transfer":
    """R-AUROC of every score on every labelled table, and of the classifier's entropy where there are logits.

    Args:
        scores: Fitted scores by name; several seeds of one head have names of their own.
        tables: Tables with features and labels, by data set; names in PUBLISHED are shown with the values of Table 2.
        confidence: Confidence of the bootstrap intervals.
        resamples: Number of bootstrap resamples.
        seed: Seed of the bootstrap.

    >>> table = Table(feature=[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], logit=[[2.0, 0.0], [1.0, 0.0], [0.0, 0.1]],
    ...               label=[7, 7, 8], label_space="own")
    >>> transfer({"entropy": Entropy()}, {"tiny": table}, resamples=20).r_auroc["entropy"]["tiny"].value
    1.0
    """
    check_bootstrap(by="transfer", confidence=confidence, resamples=resamples, seed=seed)
    check_fitted_scores(scores, by="transfer")
    if not tables:
        raise TableError("transfer needs at least one table; got none. Pass some by name: {'cub200': table}.")
    bootstrap = partial(interval, confidence=confidence, resamples=resamples, seed=seed)
    result = Transfer({name: len(table) for name, table in tables.items()}, {}, {})
    for name, table in tables.items():
        table.require("feature", "label", by=f"transfer ({name})")
        near = neighbour_matches(table.column("feature"), table.label)
        result.recall_at_1[name] = bootstrap(mean, near)
        for score, u in uncertainties(scores, table, by=f"transfer ({name})", baselines=(Entropy.name,)).items():
            row = result.r_auroc.setdefault(score, {})
            if has_both(near):
                row[name] = bootstrap(auroc, u, ~near)
    return result


@final
@dataclass(frozen=True)
class Transfer(Result):
    """How scores do on data sets that nobody trained for.

    Attributes:
        rows: Number of images, by data set.
        recall_at_1: Recall@1 of the model's features, by data set; the same for every score.
        r_auroc: R-AUROC by score and data set; there is none where neighbours are all right or all wrong.
    """

    rows: dict[str, int]
    recall_at_1: dict[str, Interval]
    r_auroc: dict[str, dict[str, Interval]]

    titles: ClassVar[Mapping[str, str]] = {
        "recall_at_1": "Recall@1",
        "published_head": "ViT-Base head",
        "published_entropy": "its entropy",
    }

    def __getitem__(self, score: str) -> dict[str, Interval]:
        check_choice(score, self.r_auroc, by="Transfer", what="score")
        return self.r_auroc[score]

    def mean(self, score: str) -> float | None:
        """The mean R-AUROC over the data sets, each counting the same; None unless every one has a value."""
        row = self.r_auroc[score]
        return statistics.fmean(row[name].value for name in self.rows) if set(row) == set(self.rows) else None

    def over_seeds(self, scores: Sequence[str]) -> dict[str, MedianSpread]:
        """By data set and for their mean: median and distance over scores that are seeds of one head."""
        shared = [name for name in self.rows if all(name in self.r_auroc[score] for score in scores)]
        by_dataset = {name: median_spread([self.r_auroc[score][name].value for score in scores]) for name in shared}
        means = [mean for score in scores if (mean := self.mean(score)) is not None]
        return by_dataset | ({"mean": median_spread(means)} if len(means) == len(scores) else {})

    def title(self) -> str:
        """What is compared."""
        return "R-AUROC by score, zero-shot"

    def records(self) -> list[dict[str, Any]]:
        """One row per data set and their mean, with the values of Table 2 for those that it has."""
        published = {name: PUBLISHED.get(name) for name in self.rows}
        records: list[dict[str, Any]] = []
        for name, line in published.items():
            records.append({"data_set": name, "images": self.rows[name], "recall_at_1": self.recall_at_1[name]})
            records[-1] |= {score: row.get(name) for score, row in self.r_auroc.items()}
            if any(published.values()):
                records[-1] |= {"published_head": line and str(line.head), "published_entropy": line and line.entropy}
        recall = statistics.fmean(value.value for value in self.recall_at_1.values())
        mean = {"data_set": "mean", "images": sum(self.rows.values()), "recall_at_1": recall}
        return [*records, mean | {score: self.mean(score) for score in self.r_auroc}]

    def heading(self, key: str) -> str:
        """Scores keep their names."""
        return key if key in self.r_auroc else super().heading(key)

    def to_dict(self) -> Json:
        """Everything as plain values, with means and the values of Table 2."""
        means = {score: self.mean(score) for score in self.r_auroc}
        published = {name: plain(PUBLISHED[name]) for name in self.rows if name in PUBLISHED}
        return {**super().to_dict(), "mean": means, "published": published}

    def plot(self, ax: Axes | None = None) -> Axes:
        """The R-AUROC on every data set, one colour per score."""
        picture = plot_intervals(axes(ax), self.r_auroc)
        picture.axvline(0.5, color="grey", linestyle="--")
        picture.set(xlabel="R-AUROC")
        return picture
