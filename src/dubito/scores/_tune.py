"""Settings of a density chosen by held-out likelihood: the grid of Pearce et al. 2021, appendix C.5.

The paper draws at random whether components are classes, the number of neurons, the regularisation, and whether z is
taken before or after the non-linearity; it goes through all covariances, spaces and numbers of components. It chooses
by AUROC against foreign images. Here nothing foreign is seen: what counts is the mean log-likelihood of held-out rows,

    log q(z) = log q_S(s(z_S)) + sum_(j not in S) log N(s(z_j); m_j, v_j) + sum_j log s'(z_j)

with s the space (z or log(z + offset)) and S the neurons: the features that a candidate leaves out are independent
Gaussians, and logarithms carry their Jacobian. So all candidates give a density of the same features. Features that
never vary in training are set aside: their density grows without end as the regularisation shrinks. The density found
does not read them either, so that it is the very one that was judged. The offset is no part of the grid for the same
reason: where many features are exactly zero, a smaller one always wins. Nor is the non-linearity: before and after it
are other features, whose likelihoods cannot be compared; `nonlinearity` is a setting that all candidates share.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any, final

import torch
from jaxtyping import Bool
from torch import Tensor

from dubito.choices import Nonlinearity
from dubito.errors import DubitoError, TableError, ValueRangeError
from dubito.scores._gaussians import Mixture
from dubito.scores._rows import classes_of, finite_features, rows_named
from dubito.scores.density import Density, class_count, in_space, seen
from dubito.table import Column, Exact, Table

GRID: dict[str, Sequence[Any]] = {
    "covariance": ("full", "tied", "diagonal", "spherical"),
    "space": ("z", "log"),
    "components": (1, None, 10, 100),
    "start": ("class", "free"),
    "max_iterations": (0, 100),
    "neurons": (100, 256, 512, None),
    "regularisation": (1e-1, 1e-3, 1e-5, 1e-7),
}
"""Values by setting. Tied covariances and all neurons are not in C.5; None components are one a class."""
_FULLY = ("covariance", "space", "components")


@final
@dataclass(frozen=True)
class Tuned:
    """What a search found.

    Attributes:
        density: The best, fitted on the training rows; `neurons_` are those of its features that vary there.
        tried: Every candidate, the best first: its settings, `log_likelihood` (mean over held-out rows, of all features
            that vary) and `error`, which says why there is none.
    """

    density: Density
    tried: list[dict[str, Any]]

    def __str__(self) -> str:
        return listed(self.tried)


def tune(
    train: Table,
    validation: Table,
    *,
    grid: Mapping[str, Sequence[Any]] | None,
    budget: int,
    seed: int,
    **settings: Any,
) -> Tuned:
    """See `Density.tune`."""
    reads: Nonlinearity = settings.pop("nonlinearity", "after")
    for table in (train, validation):
        table.require("feature" if reads == "after" else "pre_activation", by="density.tune")
        if len(table) == 0:
            raise TableError(f"density.tune needs rows to fit on and rows to compare by; {table.name} has none.")
    if budget < 1:
        raise ValueRangeError(f"density.tune: budget must be at least 1 fit; got {budget}.")
    train, validation = seen(train, reads), seen(validation, reads)
    varying = _varying(train)
    narrow = _narrowed(train, varying), _narrowed(validation, varying)
    best: Density | None = None
    tried: list[dict[str, Any]] = []
    for candidate in _candidates(narrow[0], int(varying.sum()), grid or {}, settings, seed)[:budget]:
        row, density = _tried(*narrow, candidate, settings)
        # Only the best is kept: a hundred full covariances are many bytes.
        if density is not None and all(row["log_likelihood"] > _value(other) for other in tried):
            best = density
        tried.append(row)
    if best is None:
        raise TableError(
            f"density.tune: none of {len(tried)} candidates could be fitted. The first: {tried[0]['error']}"
        )
    tried.sort(key=_value, reverse=True)
    # Not fitted again on all features: it would draw other neurons than those that were judged, even dead ones.
    best.neurons_, best.width_ = varying.nonzero()[:, 0][best.neurons_], len(varying)
    best.nonlinearity = reads
    best.__post_init__()
    return Tuned(best, tried)


def listed(tried: Sequence[Mapping[str, Any]]) -> str:
    """Candidates as text, one a line under the names of their settings."""
    names = list(tried[0])
    lines = [names, *([_cell(row[name]) for name in names] for row in tried)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def log_likelihood(density: Density, rest: Density, table: Table) -> float:
    """Mean over rows of the log-density of all features in z; `rest` has a single Gaussian a feature."""
    density.check_source(table)
    left_out = torch.ones(density.width_, dtype=torch.bool)
    left_out[density.neurons_] = False
    independent = Mixture("diagonal", rest.weights_, rest.means_[:, left_out], rest.factors_[:, left_out])
    total = 0.0
    for batch in table.batches("feature"):
        z = in_space(batch.feature, density.space, density.offset, "density.tune")
        total += float(density.mixture.log_density(z[:, density.neurons_]).sum())
        total += float(independent.log_density(z[:, left_out]).sum())
        if density.space == "log":
            total -= float(z.sum())  # the derivative of log(z + offset) is 1 / (z + offset)
    return total / len(table)


def _tried(
    train: Table, validation: Table, candidate: dict[str, Any], settings: dict[str, Any]
) -> tuple[dict[str, Any], Density | None]:
    alone = {"components": 1, "covariance": "diagonal", "start": "free", "max_iterations": 0, "neurons": None}
    try:
        density = Density(**settings, **candidate).fit(train)
        rest = Density(**{**settings, **candidate, **alone}).fit(train)
        value = log_likelihood(density, rest, validation)
    except DubitoError as error:
        return {**candidate, "log_likelihood": None, "error": str(error)}, None
    return {**candidate, "log_likelihood": value, "error": None}, density


def _candidates(
    train: Table, width: int, grid: Mapping[str, Sequence[Any]], settings: dict[str, Any], seed: int
) -> list[dict[str, Any]]:
    """The cells of the full grid in turn, each time with a random draw of the other settings; none twice."""
    unknown = [name for name in grid if name not in GRID or name in settings]
    if unknown:
        raise TableError(
            f"density.tune: grid may have {', '.join(GRID)}, unless they are given otherwise; got '{unknown[0]}'. "
            f"Give one value as a setting, several in the grid."
        )
    if settings.get("start") == "class":
        train.require("label", by="density.tune")
    choices = {name: values for name, values in {**GRID, **grid}.items() if name not in settings}
    classes, labels = class_count(train), len(classes_of(train, "density.tune")) if "label" in train else None
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for values in product(*choices.values()):
        candidate = dict(zip(choices, values, strict=True))
        _make_sensible(candidate, settings, width, classes, labels)
        asked = {**settings, **candidate}
        if asked["start"] == "class" and asked["components"] not in (None, labels):
            continue  # a class-wise start has one component a label: no fit is spent on what cannot be
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
    with rows_named(table):
        for batch in table.batches("feature"):
            finite_features(batch.feature, "density.tune")
            varying |= (batch.feature != first).any(0)
    if not bool(varying.any()):
        raise TableError(f"density.tune: all features of {table.name} are constant. Fit on different images.")
    return varying


def _narrowed(table: Table, kept: Bool[Tensor, "d"]) -> Table:
    if table.shape("feature")[1] != len(kept):
        raise TableError(
            f"density.tune: features must have one width; got {len(kept)} and {table.shape('feature')[1]}, the latter "
            f"in {table.name}. Give tables of the same model."
        )
    return table if bool(kept.all()) else table.extended(feature=_Narrow(table.column("feature"), kept))


@final
class _Narrow:
    """Some columns of a column."""

    def __init__(self, column: Column, kept: Bool[Tensor, "d"]) -> None:
        self._column, self._kept = column, kept
        self.shape = (column.shape[0], int(kept.sum()))

    def __getitem__(self, rows: Exact) -> Any:
        return self._column[rows][:, self._kept]


def _value(row: dict[str, Any]) -> float:
    value: float | None = row["log_likelihood"]
    return -torch.inf if value is None else value


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
