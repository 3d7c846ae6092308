"""Label issues: labels that may well be wrong, each with the probability that it is.

    q          = softmax(logits / T)                              the chance of every class to be the true one
    P(y | x)   = (1 - e) q_y + e (1 - q_y) / (c - 1)              the label is the true class, or by mistake another one
    P(wrong)   = e (1 - q_y) / (c - 1) / P(y | x)                 by Bayes' rule

T and e, the share of wrong labels, are those under which the labels of the table are most likely: the temperature
absorbs over- and under-confidence, and what no temperature explains, confident disagreement, is label noise. So a weak
model flags little instead of much. The probability is as good as its assumption, that mistakes do not depend on the
image: an image on which the model is confidently wrong looks like one whose label is.

Reported are labels with P(wrong) >= 0.1, the most probable first, as far as two thirds of the list are wrong by
estimate: a good model finds nearly all, and the list of a weak one ends early. Both limits were chosen on the first
3,584 test images of CIFAR-10 and every second of 2,000 ImageNet photographs; experiments/find_label_issues.py measures
them on the others.

Predictions must come from a model that was not trained on these labels. By default they are the model's own if the
labels are its classes; else those of linear classifiers on the features, each fitted without the images it predicts,
and, in a second round, without those whose labels the first round contradicts.

Confident learning (Northcutt et al. 2021, 1911.00068) counts disagreements above a threshold per class instead, and
has no probabilities; the mixture of a calibrated model and noise is ours.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float64, Int64
from scipy.optimize import minimize_scalar

from dubito.errors import TableError
from dubito.heads.linear_probe import fit_folds, pool_scale
from dubito.metrics import Interval, proportion
from dubito.result import Result, cell
from dubito.scores.softmax import check_two_classes
from dubito.table import Table
from dubito.types import Json, finite_batches
from dubito.validate import check_classes, check_model_labels, check_number, check_rows, check_seed, has_model_labels

_SAMPLE = 20_000
"""Rows on which temperature and noise are fitted, at most: both are known to two digits then."""
_TEMPERATURES = (0.05, 20.0)
_TOLERANCE = 0.03
"""Of the logarithm of the temperature."""
_STEPS = 50
_MEMORISED = 0.995
_WEAK, _SHOWN = 0.8, 5.41
"""Of predictions that agree with fewer labels, a likelihood ratio must show that some are wrong (confidence 99.9 %)."""
_LEAST, _WRONG = 0.1, 2 / 3
"""By default: the smallest probability that is reported, and the share of the list that must be wrong by estimate."""


def find_label_issues(
    table: Table, *, least: float | None = None, cross_validate: bool | None = None, folds: int = 5, seed: int = 0
) -> "LabelIssues":
    """Find images whose labels may well be wrong, the most probable first.

    Args:
        table: A table with labels, and with logits or features.
        least: The smallest probability that is reported, above 0 and at most 1. Default: 0.1, or as much more as it
            takes for two thirds of the reported labels to be wrong, by estimate.
        cross_validate: Whether predictions are those of linear classifiers on the features, each fitted on the other
            images; for labels that the model was trained on. Default: only if the labels are not the model's classes.
        folds: The number of parts of the table that are predicted in turn, with cross-validation.
        seed: Seed of these parts.

    >>> logit = 6 * torch.eye(2)[[0, 1] * 20]
    >>> label = torch.tensor([0, 1] * 19 + [1, 1])  # of row 38, the model says 0
    >>> find_label_issues(Table(logit=logit, label=label)).rows.tolist()
    [38]
    """
    by = "find_label_issues"
    check_rows(table, by=by, least=2)
    table.require("label", by=by)
    if least is not None:
        check_number(least, "(0, 1]", by=by, what="least", hint="Leave it out for the default.")
    label = _labels(table)
    if cross_validate is None:
        cross_validate = "logit" not in table or not has_model_labels(table)
    if not cross_validate:
        check_model_labels(table, by=by)
        check_classes(table.label, table.shape("logit")[1], by=by)
        check_two_classes(table.rows(slice(0, 1)).logit, by)
    source = _cross_validated(table, label, folds, seed) if cross_validate else table
    noise = _fit_noise(source, label)
    own, other, predicted = _probabilities(source, label, noise.temperature)
    wrong = noise.posterior(own)
    order = np.argsort(-wrong, kind="stable")
    rows = order[: _default_count(wrong[order]) if least is None else int((wrong >= least).sum())]
    return LabelIssues(
        name=table.name,
        rows=rows,
        ids=table.row_ids(rows),
        label=label[rows],
        suggested=other[rows],
        probability=wrong[rows],
        images=len(table),
        accuracy=proportion(int((predicted == label).sum()), len(label)),
        wrong_labels=float(wrong.sum()),
        cross_validated=cross_validate,
        classes=None if table.label_names is None else list(table.label_names),
    )


@final
@dataclass(frozen=True)
class LabelIssues(Result):
    """Labels that may well be wrong, the most probable first.

    Attributes:
        name: The name of the table.
        rows: The rows of the issues.
        ids: Their ids.
        label: Their labels.
        suggested: The most probable other class of each.
        probability: The probability that the label is wrong.
        images: The number of images in the table.
        accuracy: The share of labels that the predictions agree with.
        wrong_labels: How many labels of the table are wrong by estimate, reported or not.
        cross_validated: Whether linear classifiers on the features made the predictions, not the model.
        classes: The class names, where they are known.
    """

    text_rows: ClassVar = 20
    keys: ClassVar = ("id", "label", "suggested", "probability", "row")

    name: str
    rows: Int64[np.ndarray, "k"]
    ids: Sequence[str]
    label: Int64[np.ndarray, "k"]
    suggested: Int64[np.ndarray, "k"]
    probability: Float64[np.ndarray, "k"]
    images: int
    accuracy: Interval
    wrong_labels: float
    cross_validated: bool
    classes: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def expected_right(self) -> float:
        """The share of the reported labels that are right after all, by estimate; 0 without any."""
        return float(1 - self.probability.mean()) if len(self) else 0.0

    def title(self) -> str:
        """How many there are."""
        issues = f"{len(self)} labels" if len(self) != 1 else "1 label"
        return f"{self.name}: {issues} may be wrong, of {self.images} images"

    def records(self) -> list[dict[str, Any]]:
        """One row per issue; labels by class name where names are known."""
        names = dict(enumerate(self.classes or ()))
        labels = ([names.get(one, str(one)) for one in column.tolist()] for column in (self.label, self.suggested))
        columns = (self.ids, *labels, self.probability.tolist(), self.rows.tolist())
        return [dict(zip(self.keys, values, strict=True)) for values in zip(*columns, strict=True)]

    def cell(self, key: str, value: Any) -> str:
        """Class names without their synonyms."""
        return str(value).split(",")[0] if key in ("label", "suggested") else cell(value)

    def findings(self) -> list[str]:
        """How good the predictions are, and how many of the issues to expect wrong."""
        who = "Cross-validated linear classifiers" if self.cross_validated else "The model's predictions"
        accuracy, low, high, _ = self.accuracy
        sentences = [f"{who} agree with {accuracy:.1%} [{low:.1%}, {high:.1%}] of the labels."]
        if len(self):
            right = round(self.expected_right * len(self))
            sentences.append(f"Of the {len(self)} labels above, expect about {right} to be right after all.")
        hidden = self.wrong_labels - float(self.probability.sum())
        if hidden >= 1 and hidden > self.wrong_labels / 2:
            sentences.append(
                f"About {hidden:.0f} more labels are wrong by estimate, which these predictions cannot point out: "
                f"a more accurate model would."
            )
        if self.wrong_labels == 0 and accuracy < _WEAK:
            sentences.append(
                "Errors of these predictions explain whatever disagrees: no label is shown to be wrong. A more "
                "accurate model may find some."
            )
        if not self.cross_validated and accuracy >= _MEMORISED:
            sentences.append(
                "If the model was trained on these labels, it has learned the wrong ones, too, and finds few of them: "
                "cross-validate, or use a model that was not."
            )
        return sentences

    def to_dict(self) -> Json:
        """Plain values, one entry per issue."""
        return {
            "table": self.name,
            "images": self.images,
            "accuracy": self.accuracy._asdict(),
            "wrong_labels": self.wrong_labels,
            "expected_right": self.expected_right,
            "cross_validated": self.cross_validated,
            "findings": self.findings(),
            "issues": self.records(),
        }


def _default_count(probability: Float64[np.ndarray, "n"]) -> int:
    """How many labels to report, of probabilities in falling order."""
    wrong_share = np.cumsum(probability) / np.arange(1, len(probability) + 1)
    return int(((probability >= _LEAST) & (wrong_share >= _WRONG)).sum())


class _Noise(NamedTuple):
    """What the labels say about the model and about themselves.

    Attributes:
        temperature: Logits are divided by it.
        rate: The share of wrong labels.
        classes: The number of classes.
    """

    temperature: float
    rate: float
    classes: int

    def posterior(self, own: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """The probability that labels are wrong, from the model's probabilities of them."""
        mistaken = self.rate * (1 - own) / (self.classes - 1)
        total = mistaken + (1 - self.rate) * own
        wrong: np.ndarray = np.divide(mistaken, total, out=np.zeros_like(own), where=total > 0)
        return wrong


