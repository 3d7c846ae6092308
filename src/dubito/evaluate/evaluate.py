"""How good are these uncertainties on this table? Every score by every metric that the columns allow, with intervals.

    error AUROC, AURC, excess AURC, AUGRC   are wrong predictions more uncertain?         needs logit, label
    R-AUROC                                 are bad nearest neighbours more uncertain?    needs feature, label
    OOD AUROC, AP, FPR95                    are out-of-distribution images?               needs a second table
    µs / image                              the cost of the score, given its columns

The model's own accuracy, NLL, Brier score, ECE and Recall@1 are reported with them. For `Evaluation.plot`, small
summaries are kept: the reliability diagram, a risk-coverage curve per score, and histograms in and out of distribution.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dubito import metrics as measures
from dubito.errors import TableError, ValueRangeError
from dubito.evaluate.uncertainties import has_both, uncertainty
from dubito.metrics import Array, Interval
from dubito.result import Result, axes
from dubito.scores.available import why_not_comparable
from dubito.scores.registry import by_name
from dubito.table import Table
from dubito.types import Score
from dubito.validate import check_choice, check_rows, check_same_model, has_model_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    "error_auroc": "error AUROC",
    "aurc": "AURC",
    "excess_aurc": "excess AURC",
    "augrc": "AUGRC",
    "r_auroc": "R-AUROC",
    "ood_auroc": "OOD AUROC",
    "ood_average_precision": "OOD AP",
    "ood_fpr95": "OOD FPR95",
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
    "recall_at_1": "Recall@1",
}
"""Every metric by name, and its heading."""

Plot = Literal["risk_coverage", "ood", "reliability"]
Task = tuple[Any, ...]
"""A metric and its arrays."""

_OF_OOD = frozenset({"ood_auroc", "ood_average_precision", "ood_fpr95"})
_OF_NEIGHBOURS = frozenset({"r_auroc", "recall_at_1"})
_OF_LOGITS = frozenset(TITLES) - _OF_OOD - _OF_NEIGHBOURS
_POINTS, _BINS, _CONFIDENCE_BINS = 200, 50, 15
_TAIL = 1e-3
"""Share of images at either end that a histogram puts into its outermost bins: a few outliers must not flatten it."""


def evaluate(
    scores: Mapping[str, Array | Score | str] | Sequence[Score | str] | Score | str,
    table: Table,
    *,
    ood: Table | None = None,
    metrics: Sequence[str] | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> "Evaluation":
    """Every score by every metric that the table's columns allow.

    Args:
        scores: Fitted scores by name, whose cost is measured too, or arrays (n,) with the uncertainties of the table's
            rows. A single score or a list of scores goes by their own names; the name of a registered score stands for
            it.
        table: Images of the classes that the model was trained for.
        ood: Out-of-distribution images. They need scores, not arrays.
        metrics: Names in TITLES; those that the columns allow are computed. Default: all. Without r_auroc and
            recall_at_1 there is no search for neighbours, whose time grows with n².
        confidence: Confidence of the bootstrap intervals.
        resamples: Number of bootstrap resamples.
        seed: Seed of the bootstrap.

    >>> table = Table(logit=[[3.0, 0.0], [0.2, 0.0], [0.0, 0.1], [0.0, 2.0]], label=[0, 1, 0, 1])
    >>> from dubito.scores import MaxProbability
    >>> evaluate([MaxProbability(), "entropy"], table, resamples=50)["max_probability"]["error_auroc"].value
    1.0
    """
    check_rows(table, by="evaluate")
    if ood is not None:
        check_rows(ood, by="evaluate", what="ood")
        check_same_model(table, {"ood": ood}, by="evaluate")
    named = by_name(scores, by="evaluate")
    chosen = _chosen(metrics)
    bootstrap = partial(measures.interval, confidence=confidence, resamples=resamples, seed=seed)
    truth = _Truth.of(table, chosen)

    def measured(tasks: dict[str, Task]) -> dict[str, Interval]:
        return {key: bootstrap(*task) for key, task in tasks.items() if key in chosen}

    result = Evaluation(table.name, len(table), measured(truth.of_model()), reliability=truth.reliability())
    for name, score in named.items():
        start = time.perf_counter()
        u = uncertainty(score, table, by="evaluate", name=name)
        seconds = time.perf_counter() - start
        result.microseconds[name] = 1e6 * seconds / len(table) if isinstance(score, Score) else None
        result.scores[name] = measured(truth.of_score(u))
        if truth.wrong is not None:
            result.risk_coverage[name] = _risk_coverage(u, truth.wrong)
        if ood is not None and chosen & _OF_OOD:
            u_ood = _score_ood(name, score, table, ood)
            result.scores[name] |= measured(_of_ood(u, u_ood))
            result.ood[name] = _histogram(u.numpy(), u_ood.numpy())
    return result


class Reliability(NamedTuple):
    """The bins of a reliability diagram that hold images: mean confidence, accuracy and number of images in each."""

    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    images: tuple[int, ...]


class OodHistogram(NamedTuple):
    """How one score distributes over in-distribution and OOD images: counts in bins with common edges."""

    edges: tuple[float, ...]
    in_distribution: tuple[int, ...]
    ood: tuple[int, ...]


@final
@dataclass
class Evaluation(Result):
    """Scores by metrics: print it, index it by score and metric, plot it, or take it as a dict, JSON, CSV or pandas.

    Attributes:
        name: Name of the evaluated table.
        rows: Number of its images.
        model: The model's own metrics.
        scores: By score and metric, the value with its interval.
        microseconds: Cost of each score per image; None for arrays, whose cost is unknown.
        reliability: Confidence and accuracy in bins of equal width; None without labels of the model's classes.
        risk_coverage: By score, at most 200 points (coverage, risk); empty without such labels.
        ood: By score, histograms of its values in and out of distribution; empty without OOD images.
    """

    name: str
    rows: int
    model: dict[str, Interval]
    scores: dict[str, dict[str, Interval]] = field(default_factory=dict)
    microseconds: dict[str, float | None] = field(default_factory=dict)
    # Not in repr, text and JSON: curves to draw, hundreds of numbers.
    reliability: Reliability | None = field(default=None, repr=False)
    risk_coverage: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict, repr=False)
    ood: dict[str, OodHistogram] = field(default_factory=dict, repr=False)

    titles: ClassVar[Mapping[str, str]] = TITLES | {"microseconds": "µs / image"}

    def __getitem__(self, score: str) -> dict[str, Interval]:
        return self.scores[score]

    @property
    def metrics(self) -> list[str]:
        """The metrics that could be computed, in their usual order."""
        return [key for key in TITLES if any(key in row for row in self.scores.values())]

    def title(self) -> str:
        """The table and its size."""
        return f"{self.name}: {self.rows} images"

    def facts(self) -> dict[str, str]:
        """The model's own metrics."""
        return {TITLES[key]: self.cell(key, value) for key, value in self.model.items()}

    def records(self) -> list[dict[str, Any]]:
        """One row per score."""
        return [
            {"score": name} | {key: row.get(key) for key in self.metrics} | {"microseconds": self.microseconds[name]}
            for name, row in self.scores.items()
        ]

    def cell(self, key: str, value: Any) -> str:
        """Microseconds have one decimal."""
        return f"{value:.1f}" if key == "microseconds" and value is not None else super().cell(key, value)

    def plot(self, kind: Plot | None = None, *, score: str | None = None, ax: "Axes | None" = None) -> "Axes":
        """Draw one of three pictures.

        Args:
            kind: "risk_coverage", the error rate of the most certain images, for every score; "ood", histograms of one
                score in and out of distribution; or "reliability", accuracy over confidence. Default: the first of
                these that the evaluation has.
            score: The score of the histograms. Default: the first.
            ax: Axes to draw on. Default: those of a new figure.
        """
        has: dict[str, object] = {
            "risk_coverage": self.risk_coverage,
            "ood": self.ood,
            "reliability": self.reliability,
        }
        chosen: str = kind or next((name for name, data in has.items() if data), "risk_coverage")
        check_choice(chosen, has, by="Evaluation.plot", what="kind")
        if not has[chosen]:
            missing = "OOD images: evaluate(..., ood=table)" if chosen == "ood" else "labels of the model's classes"
            raise ValueRangeError(f"Evaluation.plot: '{chosen}' needs {missing}; {self.name} was evaluated without.")
        if chosen == "reliability":
            return _plot_reliability(self, axes(ax))
        if chosen == "ood":
            return _plot_ood(self, score, axes(ax))
        picture = axes(ax)
        for name, points in self.risk_coverage.items():
            picture.plot(*zip(*points, strict=True), label=name)
        picture.set(xlabel="coverage", ylabel="risk (error rate)", title=self.title(), xlim=(0, 1))
        picture.legend(frameon=False)
        return picture


