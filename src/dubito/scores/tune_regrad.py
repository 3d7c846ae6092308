"""Settings of REGrad chosen on images that the model knows, by the model's own errors: beta, sigma and noisy copies.

What the paper leaves open is chosen here by a rule of ours, which sees no foreign image:

1. Of a labelled validation split, an error is a row whose highest logit is not the label's.
2. Each candidate (a column of a gradient probe, and a beta) is judged by AURC: the mean error of the rows that it
   would accept first, over all shares of accepted rows. Lower is better.
3. Candidates within one standard error of the best are as good: AURC - AURC of the best <= the standard error of that
   difference, by a bootstrap that draws the same rows for both.
4. Of these the plainest is taken: fewest copies, then smallest sigma, then smallest beta.

Copies and sigma are settings of the probe, so each choice of them is a column of its own, extracted under its own name:
`Gradient(name="noisy", copies=8, sigma=0.1)`. What ranks errors among known images best need not find foreign images
best: that is the price of a rule that never sees any.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from jaxtyping import Bool
from torch import Tensor

from dubito.choices import ClassWeighting
from dubito.errors import TableError, ValueRangeError
from dubito.metrics import aurc, paired_errors, wrong_predictions
from dubito.scores._tune import listed
from dubito.scores.gradient import REGrad
from dubito.table import Table

BETAS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
_BY = "tune_regrad"


@final
@dataclass(frozen=True)
class TunedREGrad:
    """What a search found.

    Attributes:
        score: The candidate that was chosen.
        tried: Every candidate, by rising `aurc`: `column`, `copies`, `sigma`, `beta`, what its AURC is above the best
            one (`gap_to_best`), the `standard_error` of that, whether it was `chosen`, and the `error` of one that the
            column does not allow. Copies and sigma are None where the table does not know them.
    """

    score: REGrad
    tried: list[dict[str, Any]]

    def __str__(self) -> str:
        return listed(self.tried)


def tune_regrad(
    table: Table,
    columns: Sequence[str] = ("gradient",),
    betas: Sequence[float] = BETAS,
    *,
    weighting: ClassWeighting = "fisher",
    resamples: int = 1000,
    seed: int = 0,
) -> TunedREGrad:
    """REGrad with beta, sigma and copies by the rule above.

    Args:
        table: Labelled images of the kind that the model was trained for, which it has not been trained on: with
            logits, labels and the columns of one or several gradient probes.
        columns: The names of the probes.
        betas: Of exponential layer weights.
        weighting: Of the classes; the same for all candidates.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.

    >>> import torch
    >>> wrong = torch.tensor([0, 0, 1, 1])
    >>> gradient = torch.stack([torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])], 1)
    >>> logit = torch.eye(2)[wrong]
    >>> tune_regrad(Table(gradient=gradient, logit=logit, label=[0] * 4), betas=(0.0, 4.0)).score.beta
    4.0
    """
    wrong = _errors(table)
    scores = _candidates(columns, betas, weighting)
    table.require(*(column for score in scores for column in score.needs), by=_BY)
    asked = {column: _perturbation(table, column, alone=len(set(columns)) == 1) for column in columns}
    tried, values = [], {}
    for place, score in enumerate(scores):
        row = {"column": score.of, **asked[score.of], "beta": score.beta}
        try:
            values[place] = score.score(table)
            row |= {"aurc": aurc(values[place], wrong), "error": None}
        except TableError as error:
            row["error"] = str(error)
        tried.append(row)
    if not values:
        raise TableError(f"{_BY}: none of {len(tried)} candidates can be computed. The first: {tried[0]['error']}")
    chosen = _choose(tried, values, wrong, resamples, seed)
    order = sorted(range(len(tried)), key=lambda place: (tried[place].get("aurc", math.inf), _plain(tried[place])))
    return TunedREGrad(scores[chosen], [_told(tried[place], chosen=place == chosen) for place in order])


def _choose(
    tried: list[dict[str, Any]], values: dict[int, Tensor], wrong: Bool[Tensor, "n"], resamples: int, seed: int
) -> int:
    """The plainest of those within one standard error of the best; notes how far behind each is."""
    best = min(values, key=lambda place: (tried[place]["aurc"], _plain(tried[place])))
    errors = paired_errors(aurc, list(values.values()), values[best], wrong, resamples=resamples, seed=seed)
    for place, error in zip(values, errors, strict=True):
        tried[place] |= {"gap_to_best": tried[place]["aurc"] - tried[best]["aurc"], "standard_error": error}
    as_good = [place for place in values if tried[place]["gap_to_best"] <= tried[place]["standard_error"]]
    return min(as_good, key=lambda place: _plain(tried[place]))


def _plain(row: dict[str, Any]) -> tuple[float, float, float]:
    return float(row["copies"] or 0), row["sigma"] or 0.0, row["beta"]


def _told(row: dict[str, Any], *, chosen: bool) -> dict[str, Any]:
    names = ("column", "copies", "sigma", "beta", "aurc", "gap_to_best", "standard_error")
    return {**{name: row.get(name) for name in names}, "chosen": chosen, "error": row["error"]}


def _candidates(columns: Sequence[str], betas: Sequence[float], weighting: ClassWeighting) -> list[REGrad]:
    if isinstance(columns, str) or not columns or not betas:
        raise ValueRangeError(
            f"{_BY}: columns and betas must be lists with at least one entry; got columns={columns!r} and "
            f"betas={betas!r}. Give for instance columns=['gradient'], betas=[0, 4]."
        )
    return [
        REGrad(weighting, beta=beta, of=column) for column in dict.fromkeys(columns) for beta in dict.fromkeys(betas)
    ]


def _errors(table: Table) -> Bool[Tensor, "n"]:
    """Where the model is wrong; TableError where that tells nothing."""
    wrong = wrong_predictions(table, by=_BY, repair="Give a validation split.")
    if wrong.all() or not wrong.any():
        raise TableError(
            f"{_BY}: the model is {'wrong' if wrong.all() else 'right'} on all {len(wrong)} images of {table.name}, so "
            f"AURC is {float(wrong[0]):g} for every candidate, and none can be chosen by it. Give a validation split "
            f"on which the model is right and wrong, of images that it was not trained on."
        )
    return wrong


def _perturbation(table: Table, column: str, *, alone: bool) -> dict[str, Any]:
    """The number of noisy copies and their sigma, from what the table knows of the probe."""
    probe = (table.provenance.probes if table.provenance else {}).get(column)
    if probe is None:
        if alone:
            return {"copies": None, "sigma": None}
        raise TableError(
            f"{_BY}: {table.name} does not know with how many noisy copies '{column}' was made, and so not which of "
            f"several columns is the plainest. Give a table from a cache, or one column alone."
        )
    settings = probe.get("settings") or {}
    copies = int(settings.get("copies") or 0)
    return {"copies": copies, "sigma": float(settings.get("sigma") or 0.0) if copies else 0.0}