def _fit_noise(table: Table, label: Int64[np.ndarray, "n"]) -> _Noise:
    """Temperature and noise of maximal likelihood, on at most 20,000 evenly spaced rows."""
    rows = np.unique(np.linspace(0, len(label) - 1, min(len(label), _SAMPLE)).round().astype(np.int64))
    logit = np.concatenate([batch.logit.numpy() for batch in _logits(table.rows(torch.from_numpy(rows)))])
    shifted = np.ascontiguousarray(logit, dtype=np.float32)
    shifted -= shifted.max(axis=1, keepdims=True)
    of_label, classes = shifted[np.arange(len(rows)), label[rows]].astype(np.float64), logit.shape[1]

    def own(log_temperature: float) -> Float64[np.ndarray, "n"]:
        scale = np.float32(np.exp(-log_temperature))
        # A probability of zero would leave no doubt about any label.
        q: np.ndarray = np.maximum(np.exp(scale * of_label) / np.exp(scale * shifted).sum(axis=1), 1e-12)
        return q

    def loss(log_temperature: float) -> float:
        q = own(log_temperature)
        rate = _rate(q, classes)
        return -float(np.log(q + rate * ((1 - q) / (classes - 1) - q)).mean())

    def without_noise(log_temperature: float) -> float:
        return -float(np.log(own(log_temperature)).mean())

    best, least = _minimum(loss)
    if float((of_label == 0).mean()) < _WEAK:  # errors of a weak model may explain whatever disagrees
        plain, largest = _minimum(without_noise)
        if len(rows) * (min(largest, np.log(classes)) - least) < _SHOWN:  # or predictions that say nothing at all
            return _Noise(float(np.exp(plain)), 0.0, classes)
    return _Noise(float(np.exp(best)), _rate(own(best), classes), classes)


