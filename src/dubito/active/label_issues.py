"""Label issues: labels that may well be wrong, each with the probability that it is.

    q          = softmax(logits / T)                              the chance of every class to be the true one
    N_ky       = (1 - s) / (c - 1) + s S_ky / sum_j!=k S_kj       a mistaken label of class k: any other, or a similar
    S_ky       = sum over images of q_k q_y                       classes that the model hesitates between are similar
    m_y        = sum_k!=y q_k N_ky                                the chance of a label as a mistake
    P(wrong)   = e m_y / (e m_y + (1 - e) q_y)                    by Bayes' rule

T and e, the share of wrong labels, are those under which the labels of the table are most likely with s = 0: the
temperature absorbs over- and under-confidence, and what no temperature explains, confident disagreement, is label
noise; one wrong label is added, since that none is seen does not rule out any. So a weak model flags little instead of
much. s = 1 / (2 + W) falls from one half with the number W of wrong labels by estimate: people mistake similar classes,
but so do models, and once there are wrong labels to find, taking all mistakes for equally likely finds more of them,
unless all are between similar classes. The probability is as good as its assumption, that mistakes depend on the image
only through its class: an image on which the model is confidently wrong looks like one whose label is.

Reported are labels with P(wrong) >= 0.1, the most probable first, as far as two thirds of the list are wrong by
estimate: a good model finds nearly all, and the list of a weak one ends early. Both limits were chosen on the first
3,584 test images of CIFAR-10 and every second of 2,000 ImageNet photographs; experiments/find_label_issues.py measures
them on the others. Where no label is shown to be wrong, the most suspicious hundredth of the table is reported instead:
people contradict more of these than of others, though errors of the model explain them as well. The one half and the
hundredth were chosen while looking at the labels of CIFAR-10 that people contradict; no others have been measured.

Predictions must come from a model that was not trained on these labels. By default they are the model's own if the
labels are its classes; else those of linear classifiers on the features, each fitted without the images it predicts,
and, in a second round, without those whose labels the first round contradicts.

Confident learning (Northcutt et al. 2021, 1911.00068) counts disagreements above a threshold per class instead, and
has no probabilities; the mixture of a calibrated model and noise is ours.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from scipy.optimize import minimize_scalar

from dubito.errors import TableError
from dubito.heads.linear_probe import fit_folds, pool_scale
from dubito.metrics import Interval, proportion
from dubito.result import Result, cell
from dubito.scores.softmax import check_two_classes
from dubito.table import Table
from dubito.types import Json, finite_batches
from dubito.validate import check_classes, check_model_labels, check_number, check_rows, check_seed, has_model_labels

_SAMPLE = 10_000
"""Rows on which temperature and noise are fitted, at most: more change neither of them much."""
_SUBSAMPLE, _NEAR = 2_500, 0.1
"""Rows of a part that shows the temperature roughly, and how far the logarithm of the best one may be from theirs."""
_SIMILAR = 5_000
"""Of these, rows on which similar classes are found, at most."""
_LEAST_SHARE = 0.01
"""Of mistakes between similar classes; a smaller one changes nothing."""
_TEMPERATURES = (0.05, 20.0)
_TOLERANCE = 0.03
"""Of the logarithm of the temperature."""
_STEPS = 50
_MEMORISED = 0.995
_WEAK, _SHOWN = 0.8, 5.41
"""Of predictions that agree with fewer labels, a likelihood ratio must show that some are wrong (confidence 99.9 %)."""
_LEAST, _WRONG = 0.1, 2 / 3
"""By default: the smallest probability that is reported, and the share of the list that must be wrong by estimate."""
_SUSPICIOUS = 0.01
"""Share of the table that is reported where no label is shown to be wrong."""


def find_label_issues(
    table: Table, *, least: float | None = None, cross_validate: bool | None = None, folds: int = 5, seed: int = 0
) -> "LabelIssues":
    """Find images whose labels may well be wrong, the most probable first.

    Args:
        table: A table with labels, and with logits or features.
        least: The smallest probability that is reported, from 0, which ranks all labels, to 1. Default: 0.1, or as much
            more as it takes for two thirds of the reported labels to be wrong, by estimate; if no label is, the most
            suspicious hundredth of the table, as far as the predictions contradict it.
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
        check_number(least, "[0, 1]", by=by, what="least", hint="Leave it out for the default.")
    label = _labels(table)
    if cross_validate is None:
        cross_validate = "logit" not in table or not has_model_labels(table)
    if not cross_validate:
        check_model_labels(table, by=by)
        check_classes(table.label, table.shape("logit")[1], by=by)
        check_two_classes(table.rows(slice(0, 1)).logit, by)
    predictions = _cross_validated(table, label, folds, seed) if cross_validate else table
    noise = _fit_noise(predictions, label)
    own, mistaken, other, predicted = _probabilities(predictions, label, noise)
    wrong = noise.posterior(own, mistaken)
    order = np.argsort(-wrong, kind="stable")
    count = _default_count(wrong[order]) if least is None else int((wrong >= least).sum())
    suspicious = least is None and not count
    if suspicious:
        contradicted = order[predicted[order] != label[order]]
        rows = contradicted[: math.ceil(_SUSPICIOUS * len(label))]
    else:
        rows = order[:count]
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
        suspicious=suspicious,
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
        suspicious: Whether no label is shown to be wrong, so that these are only the most suspicious ones.
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
    suspicious: bool = False
    classes: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def expected_right(self) -> float:
        """The share of the reported labels that are right after all, by estimate; 0 without any."""
        return float(1 - self.probability.mean()) if len(self) else 0.0

    def title(self) -> str:
        """How many there are."""
        if self.suspicious:
            most = f"; most suspicious: {len(self)}" if len(self) else ""
            return f"{self.name}: no label is shown to be wrong, of {self.images} images{most}"
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
        if self.suspicious and len(self):
            sentences.append(
                "Errors of these predictions explain the disagreements as well as wrong labels do. The list is the "
                "most suspicious hundredth of the images: most of its labels are probably right."
            )
        elif len(self):
            right = round(self.expected_right * len(self))
            sentences.append(f"Of the {len(self)} labels above, expect about {right} to be right after all.")
        hidden = self.wrong_labels - float(self.probability.sum())
        if hidden >= 1 and hidden > self.wrong_labels / 2:
            sentences.append(
                f"About {hidden:.0f} more labels are wrong by estimate, which these predictions cannot point out: "
                f"a more accurate model would."
            )
        if self.suspicious and accuracy < _WEAK:
            sentences.append("A more accurate model may find some that are.")
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
            "suspicious": self.suspicious,
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
        share: The share of these that are mistakes between similar classes.
        similar: Row y has the probabilities that such a mistake turns each class into y; None if there are none.
    """

    temperature: float
    rate: float
    share: float = 0.0
    similar: Float32[np.ndarray, "c c"] | None = None

    def mistaken(
        self, own: Float64[np.ndarray, "n"], q: Float32[np.ndarray, "n c"], label: Int64[np.ndarray, "n"]
    ) -> Float64[np.ndarray, "n"]:
        """The probability of each label if it is a mistake, where own and q are its and all classes' chances."""
        uniform: np.ndarray = (1 - own) / (q.shape[1] - 1)
        if self.similar is None:
            return uniform
        alike: np.ndarray = np.einsum("nc,nc->n", q, self.similar[label])
        return (1 - self.share) * uniform + self.share * alike

    def posterior(self, own: Float64[np.ndarray, "n"], mistaken: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """The probability that labels are wrong, from their probabilities if they are right and if they are not."""
        by_mistake = self.rate * mistaken
        total = by_mistake + (1 - self.rate) * own
        wrong: np.ndarray = np.divide(by_mistake, total, out=np.zeros_like(own), where=total > 0)
        return wrong


def _fit_noise(table: Table, label: Int64[np.ndarray, "n"]) -> _Noise:
    """Temperature and noise of maximal likelihood, on at most 10,000 evenly spaced rows."""
    rows, sample = np.arange(len(label)), table
    if len(label) > _SAMPLE:
        rows = np.linspace(0, len(label) - 1, _SAMPLE).round().astype(np.int64)
        sample = table.rows(torch.from_numpy(rows))
    logit = np.concatenate([batch.logit.numpy() for batch in _logits(sample)])
    shifted = logit.astype(np.float32)
    shifted -= shifted.max(axis=1, keepdims=True)
    fit, classes = _Likelihood(shifted, label[rows]), shifted.shape[1]
    best, least = fit.minimum(fit.with_noise)
    rate = _rate(fit.own(best), classes)
    if float((fit.of_label == 0).mean()) < _WEAK:  # errors of a weak model may explain whatever disagrees
        plain, largest = fit.minimum(fit.without_noise)
        if len(rows) * (min(largest, np.log(classes)) - least) < _SHOWN:  # or predictions that say nothing at all
            best, rate = plain, 0.0
    wrong, temperature = len(label) * rate, float(np.exp(best))
    rate = (len(rows) * rate + 1) / (len(rows) + 2)  # Laplace's rule
    if (share := 1 / (2 + wrong)) < _LEAST_SHARE:
        return _Noise(temperature, rate)
    return _Noise(temperature, rate, share, _similar(shifted, temperature))


class _Likelihood:
    """How likely labels are, of logits whose largest is 0."""

    def __init__(self, shifted: Float32[np.ndarray, "n c"], label: Int64[np.ndarray, "n"]) -> None:
        self.shifted, self.label = shifted, label
        self.of_label = shifted[np.arange(len(label)), label].astype(np.float64)
        self._near = 0.05  # the last rate, from which the search for the next one starts
        self._exp, self._ones = np.empty_like(shifted), np.ones(shifted.shape[1], dtype=np.float32)

    def own(self, log_temperature: float) -> Float64[np.ndarray, "n"]:
        """The probabilities of the labels."""
        scale = np.exp(-log_temperature)
        np.multiply(self.shifted, np.float32(scale), out=self._exp)
        total = np.exp(self._exp, out=self._exp) @ self._ones
        # With a probability of zero, a label would be wrong for certain.
        q: np.ndarray = np.maximum(np.exp(scale * self.of_label) / total, 1e-12)
        return q

    def with_noise(self, log_temperature: float) -> float:
        """The loss at the best rate."""
        q, classes = self.own(log_temperature), self.shifted.shape[1]
        self._near = rate = _rate(q, classes, self._near)
        return -float(np.log(q + rate * ((1 - q) / (classes - 1) - q)).mean())

    def without_noise(self, log_temperature: float) -> float:
        """The loss if no label is wrong."""
        return -float(np.log(self.own(log_temperature)).mean())

    def minimum(self, loss: Callable[[float], float]) -> tuple[float, float]:
        """The logarithm of the best temperature, and the loss there; of many rows, some show where to look."""
        low, high = np.log(_TEMPERATURES)
        if (step := len(self.label) // _SUBSAMPLE) > 1:
            some = _Likelihood(np.ascontiguousarray(self.shifted[::step]), self.label[::step])
            near, _ = some.minimum(getattr(some, loss.__name__))
            low, high = max(low, near - _NEAR), min(high, near + _NEAR)
        result = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": _TOLERANCE})
        return float(result.x), float(result.fun)


def _similar(logit: Float32[np.ndarray, "n c"], temperature: float) -> Float32[np.ndarray, "c c"]:
    """Row y has the probabilities that a mistake between similar classes turns each class into y."""
    q = np.exp(logit[:: math.ceil(len(logit) / _SIMILAR)] / np.float32(temperature))
    q /= q.sum(axis=1, keepdims=True)
    both: np.ndarray = q.T @ q
    np.fill_diagonal(both, 0)
    total = both.sum(axis=0)  # the matrix is symmetric, and a mistake turns a class into some other one
    similar: np.ndarray = np.divide(both, total, out=np.full_like(both, 1 / (len(both) - 1)), where=total > 0)
    return similar


def _rate(q: Float64[np.ndarray, "n"], classes: int, start: float = 0.05) -> float:
    """The noise e of maximal likelihood, sum log(q + e (a - q)) with a = (1 - q) / (c - 1): concave, by Newton."""
    gain = (1 - q) / (classes - 1) - q
    low, high, rate = 0.0, 1 - 1 / classes, start  # beyond that, labels would be worse than chance
    for _ in range(_STEPS):
        ratio = gain / (q + rate * gain)
        slope, curvature = float(ratio.sum()), float(np.einsum("n,n->", ratio, ratio))  # faster than threads of @
        low, high = (rate, high) if slope > 0 else (low, rate)
        following = rate + slope / curvature if curvature > 0 else rate
        following = following if low < following < high else (low + high) / 2
        if abs(following - rate) < 1e-5:
            break
        rate = following
    return rate


def _probabilities(
    table: Table, label: Int64[np.ndarray, "n"], noise: _Noise
) -> tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "n"], Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
    """Of every row: the label's probability if right and if mistaken, the likeliest other class and the likeliest."""
    own, other, predicted = np.empty(len(label)), np.empty_like(label), np.empty_like(label)
    mistaken, start = np.empty(len(label)), 0
    for batch in _logits(table):
        rows = slice(start, start + len(batch))
        z, places = batch.logit.numpy().astype(np.float32), (np.arange(len(batch)), label[rows])
        of_label = z[places].astype(np.float64)
        z[places] = -np.inf
        other[rows] = z.argmax(axis=1)
        of_other = z[places[0], other[rows]].astype(np.float64)
        z[places] = of_label
        tied = (of_label == of_other) & (label[rows] < other[rows])  # as argmax does
        predicted[rows] = np.where((of_label > of_other) | tied, label[rows], other[rows])
        highest = np.maximum(of_label, of_other)
        z -= highest[:, None].astype(np.float32)
        z *= np.float32(1 / noise.temperature)
        q = np.exp(z, out=z)
        total = q @ np.ones(q.shape[1], dtype=np.float32)
        own[rows] = np.exp((of_label - highest) / noise.temperature) / total
        q /= total[:, None]
        mistaken[rows] = noise.mistaken(own[rows], q, label[rows])
        start += len(batch)
    return own, mistaken, other, predicted


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
        # Classifiers that learn from wrong labels predict them, too: the second time, they learn without
        # the labels that the first ones contradict.
        kept = logit.argmax(axis=1) == label
        if np.unique(label[kept]).size < np.unique(label).size:
            break
    return Table(name=table.name, logit=logit)
