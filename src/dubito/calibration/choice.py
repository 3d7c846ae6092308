"""Which calibration for my model? Every method on held-out rows of the same table, and which differences are noise.

    for every fold:   fit on the other folds, predict this one;     NLL_m = mean over all rows of -log p_m[y]

All methods see the same folds and the same resamples of rows (a paired bootstrap). The interval of each one's gap to
the lowest NLL accounts for how many were compared, and for having chosen the best on these rows (`gap_to_best`): with
this confidence, the true best is among those whose gap may be zero. Of these, the simplest is recommended, in the order
none, temperature, histogram, isotonic, Venn-Abers, vector, class-wise isotonic, Dirichlet, matrix, and fitted once more
on all rows. NLL is what is compared, because it is proper: a calibration error alone is lowest for a model that gives
every image the same probabilities.

Resamples hold the fitted methods fixed: they show the noise of the rows that are predicted, not that of the fits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar, NamedTuple, final

import torch
from jaxtyping import Int64
from torch import Tensor

from dubito import metrics as measures
from dubito.cache.runner import bar
from dubito.calibration._affine import EXACT, MixingScaling
from dubito.calibration.isotonic import ClassWiseIsotonic
from dubito.calibration.method import Calibration, threads_for
from dubito.calibration.registry import METHODS, make_calibration
from dubito.errors import DubitoError, TableError
from dubito.evaluate.evaluate import Reliability, reliability_of
from dubito.metrics import GapToBest, Interval, gap_to_best, labelled_logits, paired_draws
from dubito.metrics.bootstrap import FEWEST
from dubito.result import Axes, Result, axes
from dubito.table import Table, chosen_rows
from dubito.table.folds import folds_of
from dubito.types import Json
from dubito.validate import check_bootstrap, check_choice, check_model_labels, check_number, check_rows

NONE = "none"
"""The model's own probabilities."""
_ROWS_PER_FOLD = 2
_FEWEST_PER_CLASS = 20
"""Images with which a class-wise curve is tried: with 5, its NLL is far above that of the model itself."""


def calibrate(
    table: Table,
    methods: Sequence[Calibration | str] | Calibration | str | None = None,
    *,
    folds: int = 5,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    progress: bool = True,
) -> "CalibrationChoice":
    """Compare calibration methods by cross-validation, and fit the one that is recommended on all rows.

    Args:
        table: Labelled images that the model was not trained on.
        methods: Methods, or names of them. Default: all; beyond 128 classes without dirichlet and matrix, whose c²
            parameters would take minutes, and with fewer than 20 images per class without class_wise_isotonic.
        folds: Parts of the table, each predicted by methods that were fitted on the others. Crops of one image stay
            together.
        confidence: Probability that the true best is among the methods whose gap to the best may be zero.
        resamples: Number of resamples of the paired bootstrap.
        seed: Seed of the folds and of the bootstrap.
        progress: Whether to show a progress bar on a terminal.

    >>> table = Table(logit=[[4.0, 0.0], [0.0, 4.0], [4.0, 0.0]] * 30, label=[0, 1, 1] * 30)
    >>> calibrate(table, ["temperature"], resamples=50).chosen
    'temperature'
    """
    check_rows(table, by="calibrate")
    check_model_labels(table, by="calibrate")
    check_bootstrap(by="calibrate", confidence=confidence, resamples=resamples, seed=seed, least=2)
    check_number(folds, "[2, inf)", by="calibrate", what="folds", whole=True, hint="5 are usual.")
    check_rows(table, by="calibrate", least=_ROWS_PER_FOLD * folds)
    named, left_out = _named(methods, table)
    fold = folds_of(table, folds, seed=seed)
    columns, seconds = {NONE: _columns(table)}, {NONE: 0.0}
    bootstrap: Any = {"confidence": confidence, "resamples": resamples, "seed": seed}
    result = CalibrationChoice(table.name, len(table), folds, confidence, left_out=left_out)
    with threads_for(table), bar("calibrate", 2 * len(named) + 1, unit="steps", show=progress) as advance:
        for name, method in named.items():
            advance(0, f"fit {name}")
            start = perf_counter()
            try:
                columns[name] = _predicted(method, table, fold)
            except DubitoError as error:
                if methods is not None:
                    raise
                left_out[name] = str(error)
            seconds[name] = (perf_counter() - start) / folds
            advance(1 if name in columns else 2)
        gaps = _gaps(columns, **bootstrap)
        for name, of in columns.items():
            advance(0, f"intervals of {name}")
            result.methods[name] = _quality(of, gaps[name], seconds[name], bootstrap)
            result.reliability[name] = reliability_of(of)
            advance(1)
    if result.chosen != NONE:
        result.method = named[result.chosen].fit(table)
    return result


