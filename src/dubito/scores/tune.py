"""Settings chosen on in-distribution images: of a density by held-out likelihood, of REGrad by the model's errors.

`Density.tune` goes through the grid of Pearce et al. 2021, appendix C.5: all covariances, spaces and numbers of
components, each with a random draw of the other settings. The paper chooses by AUROC against OOD images. Here no OOD
image is seen: what counts is the mean log-likelihood of held-out rows,

    log q(z) = log q_S(s(z_S)) + sum_(j not in S) log N(s(z_j); m_j, v_j) + sum_j log s'(z_j)

with s the space (z or log(z + offset)) and S the neurons. The features that a candidate leaves out are independent
Gaussians, and logarithms carry their Jacobian, so all candidates are densities of the same features. Features that
never vary in training are set aside, also by the chosen density: their density grows without end as the regularisation
shrinks. For the same reason the offset is no part of the grid: where many features are exactly zero, a smaller one
always wins. Nor is the non-linearity: likelihoods of the features before and after it cannot be compared.

`tune_regrad` chooses beta, sigma and noisy copies, which the paper leaves open, by a rule of ours:

1. Of a labelled validation split, an error is a row whose highest logit is not the label's.
2. Each candidate (a column of a gradient probe, and a beta) is ranked by AURC. Lower is better.
3. Candidates at most one standard error above the best are as good (that of the difference, by a paired bootstrap).
4. Of these the simplest is taken: fewest copies, then smallest sigma, then smallest beta.

Copies and sigma are settings of the probe, so each choice of them is a column of its own, extracted under its own name:
`Gradient(name="noisy", copies=8, sigma=0.1)`. What ranks errors best need not find OOD images best: that is the price
of a rule that never sees any.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any, final

import torch
from jaxtyping import Bool
from torch import Tensor

from dubito.choices import ClassWeighting, Nonlinearity
from dubito.errors import DubitoError, TableError, ValueRangeError
from dubito.metrics import aurc, paired_errors, wrong_predictions
from dubito.result import Result
from dubito.scores._features import classes_of
from dubito.scores.density import Density, class_count, in_space, reads
from dubito.scores.gaussians import Mixture
from dubito.scores.gradient import REGrad
from dubito.table import Table, recorded_settings
from dubito.table.views import Computed
from dubito.types import Score, finite_batches
from dubito.validate import check_bootstrap, check_number, check_rows, check_same_model

GRID: dict[str, Sequence[Any]] = {
    "covariance": ("full", "tied", "diagonal", "spherical"),
    "space": ("z", "log"),
    "components": (1, None, 10, 100),
    "start": ("class", "free"),
    "max_iterations": (0, 100),
    "neurons": (100, 256, 512, None),
    "regularisation": (1e-1, 1e-3, 1e-5, 1e-7),
}
"""Values by setting. Tied covariances and all neurons are not in C.5; None components are one per class."""
_FULLY = ("covariance", "space", "components")
_INDEPENDENT = {"components": 1, "covariance": "diagonal", "start": "free", "max_iterations": 0, "neurons": None}
BETAS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
_BY = "tune_regrad"


@final
@dataclass(frozen=True)
class Tuned(Result):
    """A search over the settings of a score.

    Attributes:
        score: The chosen score. A density is fitted on the training rows; its `neurons_` are features that vary there.
        tried: Every candidate with its settings, the best first, and the `error` of one that has no value. Of a
            density, `log_likelihood` (mean over held-out rows, of all features that vary). Of REGrad, `aurc`, how far
            it is above the best one (`gap_to_best`), the `standard_error` of that, and whether it was `chosen`; copies
            and sigma are None where the table does not know them.
    """

    score: Score
    tried: list[dict[str, Any]]

    def title(self) -> str:
        """How many candidates there were."""
        by = "AURC" if self.score.learned == () else "the likelihood of held-out images"
        return f"{len(self.tried)} settings of {self.score.name} by {by}"

    def records(self) -> list[dict[str, Any]]:
        """Every candidate."""
        return self.tried

    def cell(self, key: str, value: Any) -> str:
        """Small settings such as 1e-05 keep their digits."""
        return f"{value:g}" if isinstance(value, float) else super().cell(key, value)


def tune_density(
    train: Table, validation: Table, grid: Mapping[str, Sequence[Any]], budget: int, seed: int, settings: dict[str, Any]
) -> Tuned:
    """See `Density.tune`."""
    nonlinearity: Nonlinearity = settings.pop("nonlinearity", "after")
    for table in (train, validation):
        table.require("feature" if nonlinearity == "after" else "pre_activation", by="density.tune")
        check_rows(table, by="density.tune")
    check_number(budget, "[1, inf)", by="density.tune", what="budget", whole=True)
    train, validation = reads(train, nonlinearity), reads(validation, nonlinearity)
    check_same_model(train, {"validation": validation}, by="density.tune")
    varying = _varying(train)
    train, validation = _narrowed(train, varying), _narrowed(validation, varying)
    best, highest = None, -math.inf
    tried: list[dict[str, Any]] = []
    for candidate in _candidates(train, int(varying.sum()), grid, settings, seed)[:budget]:
        try:
            both = {**settings, **candidate}
            density, rest = (Density(**one).fit(train) for one in (both, {**both, **_INDEPENDENT}))
            value = log_likelihood(density, rest, validation)
        except DubitoError as error:
            tried.append({**candidate, "log_likelihood": None, "error": str(error)})
            continue
        tried.append({**candidate, "log_likelihood": value, "error": None})
        # Only the best is kept: a hundred full covariances are many bytes.
        best, highest = (density, value) if value > highest else (best, highest)
    if best is None:
        raise TableError(f"density.tune: none of {len(tried)} candidates can be fitted. The first: {tried[0]['error']}")
    tried.sort(key=lambda row: -math.inf if row["error"] else row["log_likelihood"], reverse=True)
    # Not fitted again on all features: it would draw other neurons than those that were compared, even dead ones.
    best.neurons_, best.width_ = varying.nonzero()[:, 0][best.neurons_], len(varying)
    best.nonlinearity = nonlinearity
    best.__post_init__()
    return Tuned(best, tried)


def log_likelihood(density: Density, rest: Density, table: Table) -> float:
    """Mean over rows of the log-density of all features in z; `rest` has a single Gaussian per feature."""
    left_out = torch.ones(density.width_, dtype=torch.bool)
    left_out[density.neurons_] = False
    independent = Mixture("diagonal", rest.weights_, rest.means_[:, left_out], rest.factors_[:, left_out])
    total = 0.0
    for batch in finite_batches(table.batches("feature"), table.name, by="density.tune"):
        z = in_space(batch.feature, density.space, density.offset, "density.tune")
        total += float(density.mixture.log_density(z[:, density.neurons_]).sum())
        total += float(independent.log_density(z[:, left_out]).sum())
        if density.space == "log":
            total -= float(z.sum())  # the derivative of log(z + offset) is 1 / (z + offset)
    return total / len(table)


def _candidates(
    train: Table, width: int, grid: Mapping[str, Sequence[Any]], settings: dict[str, Any], seed: int
) -> list[dict[str, Any]]:
    """The cells of the full grid in turn, each time with a random draw of the other settings; none twice."""
    unknown = [name for name in grid if name not in GRID or name in settings]
    if unknown:
        raise TableError(
            f"density.tune: grid may have {', '.join(GRID)}, unless they are settings; got '{unknown[0]}'. "
            f"Pass one value as a setting, several in the grid."
        )
    if settings.get("start") == "class":
        train.require("label", by="density.tune")
    choices = {name: values for name, values in {**GRID, **grid}.items() if name not in settings}
    classes, labels = class_count(train), len(classes_of(train, "density.tune")) if "label" in train else None
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for values in product(*choices.values()):
        candidate = dict(zip(choices, values, strict=True))
        _make_sensible(candidate, settings, width, classes, labels)
        both = {**settings, **candidate}
        if both["start"] == "class" and both["components"] not in (None, labels):
            continue  # a class-wise start has one component per label: no fit is spent on what cannot be
        cell = cells.setdefault(tuple(candidate.get(name) for name in _FULLY), [])
        if candidate not in cell:
            cell.append(candidate)
    if not cells:
        raise TableError(
            f"density.tune: with start='class' there is one component for each of the {labels} labels of {train.name}; "
            f"got only other numbers of components. Leave them out, or choose start='free'."
        )
    generator, queues = random.Random(seed), list(cells.values())  # noqa: S311 (nothing secret)
    generator.shuffle(queues)
    for queue in queues:
        generator.shuffle(queue)
    return [candidate for turn in zip_longest(*queues) for candidate in turn if candidate is not None]


def _make_sensible(
    candidate: dict[str, Any], settings: dict[str, Any], width: int, classes: int | None, labels: int | None
) -> None:
    """Say the same thing in one way only, so that nothing is tried twice."""
    if classes is not None and candidate.get("components") == classes:
        candidate["components"] = None
    number = candidate["components"] if "components" in candidate else settings["components"]
    by_class = number is None or ("components" in settings and number == labels)
    if candidate.get("start") == "class" and (labels is None or not by_class):
        candidate["start"] = "free"
    if candidate.get("neurons") is not None and candidate["neurons"] >= width:
        candidate["neurons"] = None


def _varying(table: Table) -> Bool[Tensor, "d"]:
    """Which features are not the same in all rows."""
    first = table.rows(slice(0, 1)).feature[0]
    varying = torch.zeros(len(first), dtype=torch.bool)
    for batch in finite_batches(table.batches("feature"), table.name, by="density.tune"):
        varying |= (batch.feature != first).any(0)
    if not bool(varying.any()):
        raise TableError(f"density.tune: all features of {table.name} are constant. Fit on different images.")
    return varying


def _narrowed(table: Table, kept: Bool[Tensor, "d"]) -> Table:
    whole = table.column("feature")
    narrow = Computed((len(table), int(kept.sum())), lambda rows: whole[rows][:, kept])
    return table if bool(kept.all()) else table.extended(feature=narrow)


def tune_regrad(
    table: Table,
    columns: Sequence[str] = ("gradient",),
    betas: Sequence[float] = BETAS,
    *,
    weighting: ClassWeighting = "fisher",
    resamples: int = 1000,
    seed: int = 0,
) -> Tuned:
    """REGrad with beta, sigma and copies by the rule above.

    Args:
        table: Labelled images of the kind that the model was trained for, which it has not been trained on: with
            logits, labels and the columns of one or several gradient probes.
        columns: The names of the probes.
        betas: Values of beta for exponential layer weights.
        weighting: Class weighting, the same for all candidates.
        resamples: Number of bootstrap resamples.
        seed: Seed of the bootstrap.

    >>> import torch
    >>> wrong = torch.tensor([0, 0, 1, 1])
    >>> gradient = torch.stack([torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])], 1)
    >>> logit = torch.eye(2)[wrong]
    >>> tune_regrad(Table(gradient=gradient, logit=logit, label=[0] * 4), betas=(0.0, 4.0)).score.beta
    4.0
    """
    check_bootstrap(by=_BY, resamples=resamples, seed=seed, least=2)
    if isinstance(columns, str) or not columns or not betas:
        raise ValueRangeError(
            f"{_BY}: columns and betas must be lists with at least one entry; got columns={columns!r} and "
            f"betas={betas!r}. Pass for instance columns=['gradient'], betas=[0, 4]."
        )
    wrong = wrong_predictions(table, by=_BY, repair="Pass a validation split.")
    if wrong.all() or not wrong.any():
        raise TableError(
            f"{_BY}: the model is {'wrong' if wrong.all() else 'right'} on all {len(wrong)} images of {table.name}, so "
            f"all candidates have the same AURC. Pass a validation split with errors, which it was not trained on."
        )
    columns = list(dict.fromkeys(columns))
    scores = [REGrad(weighting, beta=beta, of=column) for column in columns for beta in dict.fromkeys(betas)]
    table.require(*(column for score in scores for column in score.needs), by=_BY)
    probes = {column: _perturbation(table, column, alone=len(columns) == 1) for column in columns}
    tried: list[dict[str, Any]] = []
    values = {}
    for place, score in enumerate(scores):
        row = {"column": score.of, **probes[str(score.of)], "beta": score.beta, "aurc": None, "gap_to_best": None}
        tried.append({**row, "standard_error": None, "chosen": False, "error": None})
        try:
            values[place] = score.score(table)
            tried[place]["aurc"] = aurc(values[place], wrong)
        except TableError as error:
            tried[place]["error"] = str(error)
    if not values:
        raise TableError(f"{_BY}: none of {len(tried)} candidates can be computed. The first: {tried[0]['error']}")
    chosen = _choose(tried, values, wrong, resamples, seed)
    tried[chosen]["chosen"] = True
    tried.sort(key=lambda row: (math.inf if row["aurc"] is None else row["aurc"], _complexity(row)))
    return Tuned(scores[chosen], tried)


def _choose(
    tried: list[dict[str, Any]], values: dict[int, Tensor], wrong: Bool[Tensor, "n"], resamples: int, seed: int
) -> int:
    """The simplest of those within one standard error of the best; notes the gap of each."""
    best = min(values, key=lambda place: (tried[place]["aurc"], _complexity(tried[place])))
    errors = paired_errors(aurc, list(values.values()), values[best], wrong, resamples=resamples, seed=seed)
    for place, error in zip(values, errors, strict=True):
        tried[place] |= {"gap_to_best": tried[place]["aurc"] - tried[best]["aurc"], "standard_error": error}
    as_good = [place for place in values if tried[place]["gap_to_best"] <= tried[place]["standard_error"]]
    return min(as_good, key=lambda place: _complexity(tried[place]))


def _complexity(row: dict[str, Any]) -> tuple[float, float, float]:
    return float(row["copies"] or 0), row["sigma"] or 0.0, row["beta"]


def _perturbation(table: Table, column: str, *, alone: bool) -> dict[str, Any]:
    """The number of noisy copies and their sigma; of a column alone, None where the table does not know them."""
    settings = recorded_settings(table, column)
    if settings is None and alone:
        return {"copies": None, "sigma": None}
    if settings is None:
        raise TableError(
            f"{_BY}: {table.name} does not know with how many noisy copies '{column}' was made, and so not which of "
            f"several columns is the simplest. Pass a table from a cache, or one column alone."
        )
    copies = int(settings.get("copies") or 0)
    return {"copies": copies, "sigma": float(settings.get("sigma") or 0.0) if copies else 0.0}
