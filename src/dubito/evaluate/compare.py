"""Which score for my model? All that the table's columns allow, ranked on your own images, with what is noise said so.

    errors     are wrong answers more uncertain than right ones?      error AUROC, AURC       needs logit, label
    ood        are foreign images more uncertain than known ones?     OOD AUROC, one a set    needs a second table

All scores see the same resamples of images (a paired bootstrap). How far each is behind the best has an interval that
counts how many were compared and that the best was found on these very images (`gap_to_best`): with the given
confidence, the true best is among those that are not behind. Wrong answers are those of the table's own logits; AURC is
better when lower, and is told as what more of it a score has than the best.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dubito.errors import DubitoError, TableError
from dubito.evaluate._comparison_given import (
    check_same_model,
    given_scores,
    named_tables,
    warn_of_shared,
)
from dubito.evaluate._comparison_words import head_words
from dubito.evaluate.comparison import ERRORS, Compared, Comparison, Cost, Question
from dubito.evaluate.uncertainties import has_both
from dubito.metrics import Interval, aurc, auroc, gap_to_best, paired_draws, wrong_predictions
from dubito.metrics.bootstrap import percentiles
from dubito.scores import UncertaintyHead
from dubito.scores.possible import Possible, possible_scores, reads, why_not_foreign
from dubito.table import Table, check_table
from dubito.types import Score
from dubito.validate import check_bootstrap, check_rows, has_model_labels

Uncertainties = dict[str, dict[str | None, Float[Tensor, "_"]]]
"""By score and foreign table; None stands for the table of known images."""
_TWICE_BELOW = 0.2
"""Seconds: a shorter scoring is timed again, because the first one also reads the columns from the disk."""


def compare(
    table: Table,
    ood: Table | Mapping[str, Table] | Sequence[Table] | None = None,
    *,
    train: Table | None = None,
    scores: Mapping[str, Score | str] | Sequence[Score | str] | Score | str | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Comparison:
    """Rank scores on your own images, with intervals and cost; says which differences are noise.

    Args:
        table: Images of classes that the model knows. With labels of these classes, its errors are what a score should
            find.
        ood: Images that it does not know: a table, or several by name.
        train: Other known images, for scores that learn. Without it they are left out.
        scores: By name or as a list: fitted ones, or names of those that need not learn. By default every registered
            score that the columns allow, and a head from the shelf if one was trained for this very model.
        confidence: That the true best is among those that are not told to be behind.
        resamples: Of the paired bootstrap.
        seed: Of its draws.

    >>> table = Table(logit=[[3.0, 0.0], [0.2, 0.0], [0.0, 0.1], [0.0, 2.0]] * 5, label=[0, 1, 0, 1] * 5)
    >>> found = compare(table, resamples=50)
    >>> found["error_auroc"].leading
    ['max_probability', 'entropy', 'scaled_entropy', 'margin', 'max_logit', 'energy']
    """
    check_rows(table, by="compare")
    check_bootstrap(by="compare", confidence=confidence, resamples=resamples, seed=seed, least=2)
    strangers = named_tables(ood)
    if train is not None:
        check_table(train, by="compare", what="train")
    check_same_model(table, train, strangers)
    warn_of_shared(table, train, strangers)
    chosen = possible_scores(table, train) if scores is None else given_scores(scores)
    for name, score in list(chosen.scores.items()):
        for stranger in strangers.values():
            why = why_not_foreign(score, table, stranger)
            if why and name in chosen.scores:
                chosen.left_out[name] = why
                del chosen.scores[name]
    u, costs = _scored(chosen, table, strangers, strict=scores is not None)
    _some(chosen, table)
    found = Comparison(table.name, len(table), confidence, costs, left_out=chosen.left_out)
    for question, values, positives in _questions(found, table, u, strangers):
        question.scores = _ranked(question, values, positives, confidence=confidence, resamples=resamples, seed=seed)
        found.questions.append(question)
    if not found.questions:
        raise TableError(f"compare: {' '.join(found.remarks)}")
    found.remarks += [
        head_words(name, s.trained_) for name, s in chosen.scores.items() if isinstance(s, UncertaintyHead)
    ]
    return found


def _questions(
    found: Comparison, table: Table, u: Uncertainties, strangers: dict[str, Table]
) -> list[tuple[Question, dict[str, Tensor], Tensor]]:
    """Every question with the scores' values and the truth; why one cannot be asked becomes a remark."""
    asked: list[tuple[Question, dict[str, Tensor], Tensor]] = []
    wrong = wrong_predictions(table, by="compare") if has_model_labels(table) else None
    if wrong is None:
        found.remarks.append(
            f"{table.name} has no labels of the model's classes beside its logits, so nothing is known of errors."
            + ("" if strangers else " Extract it with labels, or give foreign images.")
        )
    elif not has_both(wrong):
        which = "wrong" if wrong.any() else "right"
        found.remarks.append(
            f"All {len(wrong)} answers are {which}, so errors cannot be ranked."
            + ("" if strangers else " Give more images, or foreign ones.")
        )
    else:
        known = {one: values[None] for one, values in u.items()}
        asked += [(Question(metric, "errors", len(wrong), int(wrong.sum())), known, wrong) for metric in ERRORS]
    for name, stranger in strangers.items():
        values = {one: torch.cat([of[None], of[name]]) for one, of in u.items()}
        is_foreign = torch.arange(len(table) + len(stranger)) >= len(table)
        asked.append((Question("ood_auroc", name, len(is_foreign), len(stranger)), values, is_foreign))
    return asked


