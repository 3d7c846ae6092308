"""How good are these uncertainties on this table? Every score by every metric that the columns allow, with intervals.

    error AUROC, AURC, excess AURC, AUGRC   do wrong predictions come out more uncertain?     needs logit, label
    R-AUROC                                 do bad neighbours come out more uncertain?        needs feature, label
    OOD AUROC, AP, FPR95                    do foreign images come out more uncertain?        needs a second table
    µs / image                              what the score costs, given its columns

Beside them stand the model's own accuracy, NLL, Brier score, ECE and Recall@1.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dubito import metrics as measures
from dubito.errors import TableError, ValueRangeError
from dubito.evaluate.uncertainties import has_both, uncertainty
from dubito.metrics import Array, Interval
from dubito.result import aligned, cell
from dubito.scores._layers import ScoreOfLayers
from dubito.scores._members import ScoreOfMembers
from dubito.scores.last_layer_gradient import GradNorm
from dubito.scores.registry import by_name
from dubito.scores.temperature import Temperature
from dubito.table import Table, asked_otherwise, check_table
from dubito.types import Json, Score
from dubito.validate import check_rows

TITLES = {
    "error_auroc": "error AUROC",
    "aurc": "AURC",
    "excess_aurc": "excess AURC",
    "augrc": "AUGRC",
    "r_auroc": "R-AUROC",
    "ood_auroc": "OOD AUROC",
    "ood_average_precision": "OOD AP",
    "ood_fpr95": "OOD FPR95",
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
    "recall_at_1": "Recall@1",
}
"""Every metric by name, and how it is shown."""

Task = tuple[Any, ...]
"""A metric and its arrays."""


def evaluate(
    scores: Mapping[str, Array | Score | str] | Sequence[Score | str] | Score | str,
    table: Table,
    *,
    ood: Table | None = None,
    metrics: Sequence[str] | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> "Evaluation":
    """Every score by every metric that the table's columns allow.

    Args:
        scores: By name: fitted scores, whose cost is then measured, or uncertainties (n,) of the table's rows. Also one
            score, or several, which go by their own names; the name of a registered score stands for it.
        table: Images of the classes that the model knows.
        ood: Images that it does not know: needs scores, not arrays.
        metrics: Names in TITLES, of which those that the columns allow are computed; all of them by default.
            Without r_auroc and recall_at_1 there is no search for neighbours, whose time grows with n².
        confidence: Of the bootstrap intervals.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.

    >>> table = Table(logit=[[3.0, 0.0], [0.2, 0.0], [0.0, 0.1], [0.0, 2.0]], label=[0, 1, 0, 1])
    >>> from dubito.scores import MaxProbability
    >>> evaluate([MaxProbability(), "entropy"], table, resamples=50)["max_probability"]["error_auroc"].value
    1.0
    """
    check_rows(table, by="evaluate")
    named = by_name(scores, by="evaluate")
    bootstrap = partial(measures.interval, confidence=confidence, resamples=resamples, seed=seed)
    chosen = _chosen(metrics)
    truth = _Truth.of(table, chosen)

    def measured(tasks: dict[str, Task]) -> dict[str, Interval]:
        return {key: bootstrap(*task) for key, task in tasks.items() if key in chosen}

    if ood is not None:
        _check_foreign(ood)
    found = Evaluation(name=table.name, rows=len(table), model=measured(truth.of_model()))
    for name, score in named.items():
        start = time.perf_counter()
        u = uncertainty(score, table, by="evaluate", name=name)
        seconds = time.perf_counter() - start
        found.scores[name] = measured(truth.of_score(u))
        if ood is not None and chosen & _OF_FOREIGN:
            _asked_alike(name, score, table, ood)
            found.scores[name] |= measured(_foreign(name, score, u, ood))
        found.microseconds[name] = 1e6 * seconds / len(table) if isinstance(score, Score) else None
    return found


@final
@dataclass
class Evaluation:
    """A table of scores by metrics: print it, index it by score and metric, or take it as JSON.

    Attributes:
        name: The evaluated table.
        rows: How many images it has.
        model: The model's own measures.
        scores: By score and metric, the value and its interval.
        microseconds: What each score costs an image; None for arrays, whose making was not seen.
    """

    name: str
    rows: int
    model: dict[str, Interval]
    scores: dict[str, dict[str, Interval]] = field(default_factory=dict)
    microseconds: dict[str, float | None] = field(default_factory=dict)

    def __getitem__(self, score: str) -> dict[str, Interval]:
        return self.scores[score]

    @property
    def metrics(self) -> list[str]:
        """The metrics that could be computed, in their usual order."""
        return [key for key in TITLES if any(key in row for row in self.scores.values())]

    def to_json(self) -> Json:
        """Plain numbers."""
        return {
            "table": self.name,
            "rows": self.rows,
            "model": {key: value._asdict() for key, value in self.model.items()},
            "scores": {
                name: {key: value._asdict() for key, value in row.items()} | {"microseconds": self.microseconds[name]}
                for name, row in self.scores.items()
            },
        }

    def lines(self) -> list[list[str]]:
        """A header and one line a score, as text cells."""
        header = ["score", *(TITLES[key] for key in self.metrics), "µs / image"]
        body = [
            [name, *(cell(row.get(key)) for key in self.metrics), _cost(self.microseconds[name])]
            for name, row in self.scores.items()
        ]
        return [header, *body]

    def model_cells(self) -> dict[str, str]:
        """The model's own measures as text, by title."""
        return {TITLES[key]: cell(value) for key, value in self.model.items()}

    def __str__(self) -> str:
        title = [f"{self.name}: {self.rows} images", *(f"{name} {text}" for name, text in self.model_cells().items())]
        return "\n".join(["  ".join(title), *aligned(self.lines())])


