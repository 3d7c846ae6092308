"""How good are these uncertainties on this table? Every score by every metric that the columns allow, with intervals.

    errors at 80 % coverage                 how many of the most certain are wrong?       needs logit, label
    error AUROC, AURC, excess AURC, AUGRC   are wrong predictions more uncertain?         needs logit, label
    R-AUROC                                 are bad nearest neighbours more uncertain?    needs feature, label
    OOD AUROC, AP, FPR95                    are out-of-distribution images?               needs a second table
    µs / image                              the cost of the score, given its columns

The model's own accuracy, NLL, Brier score, ECE and Recall@1, and the data of `Evaluation.plot`, are kept with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar, Literal, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from dubito import metrics as measures
from dubito.errors import TableError, ValueRangeError
from dubito.metrics import Array, Interval
from dubito.result import Axes, Result, axes
from dubito.scores.available import requested_scores, why_not_comparable
from dubito.scores.registry import by_name, make_score
from dubito.table import Table, to_tensor
from dubito.types import Score, finite
from dubito.validate import (
    check_bootstrap,
    check_choice,
    check_per_row,
    check_rows,
    check_same_model,
    has_model_labels,
    warn_shared,
)

Plot = Literal["risk_coverage", "ood", "reliability"]

_METRICS: Mapping[str, tuple[Any, ...]] = {
    "error_auroc": ("error AUROC", measures.auroc, "u", "wrong"),
    "aurc": ("AURC", measures.aurc, "u", "wrong"),
    "excess_aurc": ("excess AURC", measures.excess_aurc, "u", "wrong"),
    "augrc": ("AUGRC", measures.augrc, "u", "wrong"),
    "r_auroc": ("R-AUROC", measures.auroc, "u", "mismatches"),
    "ood_auroc": ("OOD AUROC", measures.auroc, "u", "is_ood"),
    "ood_average_precision": ("OOD AP", measures.average_precision, "u", "is_ood"),
    "ood_fpr95": ("OOD FPR95", measures.fpr_at_tpr, "u", "is_ood"),
    "accuracy": ("accuracy", measures.mean, "correct"),
    "nll": ("NLL", measures.mean, "nll"),
    "brier": ("Brier", measures.mean, "brier"),
    "ece": ("ECE", measures.ece, "confidence", "correct"),
    "recall_at_1": ("Recall@1", measures.mean, "matches"),
    "adaptive_ece": ("adaptive ECE", measures.adaptive_ece, "confidence", "correct"),
    "smooth_ece": ("smooth ECE", measures.smooth_ece, "confidence", "correct"),
    "top_label_ece": ("top-label ECE", measures.top_label_ece, "confidence", "correct", "predicted"),
    "class_wise_ece": ("class-wise ECE", measures.class_wise_ece, "logit", "label"),
    "bucket_calibration_error": ("bucket cal. error", measures.bucket_calibration_error, "u", "confidence", "correct"),
}
"""Heading, function and columns of every metric; those without column "u" are the model's own."""
TITLES = {name: title for name, (title, *_) in _METRICS.items()}
"""Every metric by name, and its heading."""
COVERAGES = (0.5, 0.8, 0.9, 1.0)
"""Shares of images, the most certain ones, of which the error rate is reported in plain numbers."""
USUAL, USUAL_KEY, USUAL_TITLE = 0.8, "errors_at_80", "errors at 80 %"
"""The one of them that tables show, its key in records and its heading."""
ErrorsAtCoverage = dict[float, float]
"""By coverage, the share of wrong predictions among the images that are accepted."""
SEEN = "Scores that learn have already seen them and look better than they are. Fit on other images like these."
SHARED_WITH_OOD = "In-distribution and OOD at once, they cannot be separated. Leave them out of one of the two."
_OF_OOD = {name for name, row in _METRICS.items() if "is_ood" in row}
_OF_NEIGHBOURS = {"r_auroc", "recall_at_1"}
_ON_REQUEST = {"adaptive_ece", "smooth_ece", "top_label_ece", "class_wise_ece", "bucket_calibration_error"}
"""Computed where they are named: every one more would make each evaluation longer."""
_POINTS, _BINS, _CONFIDENCE_BINS = 200, 50, 15
_COLOURS = 10
"""Curves that have a colour and a name, those of the lowest errors; others are grey, without a name."""
_TAIL = 1e-3
"""Share of images at either end that a histogram puts into its outermost bins: a few outliers must not flatten it."""