def _minimum(loss: Callable[[float], float]) -> tuple[float, float]:
    """The logarithm of the best temperature, and the loss there."""
    optimum = minimize_scalar(loss, bounds=np.log(_TEMPERATURES), method="bounded", options={"xatol": _TOLERANCE})
    return float(optimum.x), float(optimum.fun)


def _rate(q: Float64[np.ndarray, "n"], classes: int) -> float:
    """The noise e of maximal likelihood, sum log(q + e (a - q)) with a = (1 - q) / (c - 1): concave, by Newton."""
    gain = (1 - q) / (classes - 1) - q
    low, high, rate = 0.0, 1 - 1 / classes, 0.05  # beyond that, labels would be worse than chance
    for _ in range(_STEPS):
        ratio = gain / (q + rate * gain)
        slope, curvature = float(ratio.sum()), float(ratio @ ratio)
        low, high = (rate, high) if slope > 0 else (low, rate)
        following = rate + slope / curvature if curvature > 0 else rate
        following = following if low < following < high else (low + high) / 2
        if abs(following - rate) < 1e-5:
            break
        rate = following
    return rate


def _probabilities(
    table: Table, label: Int64[np.ndarray, "n"], temperature: float
) -> tuple[Float64[np.ndarray, "n"], Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
    """Of every row: the label's probability, the most probable other class, and the most probable class."""
    own, other, predicted = np.empty(len(label)), np.empty_like(label), np.empty_like(label)
    start = 0
    for batch in _logits(table):
        rows = slice(start, start + len(batch))
        z, places = batch.logit.double().numpy() / temperature, (np.arange(len(batch)), label[rows])
        predicted[rows] = z.argmax(axis=1)
        z -= z.max(axis=1, keepdims=True)
        own[rows] = np.exp(z[places]) / np.exp(z).sum(axis=1)
        z[places] = -np.inf
        other[rows] = z.argmax(axis=1)
        start += len(batch)
    return own, other, predicted


def _logits(table: Table) -> Iterator[Table]:
    return finite_batches(table.batches("logit"), table.name, by="find_label_issues")


def _labels(table: Table) -> Int64[np.ndarray, "n"]:
    label: np.ndarray = table.label.numpy().astype(np.int64)
    if (label < 0).any():
        raise TableError(
            f"find_label_issues: all labels must be from 0 on; {(label < 0).sum()} of {len(label)} of {table.name} are "
            f"below, as for images without a label. Leave them out: table.rows(table.label >= 0)."
        )
    return label


def _cross_validated(table: Table, label: Int64[np.ndarray, "n"], folds: int, seed: int) -> Table:
    """Logits of linear classifiers, each of images that it was not fitted on."""
    by = "find_label_issues"
    table.require("feature", by=by)
    check_number(folds, f"[2, {len(table)}]", by=by, what="folds", whole=True, hint="5 are usual.")
    check_seed(seed, by=by)
    mean, scale = pool_scale(table, by=by)
    x = (table.whole("feature").double() - mean).numpy() / scale
    classes = max(2, int(label.max()) + 1)
    # Every class spreads over the folds: rows are dealt out in turn, class by class, in random order.
    drawn = np.random.default_rng(seed).permutation(len(label))
    fold = np.empty_like(label)
    fold[drawn[np.argsort(label[drawn], kind="stable")]] = np.arange(len(label)) % folds
    kept = np.ones(len(label), dtype=bool)
    logit = np.empty((len(label), classes), dtype=np.float32)
    for _ in range(2):
        for one, weights in enumerate(fit_folds(x[kept], label[kept], fold[kept], classes)):
            logit[fold == one] = x[fold == one] @ weights[:-1] + weights[-1]
        # Classifiers that learn from wrong labels predict them, too: the second time, they learn without the doubtful.
        kept = logit.argmax(axis=1) == label
        if np.unique(label[kept]).size < np.unique(label).size:
            break
    return Table(name=table.name, logit=logit)