def _ranked(
    question: Question,
    values: dict[str, Tensor],
    positives: Bool[Tensor, "n"],
    *,
    confidence: float,
    resamples: int,
    seed: int,
) -> dict[str, Compared]:
    """By name, the best first."""
    metric = aurc if question.metric == "aurc" else auroc
    draws = paired_draws(metric, list(values.values()), positives, resamples=resamples, seed=seed, by="compare")
    exact = np.array([metric(one, positives) for one in values.values()])
    sign = -1.0 if question.metric == "aurc" else 1.0
    gaps = gap_to_best(sign * exact, sign * draws, confidence=confidence)
    low, high = percentiles(draws, confidence)
    order = np.argsort(-sign * exact, kind="stable").tolist()
    names = list(values)
    return {
        names[i]: Compared(rank, Interval(float(exact[i]), float(low[i]), float(high[i]), confidence), gaps[i])
        for rank, i in enumerate(order, start=1)
    }


def _scored(
    chosen: Possible, table: Table, strangers: dict[str, Table], *, strict: bool
) -> tuple[Uncertainties, dict[str, Cost]]:
    """Of every score on every table; one that cannot be computed is left out with its reason, unless it was given."""
    u: Uncertainties = {}
    costs = {}
    for name, score in list(chosen.scores.items()):
        try:
            known, seconds = _timed(score, table)
            u[name] = {None: known} | {other: score.score(one) for other, one in strangers.items()}
        except DubitoError as error:  # noqa: PERF203 (one failure must not end the others)
            if strict:
                raise
            chosen.left_out[name] = str(error)
            del chosen.scores[name]
        else:
            costs[name] = Cost(1e6 * seconds / len(table), chosen.fit_seconds.get(name), reads(score, table))
    return u, costs


def _timed(score: Score, table: Table) -> tuple[Float[Tensor, "n"], float]:
    seconds = []
    for _ in range(2):
        start = perf_counter()
        u = score.score(table)
        seconds.append(perf_counter() - start)
        if seconds[0] > _TWICE_BELOW:
            break
    return u, min(seconds)


def _some(chosen: Possible, table: Table) -> None:
    if not chosen.scores:
        reasons = "; ".join(f"{name}: {why}" for name, why in chosen.left_out.items())
        raise TableError(f"compare: no score can be computed from {table.name} ({reasons}).")