class MethodQuality(NamedTuple):
    """One method on held-out rows.

    Attributes:
        gap_to_best: By how much its NLL exceeds the lowest one, with an interval that accounts for all comparisons.
        nll: Negative log-likelihood, in nats.
        brier: Brier score, summed over classes.
        ece: Expected calibration error, 15 bins of equal width.
        smooth_ece: The same without bins.
        accuracy: The share of right predictions, which some methods change.
        fit_seconds: Time to fit and apply it, a fold.
    """

    gap_to_best: GapToBest
    nll: Interval
    brier: Interval
    ece: Interval
    smooth_ece: Interval
    accuracy: float
    fit_seconds: float


@final
@dataclass
class CalibrationChoice(Result):
    """Calibration methods, the one with the lowest NLL first, and the one that is recommended.

    Attributes:
        name: Name of the table.
        rows: Number of its images.
        folds: Number of parts of the cross-validation.
        confidence: That of every interval.
        methods: By name, its quality on held-out rows; "none" are the model's own probabilities.
        left_out: By method, why it was not compared.
        method: The recommended method, fitted on all rows; None where that is to change nothing.
        reliability: By method, confidence and accuracy in bins of equal width.
    """

    name: str
    rows: int
    folds: int
    confidence: float
    methods: dict[str, MethodQuality] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    method: Calibration | None = field(default=None, repr=False)
    reliability: dict[str, Reliability | None] = field(default_factory=dict, repr=False)

    titles: ClassVar[Mapping[str, str]] = {
        "nll": "NLL",
        "gap_to_best": "gap to the best",
        "brier": "Brier",
        "ece": "ECE",
        "smooth_ece": "smooth ECE",
        "fit_seconds": "seconds",
    }

    def __getitem__(self, method: str) -> MethodQuality:
        check_choice(method, self.methods, by="CalibrationChoice", what="method")
        return self.methods[method]

    @property
    def best(self) -> str:
        """The method with the lowest NLL on these rows."""
        return min(self.methods, key=lambda name: self.methods[name].nll.value)

    @property
    def leading(self) -> list[str]:
        """The methods that could be the best: those without a sure gap, simplest first."""
        return [name for name, one in self.methods.items() if not one.gap_to_best.surely]

    @property
    def chosen(self) -> str:
        """The simplest of the leading methods."""
        return self.leading[0]

    def apply(self, table: Table) -> Table:
        """Another table of the same model with calibrated logits; the table itself where nothing is to change."""
        return table if self.method is None else self.method.apply(table)

    def title(self) -> str:
        """The table, its size and the folds."""
        return f"{self.name}: calibration of {self.rows} images, {self.folds} folds"

    def records(self) -> list[dict[str, Any]]:
        """One row per method, the lowest NLL first."""
        ordered = sorted(self.methods.items(), key=lambda one: one[1].nll.value)
        keys = ("nll", "gap_to_best", "brier", "ece", "smooth_ece", "accuracy", "fit_seconds")
        return [
            {"": "=" if name in self.leading else "", "method": name} | {key: getattr(one, key) for key in keys}
            for name, one in ordered
        ]

    def cell(self, key: str, value: Any) -> str:
        """Four decimals: NLLs of calibrated models are close."""
        if isinstance(value, Interval | GapToBest):
            return f"{value.value:.4f} [{value.low:.4f}, {value.high:.4f}]"
        return f"{value:.2g}" if key == "fit_seconds" else super().cell(key, value)

    def findings(self) -> list[str]:
        """What to use, what is noise, and what was left out."""
        chosen, leading = self.chosen, self.leading
        sentences = []
        if len(leading) > 1:
            sentences.append(
                f"{', '.join(leading[:-1])} and {leading[-1]} cannot be distinguished by NLL on these {self.rows} "
                f"images (marked =): their differences may be noise."
            )
        else:
            sentences.append(f"{chosen} has the lowest NLL, by more than noise.")
        if chosen == NONE:
            sentences.append(
                "Recommended: no calibration. Nothing is surely better than the model's own probabilities."
            )
        else:
            why = ", the simplest of these" if len(leading) > 1 else ""
            before, after = self.methods[NONE].nll.value, self.methods[chosen].nll.value
            sentences.append(f"Recommended: {chosen}{why}. NLL {before:.4f} before, {after:.4f} after.")
            change = self.methods[chosen].accuracy - self.methods[NONE].accuracy
            if not METHODS[chosen].keeps_predictions if chosen in METHODS else change:
                sentences.append(f"It changes predictions: accuracy {100 * change:+.2f} points.")
        sentences += [f"{name} was left out: {why}" for name, why in self.left_out.items()]
        return sentences

    def to_dict(self) -> Json:
        """Everything as plain values, with the recommendation."""
        return {**super().to_dict(), "best": self.best, "leading": self.leading, "chosen": self.chosen}

    def plot(self, ax: Axes | None = None, *, methods: Sequence[str] | None = None) -> Axes:
        """Draw a reliability diagram of held-out rows: accuracy over confidence.

        Args:
            ax: Axes to draw on. Default: those of a new figure.
            methods: Names of methods. Default: none, and the one that is recommended.
        """
        shown = list(dict.fromkeys((NONE, self.chosen) if methods is None else methods))
        for name in shown:
            check_choice(name, self.methods, by="CalibrationChoice.plot", what="methods")
        picture = axes(ax)
        picture.plot([0, 1], [0, 1], color="grey", linestyle="--", label="calibrated")
        for name in shown:
            if curve := self.reliability[name]:
                (line,) = picture.plot(curve.confidence, curve.accuracy, label=name)
                sizes = [10 + 90 * count / max(curve.images) for count in curve.images]
                picture.scatter(curve.confidence, curve.accuracy, s=sizes, color=line.get_color())
        picture.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), title=self.name)
        picture.legend(frameon=False)
        return picture


