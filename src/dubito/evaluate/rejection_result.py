"""The result of a rejection study: one set of curves for every order of the images, as table, plot, findings and files.

The table begins with plain numbers: how many predictions are wrong among the most certain images. AUROC of errors and
AURC follow, each with its difference to that of the original model's entropy at the same temperature; then the columns
of Tables 3 to 6 of Kirsch (2024), the negative covariances of bucket calibration error, acceptance accuracy and
acceptance NLL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

from dubito.errors import ValueRangeError
from dubito.evaluate.evaluate import COVERAGES, ErrorsAtCoverage, coverage_facts
from dubito.metrics import Interval
from dubito.result import Axes, Result, axes
from dubito.storage import write_csv
from dubito.validate import check_choice

ORIGINAL = "original"
METRICS = {"accuracy": "accuracy", "nll": "NLL", "calibration_error": "calibration error"}
"""What the curves show, and its heading."""
KINDS = ("bucket", "acceptance")
FIGURES = ("auroc", "aurc", *(f"neg_{kind}_covariance_{metric}" for kind in KINDS for metric in METRICS))
"""What is resampled."""
RANKING = {"auroc": "error AUROC", "aurc": "AURC"}
"""Figures that say how well errors are ordered."""
PAPER = {
    "neg_bucket_covariance_calibration_error": "-cov bucket calibration",
    "neg_acceptance_covariance_accuracy": "-cov acceptance accuracy",
    "neg_acceptance_covariance_nll": "-cov acceptance NLL",
}
"""The three figures of the paper's tables."""
ERRORS_AT = {f"errors_at_{100 * coverage:g}": coverage for coverage in COVERAGES[::-1]}
"""Columns of plain numbers: the share of wrong predictions among the most certain images, by their share of all."""
UNCERTAINTIES = {
    "entropy": "entropy",
    "mutual_information": "mutual information",
    "weighted_logsumexp": "weighted MI, log-sum-exp",
    "weighted_sum": "weighted MI, sum",
    "pooled_logsumexp": "pooled MI, log-sum-exp",
    "pooled_sum": "pooled MI, sum",
    "predictive_entropy": "predictive entropy",
    "expected_entropy": "expected entropy",
    "variation_ratio": "variation ratio",
}
"""Headings of uncertainties. Weighted: members are weighted anew for every image; pooled: alike for all images."""


@final
class RejectionOrder(NamedTuple):
    """What the images are sorted by: an uncertainty of an ensemble (or of the original model) at a temperature."""

    ensemble: str
    members: int
    uncertainty: str
    temperature: float

    @property
    def size(self) -> str:
        """The size of the ensemble, for people."""
        if self.ensemble == ORIGINAL:
            return ORIGINAL
        grid = grid_of(self.ensemble)
        return f"{grid}x{grid}" if grid else f"{self.ensemble} ({self.members})"

    def __str__(self) -> str:
        return f"{UNCERTAINTIES[self.uncertainty]} of {self.size}"


@final
@dataclass(frozen=True)
class RejectionCurves:
    """Rejection by one order of the images.

    Attributes:
        order: What the images are sorted by.
        accuracy: Accuracy on all images.
        nll: NLL on all images.
        calibration_error: |mean confidence - mean accuracy| on all images; not the binned ECE.
        errors_at_coverage: The share of wrong predictions among the most certain half, 80 %, 90 % and all images.
        curves: By "bucket" or "acceptance", then "accuracy", "nll" or "calibration_error": the value at every level.
        figures: AUROC of errors, AURC and the negative covariances, with intervals; None for what is undefined, such
            as AUROC without errors.
        differences: Each figure minus that of the original's entropy at the same temperature, resampled together.
        constant: Whether the uncertainty is equal for all images, as where all members are the same model.
    """

    order: RejectionOrder
    accuracy: float
    nll: float
    calibration_error: float
    errors_at_coverage: ErrorsAtCoverage
    curves: Mapping[str, Mapping[str, tuple[float, ...]]]
    figures: Mapping[str, Interval | None]
    differences: Mapping[str, Interval | None] | None
    constant: bool = False

    def better(self, figure: str) -> int:
        """Whether AUROC or AURC is better (1) or worse (-1) than the original's, beyond the interval; else 0."""
        difference = (self.differences or {}).get(figure)
        if difference is None or difference.low <= 0 <= difference.high:
            return 0
        return 1 if (difference.value > 0) == (figure == "auroc") else -1  # lower AURC is better


