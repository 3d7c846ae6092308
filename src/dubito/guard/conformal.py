"""Conformal prediction sets: several classes instead of one, so that they contain the true one as often as required.

    s(x, y)   lac: 1 - p_y        aps: the sum of p over all classes at least as likely as y
    q         the ceil((n + 1) coverage)-th smallest s(x_i, y_i) of n calibration images
    set(x)    all y with s(x, y) <= q; with aps also the most likely one, so that no set is empty

For calibration images and a new one that are exchangeable, P(y in set(x)) >= coverage, whatever the model: the rank of
the new score among n + 1 is uniform (Vovk et al. 2005). LAC is Sadinle et al. 2019: the smallest sets on average, and
empty ones where no class is likely. APS is Romano et al. 2020: larger sets for harder images; ours does not draw lots
at the boundary, which is safe, and somewhat larger. Class-wise (Mondrian), there is one q per class, and the coverage
holds for the images of every class by itself.

It holds on average over calibration sets and over all images, accepted and refused together.
"""

import math
import warnings
from dataclasses import dataclass, field
from typing import final, get_args

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from dubito.choices import SetMethod
from dubito.errors import DubitoWarning, GuardError, NotFittedError, TableError, ValueRangeError
from dubito.guard.thresholds import check_levels
from dubito.metrics import wrong_predictions
from dubito.result import plain
from dubito.table import Table
from dubito.types import Json
from dubito.validate import check_choice


def needed_for_sets(coverage: float) -> int:
    """The fewest calibration images that allow a coverage: (n + 1) coverage <= n.

    >>> needed_for_sets(0.9), needed_for_sets(0.95)
    (9, 19)
    """
    return math.ceil(coverage / (1 - coverage) - 1e-9)


def conformal_quantile(scores: Float64[Tensor, "n"], coverage: float) -> float:
    """The ceil((n + 1) coverage)-th smallest score; infinite where n is too small.

    >>> conformal_quantile(torch.arange(1.0, 10.0).double(), 0.5)  # the fifth of nine
    5.0
    """
    k = math.ceil((len(scores) + 1) * coverage - 1e-9)
    return math.inf if k > len(scores) else float(scores.sort().values[k - 1])


def set_scores(logits: Float[Tensor, "n c"], method: SetMethod) -> Float64[Tensor, "n c"]:
    """s(x, y) of every class, in (0, 1]; of equally likely classes, the same.

    >>> set_scores(torch.tensor([[0.5, 0.3, 0.2]]).log(), "aps")[0, :2].tolist()
    [0.5..., 0.8...]
    """
    p = logits.double().softmax(-1)
    if method == "lac":
        return 1 - p
    ordered, order = p.sort(-1, descending=True)
    below = ordered.cumsum(-1)
    # Where classes tie, all of them have the sum behind the last.
    last_of_ties = torch.searchsorted(-ordered, -ordered, right=True) - 1
    return torch.empty_like(p).scatter_(-1, order, below.gather(-1, last_of_ties))