def _plot_reliability(result: Evaluation, picture: "Axes") -> "Axes":
    bins = result.reliability or Reliability((), (), ())
    largest = max(bins.images, default=1)
    picture.plot([0, 1], [0, 1], color="grey", linestyle="--", label="calibrated")
    picture.plot(bins.confidence, bins.accuracy, label="model")
    picture.scatter(bins.confidence, bins.accuracy, s=[10 + 90 * count / largest for count in bins.images])
    picture.set(xlabel="confidence", ylabel="accuracy", title=result.title(), xlim=(0, 1), ylim=(0, 1))
    picture.legend(frameon=False)
    return picture


def _plot_ood(result: Evaluation, score: str | None, picture: "Axes") -> "Axes":
    name = score or next(iter(result.ood))
    check_choice(name, result.ood, by="Evaluation.plot", what="score")
    edges, *both = result.ood[name]
    for label, counts in zip(("in-distribution", "OOD"), both, strict=True):
        # As shares of the images: the two tables may have very different sizes.
        picture.stairs([count / sum(counts) for count in counts], edges, fill=True, alpha=0.5, label=label)
    picture.set(xlabel=name, ylabel="share of images", title=result.title())
    picture.legend(frameon=False)
    return picture


@dataclass
class _Truth:
    """What the labels say about a table's rows, computed once for all scores."""

    wrong: Bool[Tensor, "n"] | None = None
    mismatched: Bool[Tensor, "n"] | None = None
    """Whether the nearest other row has another label."""
    confidence: Float[Tensor, "n"] | None = None
    nll: Float[Tensor, "n"] | None = None
    brier: Float[Tensor, "n"] | None = None

    @classmethod
    def of(cls, table: Table, chosen: frozenset[str]) -> "_Truth":
        truth = cls()
        if has_model_labels(table) and chosen & _OF_LOGITS:
            parts = [_row_values(batch) for batch in table.batches("logit", "label")]
            truth.wrong, truth.confidence, truth.nll, truth.brier = map(torch.cat, zip(*parts, strict=True))
        if "feature" in table and "label" in table and len(table) > 1 and chosen & _OF_NEIGHBOURS:
            truth.mismatched = ~measures.neighbour_matches(table.column("feature"), table.label)
        return truth

    def of_model(self) -> dict[str, Task]:
        tasks: dict[str, Task] = {}
        if self.wrong is not None:
            tasks["accuracy"] = (_mean, (~self.wrong).double())
            tasks["nll"] = (_mean, self.nll)
            tasks["brier"] = (_mean, self.brier)
            tasks["ece"] = (measures.ece, self.confidence, ~self.wrong)
        if self.mismatched is not None:
            tasks["recall_at_1"] = (_mean, (~self.mismatched).double())
        return tasks

    def of_score(self, u: Float[Tensor, "n"]) -> dict[str, Task]:
        tasks: dict[str, Task] = {}
        if self.wrong is not None:
            if has_both(self.wrong):
                tasks["error_auroc"] = (measures.auroc, u, self.wrong)
            tasks["aurc"] = (measures.aurc, u, self.wrong)
            tasks["excess_aurc"] = (measures.excess_aurc, u, self.wrong)
            tasks["augrc"] = (measures.augrc, u, self.wrong)
        if self.mismatched is not None and has_both(self.mismatched):
            tasks["r_auroc"] = (measures.auroc, u, self.mismatched)
        return tasks

    def reliability(self) -> Reliability | None:
        """In the bins of `metrics.ece`, where an edge belongs to the bin below it."""
        if self.wrong is None or self.confidence is None:
            return None
        q, right = self.confidence.double().numpy(), (~self.wrong).double().numpy()
        place = np.searchsorted(np.arange(1, _CONFIDENCE_BINS) / _CONFIDENCE_BINS, q)
        count = np.bincount(place, minlength=_CONFIDENCE_BINS)
        some = count > 0
        means = [np.bincount(place, values, minlength=_CONFIDENCE_BINS)[some] / count[some] for values in (q, right)]
        return Reliability(*(tuple(one.tolist()) for one in (*means, count[some])))