@final
@dataclass(frozen=True)
class RejectionStudy(Result):
    """Rejection by every order of the images: print it, plot it, or take it as a dict, JSON, CSV or pandas.

    Attributes:
        name: Name of the studied table.
        model: Name of the original model.
        images: Number of images.
        calibrated_on: Name of the table that temperature and pooled weights were fitted on.
        predictions: Whether ensembles are measured by their "own" predictions or by the "original" model's.
        against: What covariances are with, "level" or "uncertainty".
        levels: Levels of the curves.
        results: One per order; for every temperature, the original first.
    """

    name: str
    model: str
    images: int
    calibrated_on: str | None
    predictions: str
    against: str
    levels: tuple[float, ...]
    results: Sequence[RejectionCurves]

    naming: ClassVar = 3
    columns: ClassVar[Sequence[str]] = (
        *("uncertainty", "size", "temperature", *ERRORS_AT),
        *(key for figure in RANKING for key in (figure, f"{figure}_difference")),
        *("accuracy", "nll", *PAPER),
    )
    titles: ClassVar[Mapping[str, str]] = {
        **{key: f"errors at {100 * coverage:g} %" for key, coverage in ERRORS_AT.items()},
        "size": "ensemble",
        "temperature": "T",
        "nll": "NLL",
        **PAPER,
        **RANKING,
        **{f"{figure}_difference": f"{title} - entropy's" for figure, title in RANKING.items()},
    }

    def of(self, ensemble: str, uncertainty: str = "entropy", temperature: float | None = None) -> RejectionCurves:
        """One result, by default at the first temperature: `study.of("tiles_7", "mutual_information")`."""
        at = self._temperature(temperature, by="RejectionStudy.of")
        for result in self.results:
            if result.order._replace(members=1) == RejectionOrder(ensemble, 1, uncertainty, at):
                return result
        known = dict.fromkeys(f"{one.order.ensemble}/{one.order.uncertainty}" for one in self.results)
        raise ValueRangeError(
            f"RejectionStudy.of: ensemble and uncertainty must be one of {', '.join(known)}; "
            f"got {ensemble}/{uncertainty}."
        )

    @property
    def temperatures(self) -> tuple[float, ...]:
        """All temperatures, in the order of the study."""
        return tuple(dict.fromkeys(result.order.temperature for result in self.results))

    @property
    def uncertainties(self) -> list[str]:
        """The uncertainties of ensembles."""
        return list(dict.fromkeys(one.order.uncertainty for one in self.results if one.order.ensemble != ORIGINAL))

    def title(self) -> str:
        """What was studied."""
        whose = "ensembles by their own predictions" if self.predictions == "own" else "all by the original's"
        fitted = f"; T fitted on {self.calibrated_on}" if self.calibrated_on else ""
        return f"{self.name}: {self.images} images, {whose}{fitted}"

    def facts(self) -> dict[str, str]:
        """At the first temperature, how many errors remain among the most certain images."""
        at = self.temperatures[0]
        return coverage_facts(
            {str(one.order): one.errors_at_coverage for one in self.results if one.order.temperature == at}
        )

    def records(self) -> list[dict[str, Any]]:
        """One row per order, with all figures and differences."""
        return [
            {"model": self.model, **result.order._asdict(), "size": result.order.size}
            | {key: result.errors_at_coverage[coverage] for key, coverage in ERRORS_AT.items()}
            | {metric: getattr(result, metric) for metric in METRICS}
            | {figure: result.figures[figure] for figure in FIGURES}
            | {f"{figure}_difference": (result.differences or {}).get(figure) for figure in FIGURES}
            for result in self.results
        ]

    def curve_records(self) -> list[dict[str, Any]]:
        """One row per point of every curve."""
        return [
            {"model": self.model, **result.order._asdict()}
            | {"kind": kind, "metric": metric, "level": level, "value": value}
            for result in self.results
            for kind, curves in result.curves.items()
            for metric in METRICS
            for level, value in zip(self.levels, curves[metric], strict=True)
        ]

    def curves_to_csv(self, path: str | Path) -> Path:
        """Write `curve_records` as CSV."""
        records = self.curve_records()
        return write_csv(path, [list(records[0]), *(list(record.values()) for record in records)])

    def cell(self, key: str, value: Any) -> str:
        """The paper's figures have no intervals in the table."""
        if key in PAPER and value is not None:
            return f"{value.value + 0.0:.3f}"  # -0.0 would have a sign
        if key in ERRORS_AT:
            return f"{100 * value:.1f} %"
        if key == "uncertainty":
            return UNCERTAINTIES[value]
        return f"{value:.3g}" if key == "temperature" else super().cell(key, value)

    def findings(self) -> list[str]:
        """For each temperature: does anything order errors better than the model's own entropy?"""
        return [self._finding(temperature) for temperature in self.temperatures]

    def _page(self) -> str:
        from dubito.evaluate.rejection_page import rejection_page  # noqa: PLC0415 (which draws studies)

        return rejection_page(self)

    def plot(
        self,
        ax: Axes | None = None,
        *,
        uncertainty: str | None = None,
        metric: str = "accuracy",
        kind: str = "acceptance",
        temperature: float | None = None,
    ) -> Axes:
        """One curve per ensemble, and the original model's as a dashed line.

        Args:
            ax: Axes to draw on. Default: those of a new figure.
            uncertainty: The uncertainty of the ensembles. Default: the first.
            metric: "accuracy", "nll" or "calibration_error".
            kind: "acceptance", of all images up to a level of uncertainty, or "bucket", between two levels.
            temperature: One of `temperatures`. Default: the first.
        """
        shown = uncertainty or next(iter(self.uncertainties), "entropy")
        check_choice(shown, ("entropy", *self.uncertainties), by="RejectionStudy.plot", what="uncertainty")
        check_choice(metric, METRICS, by="RejectionStudy.plot", what="metric")
        check_choice(kind, KINDS, by="RejectionStudy.plot", what="kind")
        at = self._temperature(temperature, by="RejectionStudy.plot")
        picture = axes(ax)
        for result in self.results:
            original = result.order.ensemble == ORIGINAL
            if result.order.temperature == at and (original or result.order.uncertainty == shown):
                style: Any = {"color": "black", "linestyle": "--"} if original else {}
                picture.plot(self.levels, result.curves[kind][metric], label=result.order.size, **style)
        picture.set(xlabel="quantile of uncertainty", ylabel=f"{METRICS[metric]} ({kind})")
        picture.set(title=f"{UNCERTAINTIES[shown]}, T = {at:.3g}")
        picture.legend(frameon=False)
        return picture

    def _temperature(self, temperature: float | None, *, by: str) -> float:
        """The chosen temperature, by default the first."""
        if temperature is not None and temperature not in self.temperatures:
            known = ", ".join(map(str, self.temperatures))
            raise ValueRangeError(f"{by}: temperature must be one of {known}; got {temperature!r}.")
        return self.temperatures[0] if temperature is None else temperature

    def _finding(self, temperature: float) -> str:
        original, *others = [one for one in self.results if one.order.temperature == temperature]
        at = f"T = {temperature:.3g}"
        if not others:
            return f"{at}: there is no ensemble to compare with the model's own entropy."
        if original.figures["auroc"] is None:
            return f"{at}: the model's predictions are all right or all wrong, so there is nothing to reject."
        orders = f"{len(others)} other order{'' if len(others) == 1 else 's'}"
        counts = "; ".join(_count(others, figure) for figure in RANKING)
        text = f"{at}: the model's own entropy against {orders}, by intervals. {counts}."
        if self.predictions == "own":
            text += " Each is measured by its own predictions, which also differ in accuracy: AURC counts that,"
            text += " AUROC does not."
        if constant := ", ".join(str(one.order) for one in others if one.constant):
            text += (
                f" The same for every image, and no order at all: {constant}. Members agree everywhere, as where they "
                f"are one and the same model, or one of them has all the weight."
            )
        return text


def _count(others: Sequence[RejectionCurves], figure: str) -> str:
    """How many orders are better or worse than the original's entropy."""
    differences = {one.order: (one.differences or {}).get(figure) for one in others}
    better = [one.order for one in others if one.better(figure) > 0]
    worse = sum(one.better(figure) < 0 for one in others)
    best = max(better, key=lambda order: abs(one.value) if (one := differences[order]) else 0.0, default=None)
    named = "" if best is None else f" (best: {best})"
    equal = len(others) - len(better) - worse
    return f"{RANKING[figure]}: {len(better)} of them better{named}, {worse} worse, {equal} equal"


def grid_of(name: str) -> int | None:
    """The k of a k x k grid of tiles.

    >>> grid_of("tiles_7"), grid_of("members")
    (7, None)
    """
    size = name.removeprefix("tiles_")
    return int(size) if name.startswith("tiles_") and size.isdecimal() else None