@final
@dataclass
class PredictionSets:
    """Sets of classes that contain the true one with a guaranteed probability.

    Attributes:
        coverage: That probability, at least.
        method: "lac": the smallest sets on average, sometimes empty. "aps": never empty, and large where there are many
            classes, as it counts all the little probabilities too.
        class_wise: For every class by itself, which needs many images of each. A class with too few is in all sets.
        thresholds_: (1), or (c) class-wise: q, once fitted.
        rows_: How many images they are from.
    """

    coverage: float = 0.9
    method: SetMethod = "lac"
    class_wise: bool = False
    thresholds_: Float64[Tensor, "q"] | None = field(default=None, init=False, repr=False)
    rows_: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_levels(coverage=self.coverage)
        check_choice(self.method, get_args(SetMethod), by="sets", what="method")

    def fit(self, table: Table) -> "PredictionSets":
        """Take the quantiles from labelled images that nothing else was learned from.

        Raises:
            GuardError: There are fewer images than the coverage needs; the message says how many it takes.
        """
        wrong_predictions(table, by="sets.fit")
        least = needed_for_sets(self.coverage)
        if len(table) < least:
            raise GuardError(
                f"prediction sets of coverage {self.coverage:g} need at least {least} labelled images; {table.name} "
                f"has {len(table)} for it. Pass more, or choose a smaller coverage."
            )
        batches = table.batches("logit", "label")
        own = [set_scores(batch.logit, self.method).gather(1, batch.label[:, None])[:, 0] for batch in batches]
        scores, label, c = torch.cat(own), table.label, table.shape("logit")[1]
        groups = [scores[label == one] for one in range(c)] if self.class_wise else [scores]
        self.thresholds_ = torch.tensor([conformal_quantile(one, self.coverage) for one in groups], dtype=torch.float64)
        self.rows_ = len(table)
        lacking = int(self.thresholds_.isinf().sum())
        requires = f"sets: class-wise coverage {self.coverage:g} needs at least {least} images of a class; "
        repair = "Pass more images of them, or leave class_wise out."
        if lacking == len(self.thresholds_):
            raise GuardError(f"{requires}none of {c} classes has so many in {table.name}. {repair}")
        if lacking:
            text = f"{requires}{lacking} of {c} classes have fewer in {table.name} and are put into every set. {repair}"
            warnings.warn(text, DubitoWarning, stacklevel=2)
        return self

    def sets(self, table: Table) -> Bool[Tensor, "n c"]:
        """Of every row, which classes are in its set."""
        if self.thresholds_ is None:
            raise NotFittedError("sets: fit(table) comes first, with labelled images that nothing was learned from.")
        table.require("logit", by="sets")
        c, q = table.shape("logit")[1], self.thresholds_
        if self.class_wise and len(q) != c:
            raise TableError(
                f"sets: {len(q)} classes were fitted; {table.name} has {c}. Use a table of the same model."
            )
        parts = [torch.zeros(0, c, dtype=torch.bool)]
        for batch in table.batches("logit"):
            inside = set_scores(batch.logit, self.method) <= q
            if self.method == "aps":
                inside.scatter_(1, batch.logit.argmax(1, keepdim=True), True)
            parts.append(inside)
        return torch.cat(parts)

    def classes(self, table: Table) -> list[tuple[int, ...]]:
        """Of every row, the classes of its set, most likely first."""
        logit = table.logit
        return [
            tuple(inside[logit[row, inside].argsort(descending=True, stable=True)].tolist())
            for row, inside in enumerate(one.nonzero()[:, 0] for one in self.sets(table))
        ]

    def to_json(self) -> Json:
        """Settings and quantiles; what is infinite as null."""
        thresholds = plain([] if self.thresholds_ is None else self.thresholds_)
        return {**plain(self), "thresholds": thresholds, "rows": self.rows_}

    @classmethod
    def from_json(cls, saved: Json) -> "PredictionSets":
        """Read back what `to_json` returned."""
        sets = cls(saved["coverage"], saved["method"], saved["class_wise"])
        q = [math.inf if one is None else float(one) for one in saved["thresholds"]]
        sets.thresholds_, sets.rows_ = torch.tensor(q, dtype=torch.float64) if q else None, int(saved["rows"])
        return sets


def fitted_sets(sets: object, table: Table, *, labelled: bool) -> PredictionSets | None:
    """A fitted copy of the user's sets; of the default ones, None where labels or images do not suffice."""
    if isinstance(sets, PredictionSets):
        return PredictionSets(sets.coverage, sets.method, sets.class_wise).fit(table)
    if not isinstance(sets, bool):
        raise ValueRangeError(
            f"Guard.fit: sets must be PredictionSets(...), True or False; got {sets!r}. "
            f"Use sets=PredictionSets(coverage=...)."
        )
    default = PredictionSets()
    return default.fit(table) if sets and labelled and len(table) >= needed_for_sets(default.coverage) else None