def _chosen(names: Sequence[str] | None) -> frozenset[str]:
    chosen = frozenset(TITLES if names is None else [names] if isinstance(names, str) else names)
    for name in sorted(chosen):
        check_choice(name, TITLES, by="evaluate", what="metrics")
    return chosen


def _row_values(batch: Table) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logit, label = batch.logit, batch.label
    return (
        ~measures.correct(logit, label),
        measures.confidence(logit),
        measures.nll_per_row(logit, label),
        measures.brier_per_row(logit, label),
    )


def _score_ood(name: str, score: Array | Score, table: Table, ood: Table) -> Float[Tensor, "m"]:
    """The OOD images by the same score; TableError if its columns were extracted with other settings there."""
    if not isinstance(score, Score):
        raise TableError(
            f"evaluate: with ood=..., '{name}' must be a fitted score, so that the OOD table can be scored too; "
            f"got an array. Pass the score itself."
        )
    u = score.score(ood)
    if why := why_not_comparable(score, table, ood):
        raise TableError(f"evaluate: '{name}' cannot be compared between tables: {why}. Extract both alike.")
    return u


def _of_ood(u: Float[Tensor, "n"], u_ood: Float[Tensor, "m"]) -> dict[str, Task]:
    both = torch.cat([u, u_ood])
    is_ood = torch.arange(len(both)) >= len(u)
    return {
        "ood_auroc": (measures.auroc, both, is_ood),
        "ood_average_precision": (measures.average_precision, both, is_ood),
        "ood_fpr95": (measures.fpr_at_tpr, both, is_ood),
    }


def _risk_coverage(u: Float[Tensor, "n"], wrong: Bool[Tensor, "n"]) -> tuple[tuple[float, float], ...]:
    coverage, risk = measures.risk_coverage(u, wrong)
    places = np.unique(np.linspace(0, len(risk) - 1, min(_POINTS, len(risk))).round().astype(int))
    return tuple(zip(coverage[places].tolist(), risk[places].tolist(), strict=True))


def _histogram(u: Float[np.ndarray, "n"], u_ood: Float[np.ndarray, "m"]) -> OodHistogram:
    low, high = np.quantile(np.concatenate([u, u_ood]), (_TAIL, 1 - _TAIL))
    edges = np.histogram_bin_edges([low, high], bins=_BINS)
    counts = (np.histogram(np.clip(one, edges[0], edges[-1]), edges)[0] for one in (u, u_ood))
    return OodHistogram(tuple(edges.tolist()), *(tuple(one.tolist()) for one in counts))


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