def _named(methods: Any, table: Table) -> tuple[dict[str, Calibration], dict[str, str]]:
    """Methods by name, simplest first, and why others are left out."""
    c = table.shape("logit")[1]
    if methods is None:
        left_out = {name: why for name, kind in METHODS.items() if (why := _too_large(kind, len(table), c))}
        made = [make_calibration(name) for name in METHODS if name not in left_out]
        return {one.name: one for one in made}, left_out
    several = [methods] if isinstance(methods, str | Calibration) else list(methods)
    made = [make_calibration(one) if isinstance(one, str) else one for one in several]
    for one in made:
        if not isinstance(one, Calibration):
            raise TableError(
                f"calibrate: methods must be calibration methods or names of them ({', '.join(METHODS)}); "
                f"got {type(one).__name__}."
            )
    names = [one.name for one in made]
    if len(set(names)) < len(names):
        raise TableError(
            f"calibrate: methods must have different names; got {', '.join(names)}. Compare one at a time."
        )
    order = {name: place for place, name in enumerate(METHODS)}
    return {one.name: one for one in sorted(made, key=lambda one: order.get(one.name, len(order)))}, {}


def _too_large(kind: type[Calibration], n: int, c: int) -> str | None:
    """Why a method is not compared by default on n images of c classes; None if it is."""
    again = "Name it to compare it all the same."
    if issubclass(kind, MixingScaling) and c > EXACT:
        return f"it has {c * c + c:,} parameters for {n:,} images. {again}"
    if issubclass(kind, ClassWiseIsotonic) and n < _FEWEST_PER_CLASS * c:
        return f"it fits each of the {c:,} classes to itself, and there are {n / c:.1f} images of each. {again}"
    return None


def _predicted(method: Calibration, table: Table, fold: Int64[Tensor, "n"]) -> dict[str, Tensor]:
    """What the labels say about every row, by the method fitted on the other folds."""
    whole: dict[str, Tensor] = {}
    for one in range(int(fold.max()) + 1):
        rows = (fold == one).nonzero()[:, 0]
        fitted = method.fit(chosen_rows(table, (fold != one).nonzero()[:, 0]))
        for name, values in _columns(fitted.apply(chosen_rows(table, rows))).items():
            whole.setdefault(name, torch.empty(len(table), dtype=values.dtype))[rows] = values
    return whole


def _columns(table: Table) -> dict[str, Tensor]:
    """Likelihood, Brier score, confidence and correctness of every row; blocks of logits are in memory in turn."""
    per_row = {"nll": measures.nll_per_row, "brier": measures.brier_per_row, "correct": measures.correct}
    parts = [
        [measures.confidence(logits), *(values(logits, label) for values in per_row.values())]
        for logits, label in labelled_logits(table, by="calibrate")
    ]
    return dict(zip(("confidence", *per_row), map(torch.cat, zip(*parts, strict=True)), strict=True))


def _quality(of: Mapping[str, Tensor], gap: GapToBest, seconds: float, bootstrap: Any) -> MethodQuality:
    """All numbers of one method on held-out rows."""
    return MethodQuality(
        gap_to_best=gap,
        nll=measures.interval(measures.mean, of["nll"], **bootstrap),
        brier=measures.interval(measures.mean, of["brier"], **bootstrap),
        ece=measures.interval(measures.ece, of["confidence"], of["correct"], **bootstrap),
        smooth_ece=measures.interval(measures.smooth_ece, of["confidence"], of["correct"], **bootstrap),
        accuracy=float(of["correct"].double().mean()),
        fit_seconds=seconds,
    )


def _gaps(
    columns: Mapping[str, Mapping[str, Tensor]], *, confidence: float, resamples: int, seed: int
) -> dict[str, GapToBest]:
    """By method, how much its NLL exceeds the lowest one; with a handful of wrong predictions, nothing is sure."""
    losses = [of["nll"] for of in columns.values()]
    draws = paired_draws(measures.mean, losses, resamples=resamples, seed=seed, by="calibrate")
    values = torch.stack([loss.mean() for loss in losses]).numpy()
    gaps = gap_to_best(-values, -draws, confidence=confidence)
    right = columns[NONE]["correct"]
    if min(int(right.sum()), int((~right).sum())) < FEWEST:
        gaps = [gap._replace(low=min(gap.low, 0.0)) for gap in gaps]
    return dict(zip(columns, gaps, strict=True))