def evaluate(
    scores: Mapping[str, Array | Score | str] | Sequence[Score | str] | Score | str,
    table: Table,
    *,
    ood: Table | None = None,
    train: Table | None = None,
    metrics: Sequence[str] | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> "Evaluation":
    """Every score by every metric that the table's columns allow.

    Args:
        scores: Scores by name, whose cost is measured too, or arrays (n,) with the uncertainties of the table's rows.
            A single score or a list of scores goes by their own names; the name of a registered score stands for it.
        table: Images of the classes that the model was trained for.
        ood: Out-of-distribution images. They need scores, not arrays.
        train: Other in-distribution images. A copy of each score that learns and is not fitted is fitted on them.
        metrics: Names in TITLES; those that the columns allow are computed. Default: all but the calibration errors
            adaptive_ece, smooth_ece, top_label_ece, class_wise_ece (which takes long with many classes) and
            bucket_calibration_error. Without r_auroc and recall_at_1 there is no search for neighbours, whose time
            grows with n².
        confidence: Confidence of the bootstrap intervals.
        resamples: Number of bootstrap resamples.
        seed: Seed of the bootstrap.

    >>> table = Table(logit=[[3.0, 0.0], [0.2, 0.0], [0.0, 0.1], [0.0, 2.0]], label=[0, 1, 0, 1])
    >>> from dubito.scores import MaxProbability
    >>> evaluate([MaxProbability(), "entropy"], table, resamples=50)["max_probability"]["error_auroc"].value
    1.0
    """
    check_rows(table, by="evaluate")
    check_bootstrap(by="evaluate", confidence=confidence, resamples=resamples, seed=seed)
    if train is not None:
        check_rows(train, by="evaluate", what="train")
        check_same_model(table, {"train": train}, by="evaluate")
        warn_shared(table, train, by="evaluate", what="train", harm=SEEN)
    named = by_name(scores, by="evaluate")
    unready = {name: score for name, score in named.items() if isinstance(score, Score)}
    named |= requested_scores(unready, table, train, by="evaluate").scores
    usual = TITLES.keys() - _ON_REQUEST
    chosen = frozenset(usual if metrics is None else [metrics] if isinstance(metrics, str) else metrics)
    for name in sorted(chosen):
        check_choice(name, TITLES, by="evaluate", what="metrics")
    ood = _checked_ood(table, ood, needed=bool(chosen & _OF_OOD))
    if ood is not None and named:
        check_fitted_scores(named, by="evaluate")

    def measured(columns: Mapping[str, Tensor]) -> dict[str, Interval]:
        bootstrap: Any = {"confidence": confidence, "resamples": resamples, "seed": seed}
        return {
            key: measures.interval(metric, *(columns[name] for name in names), **bootstrap)
            for key, (_, metric, *names) in _METRICS.items()
            if key in chosen and set(names) <= columns.keys() and ("u" in names) == ("u" in columns)
            if metric is not measures.auroc or has_both(columns[names[1]])  # else there is nothing to rank
        }

    columns = _columns(table, chosen)
    result = Evaluation(table.name, len(table), measured(columns), reliability=reliability_of(columns))
    for name, score in named.items():
        start = perf_counter()
        u = uncertainty(score, table, by="evaluate", name=name)
        result.microseconds[name] = 1e6 * (perf_counter() - start) / len(table) if isinstance(score, Score) else None
        result.scores[name] = measured({**columns, "u": u})
        if "wrong" in columns:
            result.errors_at_coverage[name] = errors_at_coverage(u, columns["wrong"])
            result.risk_coverage[name] = _risk_coverage(u, columns["wrong"])
        if ood is not None:
            score.check_columns(ood)
            if why := why_not_comparable(score, table, ood):
                raise TableError(
                    f"evaluate: '{name}' cannot be compared between tables: {why}. Extract both with the same settings."
                )
            u_ood = score.score(ood)
            result.scores[name] |= measured(dict(zip(("u", "is_ood"), measures.join_ood(u, u_ood), strict=True)))
            result.ood[name] = _histogram(u.numpy(), u_ood.numpy())
    return result


def uncertainties(
    scores: Mapping[str, Array | Score], table: Table, *, by: str, baselines: Sequence[str] = ()
) -> dict[str, Float[Tensor, "n"]]:
    """The uncertainty of every row, by score; then that of the baselines, if the table has logits.

    Args:
        scores: Fitted scores or arrays (n,), by name.
        table: The table to score.
        by: The function that the user called.
        baselines: Names of scores of the logits; one that is among the scores is not computed again.
    """
    check_rows(table, by=by)
    check_any_scores(scores, by=by)
    values = {name: uncertainty(score, table, by=by, name=name) for name, score in scores.items()}
    if "logit" in table:
        values |= {name: make_score(name).score(table) for name in baselines if name not in values}
    return values


def uncertainty(score: Array | Score, table: Table, *, by: str, name: str) -> Float[Tensor, "n"]:
    """The uncertainty of every row by one fitted score; an array is returned if it has one finite number per row."""
    if isinstance(score, Score):
        return score.score(table)
    u = finite(to_tensor(score, f"{by}: score '{name}'").double(), f"{by}: score '{name}'")
    check_per_row(u, table, by=by, what=f"score '{name}'")
    return u


def check_fitted_scores(scores: Mapping[str, Any], *, by: str) -> None:
    """Raise TableError for an array where several tables are to be scored, NotFittedError before anything runs."""
    check_any_scores(scores, by=by)
    for name, score in scores.items():
        if not isinstance(score, Score):
            raise TableError(
                f"{by}: '{name}' must be a fitted score, so that every table can be scored; "
                f"got {type(score).__name__}. Pass the score itself."
            )
        score.check_fitted()


def check_any_scores(scores: Mapping[str, Any], *, by: str) -> None:
    """Raise TableError if there are no scores."""
    if not scores:
        raise TableError(f"{by} needs at least one score; got none. Give some by name: {{'entropy': Entropy()}}.")


def errors_at_coverage(u: Float[Tensor, "n"], wrong: Shaped[Tensor, "n"]) -> ErrorsAtCoverage:
    """The error rate of the most certain images, for every share in COVERAGES.

    >>> errors_at_coverage(torch.arange(10.0), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 1]))[0.8]  # 2 of 8 are wrong
    0.25
    """
    return dict(zip(COVERAGES, measures.acceptance_curve(u, wrong, COVERAGES).tolist(), strict=True))


def coverage_facts(errors: Mapping[str, ErrorsAtCoverage]) -> dict[str, str]:
    """By coverage, in words, the lowest error rate and the score that has it; empty without error rates.

    The lowest of several is lower than that score's error rate on other images, so the words say that it was chosen.

    >>> coverage_facts({"entropy": {0.8: 0.09, 1.0: 0.15}, "margin": {0.8: 0.1, 1.0: 0.15}})["at 80 % coverage"]
    '9.0 % errors, by entropy (the best of 2, chosen on these images)'
    """
    facts, chosen = {}, f" (the best of {len(errors)}, chosen on these images)" if len(errors) > 1 else ""
    for coverage in sorted(next(iter(errors.values()), {}), reverse=True):
        best, rate = min(((name, rates[coverage]) for name, rates in errors.items()), key=lambda one: one[1])
        by = f", by {best}{chosen}" if coverage < 1 else ""
        facts[f"at {100 * coverage:g} % coverage"] = f"{100 * rate:.1f} % errors{by}"
    return facts


def has_both(flags: Bool[Tensor, "n"]) -> bool:
    """Whether there are positives and negatives; without both, nothing can be ranked."""
    return bool(flags.any()) and not bool(flags.all())


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
        errors_at_coverage: By score, the share of wrong predictions among the most certain half, 80 %, 90 % and all
            images; empty without labels of the model's classes.
        reliability: Confidence and accuracy in bins of equal width; None without labels of the model's classes.
        risk_coverage: By score, at most 200 points (coverage, risk); empty without such labels.
        ood: By score, histograms of its values in and out of distribution; empty without OOD images.
    """

    name: str
    rows: int
    model: dict[str, Interval]
    scores: dict[str, dict[str, Interval]] = field(default_factory=dict)
    microseconds: dict[str, float | None] = field(default_factory=dict)
    errors_at_coverage: dict[str, ErrorsAtCoverage] = field(default_factory=dict)
    # Not in repr, text and JSON: curves to draw, hundreds of numbers.
    reliability: Reliability | None = field(default=None, repr=False)
    risk_coverage: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict, repr=False)
    ood: dict[str, OodHistogram] = field(default_factory=dict, repr=False)

    titles: ClassVar[Mapping[str, str]] = TITLES | {"microseconds": "µs / image", USUAL_KEY: USUAL_TITLE}

    def __getitem__(self, score: str) -> dict[str, Interval]:
        check_choice(score, self.scores, by="Evaluation", what="score")
        return self.scores[score]

    @property
    def metrics(self) -> list[str]:
        """The metrics that could be computed, in their usual order."""
        return [key for key in TITLES if any(key in row for row in self.scores.values())]

    def title(self) -> str:
        """The table and its size."""
        return f"{self.name}: {self.rows} images"

    def facts(self) -> dict[str, str]:
        """How many errors remain among the most certain images, and the model's own metrics."""
        return coverage_facts(self.errors_at_coverage) | {
            TITLES[key]: self.cell(key, value) for key, value in self.model.items()
        }

    def records(self) -> list[dict[str, Any]]:
        """One row per score."""
        return [
            {"score": name}
            | ({USUAL_KEY: self.errors_at_coverage.get(name, {}).get(USUAL)} if self.errors_at_coverage else {})
            | {key: row.get(key) for key in self.metrics}
            | {"microseconds": self.microseconds[name]}
            for name, row in self.scores.items()
        ]

    def cell(self, key: str, value: Any) -> str:
        """Microseconds have one decimal, error rates are in per cent."""
        if key == USUAL_KEY and value is not None:
            return f"{100 * value:.1f} %"
        return f"{value:.1f}" if key == "microseconds" and value is not None else super().cell(key, value)

    def plot(self, ax: Axes | None = None, *, kind: Plot | None = None, score: str | None = None) -> Axes:
        """Draw one of three pictures.

        Args:
            ax: Axes to draw on. Default: those of a new figure.
            kind: "risk_coverage", the error rate of the most certain images, for every score; "ood", histograms of one
                score in and out of distribution; or "reliability", accuracy over confidence. Default: the first of
                these that the evaluation has.
            score: The score of the histograms. Default: the first.
        """
        has: Mapping[str, object] = {
            "risk_coverage": self.risk_coverage,
            "ood": self.ood,
            "reliability": self.reliability,
        }
        chosen: str = kind or next((name for name, data in has.items() if data), "risk_coverage")
        check_choice(chosen, has, by="Evaluation.plot", what="kind")
        if not has[chosen]:
            missing = "OOD images: evaluate(..., ood=table)" if chosen == "ood" else "labels of the model's classes"
            raise ValueRangeError(f"Evaluation.plot: '{chosen}' needs {missing}; {self.name} was evaluated without.")
        picture = axes(ax)
        if chosen == "risk_coverage":
            curves = self.risk_coverage
            ordered = sorted(curves, key=lambda name: sum(risk for _, risk in curves[name]))
            for name in ordered[_COLOURS:]:
                picture.plot(*zip(*curves[name], strict=True), color="lightgrey", label="_" + name)  # not in the legend
            for name in [one for one in curves if one in ordered[:_COLOURS]]:
                picture.plot(*zip(*curves[name], strict=True), label=name)
            picture.set(xlabel="coverage", ylabel="risk (error rate)", xlim=(0, 1))
        elif chosen == "ood":
            name = score or next(iter(self.ood))
            check_choice(name, self.ood, by="Evaluation.plot", what="score")
            edges, *both = self.ood[name]
            for label, counts in zip(("in-distribution", "OOD"), both, strict=True):
                # As shares of the images: the two tables may have very different sizes.
                picture.stairs([count / sum(counts) for count in counts], edges, fill=True, alpha=0.5, label=label)
            picture.set(xlabel=name, ylabel="share of images")
        elif self.reliability is not None:
            confidence, accuracy, images = self.reliability
            picture.plot([0, 1], [0, 1], color="grey", linestyle="--", label="calibrated")
            picture.plot(confidence, accuracy, label="model")
            picture.scatter(confidence, accuracy, s=[10 + 90 * count / max(images) for count in images])
            picture.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
        picture.set(title=self.title())
        picture.legend(frameon=False)
        return picture


def _checked_ood(table: Table, ood: Any, *, needed: bool) -> Table | None:
    """The OOD table, if a metric needs it; raises for one without rows or of another model, warns of shared images."""
    checked: Table | None = ood
    if checked is None:
        return None
    check_rows(checked, by="evaluate", what="ood")
    check_same_model(table, {"ood": checked}, by="evaluate")
    if not needed:
        return None
    warn_shared(table, checked, by="evaluate", what="ood", harm=SHARED_WITH_OOD)
    return checked


def _columns(table: Table, chosen: frozenset[str]) -> dict[str, Tensor]:
    """What the labels say about the rows, computed once for all scores; only what the table allows."""
    columns: dict[str, Tensor] = {}
    if has_model_labels(table) and chosen - _OF_OOD - _OF_NEIGHBOURS:
        per_row = {"correct": measures.correct, "nll": measures.nll_per_row, "brier": measures.brier_per_row}
        parts = [
            [measures.confidence(batch.logit), *(values(batch.logit, batch.label) for values in per_row.values())]
            for batch in table.batches("logit", "label")
        ]
        columns = dict(zip(("confidence", *per_row), map(torch.cat, zip(*parts, strict=True)), strict=True))
        if "top_label_ece" in chosen:
            columns["predicted"] = torch.cat([batch.logit.argmax(1) for batch in table.batches("logit")])
        if "class_wise_ece" in chosen:
            columns |= {"logit": table.logit, "label": table.label}
        columns["wrong"] = ~columns["correct"]
    if "feature" in table and "label" in table and len(table) > 1 and chosen & _OF_NEIGHBOURS:
        columns["matches"] = measures.neighbour_matches(table.column("feature"), table.label)
        columns["mismatches"] = ~columns["matches"]
    return columns


def reliability_of(columns: Mapping[str, Tensor]) -> Reliability | None:
    """Of confidence and correctness, in the bins of `metrics.ece`, where an edge belongs to the bin below it."""
    if "confidence" not in columns:
        return None
    q, right = columns["confidence"].double().numpy(), columns["correct"].double().numpy()
    place = np.searchsorted(np.arange(1, _CONFIDENCE_BINS) / _CONFIDENCE_BINS, q)
    count = np.bincount(place, minlength=_CONFIDENCE_BINS)
    some = count > 0
    means = [np.bincount(place, values, minlength=_CONFIDENCE_BINS)[some] / count[some] for values in (q, right)]
    return Reliability(*(tuple(one.tolist()) for one in (*means, count[some])))


def _risk_coverage(u: Float[Tensor, "n"], wrong: Bool[Tensor, "n"]) -> tuple[tuple[float, float], ...]:
    coverage, risk = measures.risk_coverage(u, wrong)
    places = np.unique(np.linspace(0, len(risk) - 1, min(_POINTS, len(risk))).round().astype(int))
    return tuple(zip(coverage[places].tolist(), risk[places].tolist(), strict=True))


def _histogram(u: Float[np.ndarray, "n"], u_ood: Float[np.ndarray, "m"]) -> OodHistogram:
    low, high = np.quantile(np.concatenate([u, u_ood]), (_TAIL, 1 - _TAIL))
    edges = np.histogram_bin_edges([low, high], bins=_BINS)
    counts = (np.histogram(np.clip(one, edges[0], edges[-1]), edges)[0] for one in (u, u_ood))
    return OodHistogram(tuple(edges.tolist()), *(tuple(one.tolist()) for one in counts))
