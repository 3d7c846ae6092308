"""Conformal prediction sets: several classes instead of one, so that they contain the true one as often as required.

    s(x, y)   lac: 1 - p_y        aps: the sum of p over all classes at least as likely as y, but 0 for the most likely
                                  class        others: `set_scores`
    q         the ceil((n + 1) coverage)-th smallest s(x_i, y_i) of n calibration images
    set(x)    all y with s(x, y) <= q; except with lac, that is always the most likely class, so that no set is empty

For calibration images and a new one that are exchangeable, P(y in set(x)) >= coverage, whatever the model: the rank of
the new score among n + 1 is uniform (Vovk et al. 2005). LAC is Sadinle et al. 2019: the smallest sets on average, and
empty ones where no class is likely. APS is Romano et al. 2020: larger sets for harder images; ours does not draw lots
at the boundary. RAPS and SAPS are for many classes; see `set_scores`. Class-wise
(Mondrian), there is one q per class, and the coverage holds for the images of every class by itself; with per, one per
group of images, and it holds for those of every group; with clusters, see `clusters`. Weighted, calibration images have
the weight w_i and a new one w, the ratio of how likely they are in the target and here; q is then the smallest score
with sum of w_i over s_i <= q at least coverage (sum of all w_i + w), and the coverage holds in the target, if p(y | x)
is the same there and the ratio is right (Tibshirani et al. 2019).

It holds on average over calibration sets and over all images, accepted and refused together.
"""

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, final, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from dubito.choices import SetMethod
from dubito.errors import DubitoWarning, GuardError, NotFittedError, TableError, ValueRangeError
from dubito.guard.clusters import cluster_classes
from dubito.guard.groups import Group, group_codes, groups_in, some_groups
from dubito.guard.set_scores import FREE_RANKS, PENALTY, label_scores, set_scores, sets_up_to
from dubito.guard.thresholds import check_levels
from dubito.metrics import wrong_predictions
from dubito.result import plain
from dubito.table import Table
from dubito.table.provenance import Provenance, check_provenance
from dubito.types import Json, finite_batches
from dubito.validate import check_choice, check_number, check_per_row, check_seed


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


def weighted_quantiles(
    scores: Float64[np.ndarray, "n"],
    weights: Float64[np.ndarray, "n"],
    new: Float64[np.ndarray, "m"],
    coverage: float,
) -> Float64[np.ndarray, "m"]:
    """For every new image of weight w, the smallest score with sum of w_i up to it >= coverage (sum of all w_i + w).

    >>> weighted_quantiles(np.arange(1.0, 10.0), np.ones(9), np.array([1.0, 90.0]), 0.5).tolist()  # the fifth of nine
    [5.0, inf]
    """
    order = np.argsort(scores, kind="stable")
    total, ordered = np.cumsum(weights[order]), np.append(scores[order], np.inf)
    needed = coverage * (total[-1] + new)
    return np.asarray(ordered[np.searchsorted(total, needed * (1 - 1e-12))])