@dataclass
class _Truth:
    """What is known of a table's rows, computed once for all scores."""

    wrong: Bool[Tensor, "n"] | None = None
    strange: Bool[Tensor, "n"] | None = None
    confidence: Float[Tensor, "n"] | None = None
    nll: Float[Tensor, "n"] | None = None
    brier: Float[Tensor, "n"] | None = None

    @classmethod
    def of(cls, table: Table, chosen: frozenset[str]) -> "_Truth":
        truth = cls()
        if "label" not in table:
            return truth
        if "logit" in table and table.label_space == "model" and chosen & _OF_LOGITS:
            parts = [_row_values(batch) for batch in table.batches("logit", "label")]
            truth.wrong, truth.confidence, truth.nll, truth.brier = map(torch.cat, zip(*parts, strict=True))
        if "feature" in table and len(table) > 1 and chosen & _OF_NEIGHBOURS:
            truth.strange = ~measures.neighbour_matches(table.column("feature"), table.label)
        return truth

    def of_model(self) -> dict[str, Task]:
        tasks: dict[str, Task] = {}
        if self.wrong is not None:
            tasks["accuracy"] = (_mean, (~self.wrong).double())
            tasks["nll"] = (_mean, self.nll)
            tasks["brier"] = (_mean, self.brier)
            tasks["ece"] = (measures.ece, self.confidence, ~self.wrong)
        if self.strange is not None:
            tasks["recall_at_1"] = (_mean, (~self.strange).double())
        return tasks

    def of_score(self, u: Float[Tensor, "n"]) -> dict[str, Task]:
        tasks: dict[str, Task] = {}
        if self.wrong is not None:
            if has_both(self.wrong):
                tasks["error_auroc"] = (measures.auroc, u, self.wrong)
            tasks["aurc"] = (measures.aurc, u, self.wrong)
            tasks["excess_aurc"] = (measures.excess_aurc, u, self.wrong)
            tasks["augrc"] = (measures.augrc, u, self.wrong)
        if self.strange is not None and has_both(self.strange):
            tasks["r_auroc"] = (measures.auroc, u, self.strange)
        return tasks


_OF_FOREIGN = frozenset({"ood_auroc", "ood_average_precision", "ood_fpr95"})
_OF_NEIGHBOURS = frozenset({"r_auroc", "recall_at_1"})
_OF_LOGITS = frozenset(TITLES) - _OF_FOREIGN - _OF_NEIGHBOURS


def _chosen(names: Sequence[str] | None) -> frozenset[str]:
    if names is None:
        return frozenset(TITLES)
    # A text is a sequence of letters: said as one name that came without its list.
    unknown = [names] if isinstance(names, str) else [name for name in names if name not in TITLES]
    if unknown:
        near = get_close_matches(unknown[0], TITLES, n=3, cutoff=0.4)
        raise ValueRangeError(
            f"evaluate: metrics must be a list of names; got {unknown[0]!r}. "
            + (f"Nearest: {', '.join(near)}." if near else f"Known: {', '.join(TITLES)}.")
        )
    return frozenset(names)


def _row_values(batch: Table) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logit, label = batch.logit, batch.label
    return (
        ~measures.correct(logit, label),
        measures.confidence(logit),
        measures.nll_per_row(logit, label),
        measures.brier_per_row(logit, label),
    )


def _check_foreign(ood: object) -> None:
    check_table(ood, by="evaluate", what="ood")
    if isinstance(ood, Table) and len(ood) == 0:
        raise TableError(
            f"evaluate: ood must have at least one row; {ood.name} has none. Give images that the model does not know, "
            f"or leave ood out."
        )


def _asked_alike(name: str, score: Array | Score, table: Table, ood: Table) -> None:
    """Raise TableError where foreign images were asked otherwise about: numbers would differ for that alone."""
    inner = score.score_of if isinstance(score, Temperature) else score
    of = inner.of if isinstance(inner, ScoreOfMembers | ScoreOfLayers | GradNorm) else None
    if of is not None and (differs := asked_otherwise(table, ood, of)):
        raise TableError(
            f"evaluate: '{name}' compares '{of}' of {table.name} and of {ood.name}, which were asked with other "
            f"settings ({differs}). Extract both alike."
        )


def _foreign(name: str, score: Array | Score, u: Tensor, ood: Table) -> dict[str, Task]:
    if not isinstance(score, Score):
        raise TableError(
            f"evaluate: with ood=..., '{name}' must be a fitted score, so that the foreign table can be scored too; "
            f"an array came. Pass the score itself."
        )
    known_and_foreign = torch.cat([u, score.score(ood)])
    foreign = torch.arange(len(known_and_foreign)) >= len(u)
    return {
        "ood_auroc": (measures.auroc, known_and_foreign, foreign),
        "ood_average_precision": (measures.average_precision, known_and_foreign, foreign),
        "ood_fpr95": (measures.fpr_at_tpr, known_and_foreign, foreign),
    }


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _cost(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:.1f}"