@final
@dataclass
class PredictionSets:
    """Sets of classes that contain the true one with a guaranteed probability.

    Attributes:
        coverage: That probability, at least.
        method: "lac": the smallest sets on average, sometimes empty. "aps": never empty, and large where there are many
            classes, as it counts all the little probabilities too. "raps" and "saps": never empty, and smaller.
        class_wise: For every class separately, which needs many images of each. A class with too few is in all sets.
        per: For every group of images separately: the column with groups. Images of a group with too few calibration
            images, or with none, have all classes in their sets.
        clusters: For so many clusters of classes, where class_wise lacks images; 0 for none.
        penalty: lambda of raps and saps; by default 0.01 and 0.1. Choose it on other images than these.
        free_ranks: k of raps: as many classes have no penalty.
        seed: Of the images that clusters are made from.
        thresholds_: (1), or one per class or group: q, once fitted.
        rows_: How many images they are from.
        classes_: How many classes there are.
        provenance_: Which model the images' table belongs to, if known; tables of another one are refused.
        groups_: The groups, with per.
        marginal_: Classes that have the quantile of all images, for lack of their own: with clusters.
    """

    coverage: float = 0.9
    method: SetMethod = "lac"
    class_wise: bool = False
    per: str | None = None
    clusters: int = 0
    penalty: float | None = None
    free_ranks: int = FREE_RANKS
    seed: int = 0
    thresholds_: Float64[Tensor, "q"] | None = field(default=None, init=False, repr=False)
    rows_: int = field(default=0, init=False, repr=False)
    classes_: int = field(default=0, init=False, repr=False)
    provenance_: Provenance | None = field(default=None, init=False, repr=False)
    groups_: tuple[Group, ...] = field(default=(), init=False, repr=False)
    marginal_: tuple[int, ...] = field(default=(), init=False, repr=False)
    _weighted: tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "n"]] | None = field(
        default=None, init=False, repr=False
    )

    def __post_init__(self) -> None:
        check_levels(coverage=self.coverage)
        check_choice(self.method, get_args(SetMethod), by="sets", what="method")
        check_number(self.clusters, "[0, inf)", by="sets", what="clusters", whole=True)
        check_number(self.free_ranks, "[0, inf)", by="sets", what="free_ranks", whole=True)
        check_seed(self.seed, by="sets")
        if self.penalty is not None:
            check_number(self.penalty, "[0, inf)", by="sets", what="penalty")
            if self.method not in PENALTY:
                raise ValueRangeError(
                    f"sets: penalty goes with the methods {' and '.join(PENALTY)}; got method '{self.method}'. Leave "
                    f"penalty out, or choose another method."
                )
        chosen = {"class_wise": self.class_wise, "per": self.per is not None, "clusters": self.clusters > 0}
        if sum(chosen.values()) > 1:
            names = " and ".join(name for name, one in chosen.items() if one)
            raise ValueRangeError(f"sets: their coverage holds for one kind of parts; got {names}. Choose one.")

    def fit(self, table: Table, weights: Float64[np.ndarray, "n"] | None = None) -> "PredictionSets":
        """Take the quantiles from labelled images that nothing else was learned from.

        Args:
            table: The images.
            weights: (n) how much likelier each is in the target than here; see `dubito.guard.shift_weights`. `sets`
                then takes those of the new images.

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
        own = [label_scores(batch.logit, batch.label, self.method, **self._settings) for batch in batches]
        scores, self.thresholds_, self._weighted = torch.cat(own), None, None
        self.rows_, self.classes_, self.provenance_ = len(table), table.shape("logit")[1], table.provenance
        if weights is not None:
            return self._fit_weighted(scores, _checked_weights(weights, table), table)
        if self.clusters:
            self._fit_clusters(scores, table)
            return self
        parts = [scores]
        if self.class_wise:
            parts = [scores[table.label == one] for one in range(self.classes_)]
        elif self.per is not None:
            values = groups_in(table, self.per, by="sets.fit")
            self.groups_ = tuple(np.unique(values).tolist())
            codes = torch.from_numpy(group_codes(values, self.groups_))
            parts = [scores[codes == place] for place in range(len(self.groups_))]
        self.thresholds_ = torch.tensor([conformal_quantile(one, self.coverage) for one in parts], dtype=torch.float64)
        self._report_lacking(table)
        return self

    @property
    def _settings(self) -> dict[str, Any]:
        return {"penalty": self.penalty, "free_ranks": self.free_ranks}

    def _report_lacking(self, table: Table) -> None:
        """Warn of classes or groups with too few images; an error if these are all."""
        assert self.thresholds_ is not None  # noqa: S101 (our own invariant)
        lacking, total = int(self.thresholds_.isinf().sum()), len(self.thresholds_)
        one, many = ("a class", "classes") if self.per is None else (f"a group of '{self.per}'", "groups")
        kind = "class-wise coverage" if self.per is None else "coverage"
        requires = f"sets: {kind} {self.coverage:g} needs at least {needed_for_sets(self.coverage)} images of {one}; "
        repair = f"Pass more images of them, or leave {'class_wise' if self.per is None else 'per'} out."
        if lacking == total:
            raise GuardError(f"{requires}none of {total} {many} has so many in {table.name}. {repair}")
        if lacking:
            put = "are put into every set" if self.per is None else "get every class into their sets"
            text = f"{requires}{lacking} of {total} {many} have fewer in {table.name} and {put}. {repair}"
            warnings.warn(text, DubitoWarning, stacklevel=3)

    def _fit_clusters(self, scores: Float64[Tensor, "n"], table: Table) -> None:
        """Clusters from one random half, their quantiles from the other."""
        least, c, label = needed_for_sets(self.coverage), self.classes_, table.label
        order = torch.randperm(len(table), generator=torch.Generator().manual_seed(self.seed))
        first, second = order[: len(order) // 2], order[len(order) // 2 :]
        cluster = cluster_classes(
            scores[first].numpy(),
            label[first].numpy(),
            c,
            clusters=self.clusters,
            coverage=self.coverage,
            fewest=least,
        )
        marginal = conformal_quantile(scores[second], self.coverage)
        if math.isinf(marginal):
            raise GuardError(
                f"prediction sets of coverage {self.coverage:g} with clusters need at least {2 * least} labelled "
                f"images; {table.name} has {len(table)} for it. Pass more, or leave clusters out."
            )
        of_rows = torch.from_numpy(cluster)[label[second]]
        q = [conformal_quantile(scores[second][of_rows == one], self.coverage) for one in range(self.clusters)]
        own = torch.tensor([*q, math.inf], dtype=torch.float64)[torch.from_numpy(cluster)]
        self.marginal_ = tuple(own.isinf().nonzero()[:, 0].tolist())
        self.thresholds_ = own.masked_fill(own.isinf(), marginal)
        if self.marginal_:
            text = (
                f"sets: {len(self.marginal_)} of {c} classes have too few images for a cluster (each class {least} of "
                f"one half, each cluster {least} of the other) and get the quantile of all images: for them, coverage "
                f"{self.coverage:g} holds only on average over all images. Pass more images of them."
            )
            warnings.warn(text, DubitoWarning, stacklevel=3)

    def _fit_weighted(
        self, scores: Float64[Tensor, "n"], weights: Float64[np.ndarray, "n"], table: Table
    ) -> "PredictionSets":
        if self.class_wise or self.clusters or self.per is not None:
            raise ValueRangeError("sets: weights go with sets for all images. Leave out class_wise, per and clusters.")
        if weights.sum() <= 0:
            raise ValueRangeError(f"sets.fit: weights must not all be 0; those of {table.name} are. Pass a ratio.")
        self._weighted = scores.numpy(), weights
        return self

    @property
    def weighted(self) -> bool:
        """Whether they were fitted with weights, and so hold for another population than the calibration images'."""
        return self._weighted is not None

    def sets(self, table: Table, weights: Float64[np.ndarray, "n"] | None = None) -> Bool[Tensor, "n c"]:
        """Of every row, which classes are in its set; `weights` are those of the rows, if it has any."""
        if self.thresholds_ is None and self._weighted is None:
            raise NotFittedError("sets: fit(table) comes first, with labelled images that nothing was learned from.")
        if (weights is None) is self.weighted:
            needs = "was fitted with weights and needs those of the new images" if self.weighted else "has no weights"
            raise ValueRangeError(f"sets: {needs}. Pass weights to both fit and sets, or to neither.")
        self._check_table(table)
        of_classes = self.class_wise or self.clusters > 0
        q, start = self._quantiles(table, weights), 0
        inside = torch.empty(len(table), self.classes_, dtype=torch.bool)
        for batch in finite_batches(table.batches("logit"), table.name, by="sets"):
            rows = slice(start, start + len(batch))
            if of_classes:
                inside[rows] = set_scores(batch.logit, self.method, **self._settings) <= q
            else:
                inside[rows] = sets_up_to(q if len(q) == 1 else q[rows], batch.logit, self.method, **self._settings)
            start = rows.stop
        return inside

    def _check_table(self, table: Table) -> None:
        """Raise TableError for a table of another model than that of the calibration images."""
        table.require("logit", by="sets")
        if (c := table.shape("logit")[1]) != self.classes_:
            raise TableError(
                f"sets: {self.classes_} classes were fitted; {table.name} has {c}. Use a table of the same model."
            )
        of = f"{table.name} and the table that the sets were fitted on"
        check_provenance(table.provenance, self.provenance_, by="sets", of=of)

    def _quantiles(self, table: Table, weights: Float64[np.ndarray, "n"] | None) -> Float64[Tensor, "r k"]:
        """(1, c) or (1, 1) for all rows, or (n, 1) where rows differ."""
        if self._weighted is not None and weights is not None:
            new = _checked_weights(weights, table)
            return torch.from_numpy(weighted_quantiles(*self._weighted, new, self.coverage))[:, None]
        assert self.thresholds_ is not None  # noqa: S101 (checked by `sets`)
        if self.per is None:
            return self.thresholds_[None]
        values = groups_in(table, self.per, by="sets")
        codes = group_codes(values, self.groups_)
        if unknown := np.unique(values[codes < 0]).tolist():
            text = (
                f"sets: images of {table.name} whose '{self.per}' is {some_groups(unknown)} get every class into their "
                f"sets: there were no calibration images of it, only of {some_groups(self.groups_)}. Check the names, "
                f"or fit with images of every group."
            )
            warnings.warn(text, DubitoWarning, stacklevel=3)
        return torch.cat([self.thresholds_, torch.tensor([math.inf]).double()])[torch.from_numpy(codes)][:, None]

    def classes(self, table: Table) -> list[tuple[int, ...]]:
        """Of every row, the classes of its set, most likely first."""
        logit = table.logit
        return [
            tuple(inside[logit[row, inside].argsort(descending=True, stable=True)].tolist())
            for row, inside in enumerate(one.nonzero()[:, 0] for one in self.sets(table))
        ]

    def to_json(self) -> Json:
        """Settings and quantiles; what is infinite as null. Settings that are not used are left out."""
        if self.weighted:
            raise GuardError("sets: those with weights are not saved. Fit them again, with weights of that time.")
        thresholds = plain([] if self.thresholds_ is None else self.thresholds_)
        own = {"coverage": self.coverage, "method": self.method, "class_wise": self.class_wise}
        usual = PredictionSets()
        further = {
            name: value
            for name in ("per", "clusters", "penalty", "free_ranks", "seed")
            if (value := getattr(self, name)) != getattr(usual, name)
        }
        learned = {"groups": list(self.groups_), "marginal": list(self.marginal_)}
        learned = {name: value for name, value in learned.items() if value}
        sizes = {"rows": self.rows_, "classes": self.classes_}
        return {**own, **further, **learned, "thresholds": thresholds, **sizes}

    @classmethod
    def from_json(cls, saved: Json, provenance: Provenance | None = None) -> "PredictionSets":
        """Read back what `to_json` returned; `provenance` is that of the calibration images' table."""
        learned = ("thresholds", "rows", "classes", "groups", "marginal")
        sets = cls(**{name: value for name, value in saved.items() if name not in learned})
        q = [math.inf if one is None else float(one) for one in saved["thresholds"]]
        sets.thresholds_ = torch.tensor(q, dtype=torch.float64) if q else None
        sets.rows_, sets.classes_, sets.provenance_ = int(saved["rows"]), int(saved["classes"]), provenance
        sets.groups_, sets.marginal_ = tuple(saved.get("groups", ())), tuple(saved.get("marginal", ()))
        of_classes = sets.class_wise or sets.clusters > 0
        parts = sets.classes_ if of_classes else len(sets.groups_) if sets.per is not None else 1
        if q and len(q) != parts:
            raise ValueError(f"prediction sets have {len(q)} quantiles for {parts} parts")
        return sets


def _checked_weights(weights: Float64[np.ndarray, "n"], table: Table) -> Float64[np.ndarray, "n"]:
    weights = np.asarray(weights, dtype=np.float64)
    check_per_row(weights, table, by="sets", what="weights")
    if not np.isfinite(weights).all() or (len(weights) and weights.min() < 0):
        raise ValueRangeError("sets: weights must be finite numbers from 0 on. Pass a ratio of densities.")
    return weights


def fitted_sets(sets: object, table: Table, *, labelled: bool) -> PredictionSets | None:
    """A fitted copy of the user's sets; of the default ones, None where labels or images do not suffice."""
    if isinstance(sets, PredictionSets):
        if sets.weighted:
            raise GuardError(
                "Guard.fit: sets with weights hold for another population than the guard's calibration images, so a "
                "guard does not keep them. Use them without a guard: sets.sets(table, weights)."
            )
        return replace(sets).fit(table)
    if not isinstance(sets, bool):
        raise ValueRangeError(
            f"Guard.fit: sets must be PredictionSets(...), True or False; got {sets!r}. "
            f"Use sets=PredictionSets(coverage=...)."
        )
    default = PredictionSets()
    return default.fit(table) if sets and labelled and len(table) >= needed_for_sets(default.coverage) else None
