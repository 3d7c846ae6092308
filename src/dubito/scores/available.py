"""Which scores a table allows: every registered one, fitted where it learns; and for the others, why not.

One policy for `compare`, `Guard.fit` and the command line:

- A score of an ensemble is made for each in the table (of tiles, the finest grid), as "score:ensemble" if several.
- A score that learns is fitted on `fit`, else left out. Of densities, `default_density` is fitted, within seconds.
- An uncertainty head is used if it ships with dubito for the model that made the table, and a remark says so. Heads of
  the user's own are used only if they are passed or named: what lies on a shelf changes no result.
- A score that learns for long, or from images that only the user can choose, is made only where it is named
  (`Score.named_only`).
- Columns and layers are checked before anything is fitted. Sums over a truncated gradient probe are left out.
- What is named, or has settings, was requested: there, a reason to leave it out is an error.

Where one score is needed and none is named, `default_score` has it.
"""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, final

from dubito.errors import DubitoError, DubitoWarning, NotFittedError
from dubito.heads.score import UncertaintyHead
from dubito.heads.shelf import entry_for
from dubito.scores._last_layer import sharing
from dubito.scores.density import QUICK, Density, default_density, describe_density
from dubito.scores.deup import DEUP
from dubito.scores.neighbours import Neighbours, neighbours_among
from dubito.scores.registry import SCORES, by_name, make_score
from dubito.scores.softmax import MaxProbability
from dubito.table import Table, ensembles_in, settings_difference, writer_of
from dubito.types import Score


@final
@dataclass
class AvailableScores:
    """Scores that are ready, and those that are not.

    Attributes:
        scores: By name, fitted.
        left_out: By name, the reason.
        fit_seconds: How long fitting took, for those that learned here.
        unfitted: Which of those left out need a table to learn from.
        not_extracted: Which of those left out nobody misses: they read an optional probe that has not run, need a
            head where there is none, or are made only where they are named.
        remarks: What was chosen for the user, in whole sentences.
    """

    scores: dict[str, Score] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    fit_seconds: dict[str, float] = field(default_factory=dict)
    unfitted: list[str] = field(default_factory=list)
    not_extracted: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@sharing()
def available_scores(
    table: Table,
    fit: Table | None = None,
    *,
    names: Sequence[str] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    head: bool = True,
    ood_only: bool = True,
) -> AvailableScores:
    """Every registered score that the columns of a table allow, ready to score it.

    Args:
        table: The table to score.
        fit: In-distribution images for the scores that learn; without it they are left out.
        names: The scores to make; what cannot be made is an error then. By default all that there are.
        settings: By name of a score, the settings to make it with; what cannot be made is an error then.
        head: Whether to use the uncertainty head that ships for the model of the table, if there is one.
        ood_only: Whether to make scores that are designed to find OOD images alone, if none are named.

    >>> available_scores(Table(logit=[[1.0, 0.0]]), names=["entropy", "energy"]).scores
    {'entropy': Entropy(), 'energy': Energy(temperature=1.0)}
    """
    available, chosen = AvailableScores(), settings or {}
    for name in SCORES if names is None else names:
        if name == UncertaintyHead.name and names is None:
            if head:
                _add_head(available, table)
            continue
        strict = names is not None or name in chosen
        if not (strict or ood_only) and SCORES[name].ood_only:
            available.left_out[name] = "it is designed to find OOD images alone; name it to use it"
            continue
        if not strict and (reason := SCORES[name].named_only):
            available.left_out[name] = reason
            available.not_extracted.append(name)
            continue
        for shown, options in _per_ensemble(name, chosen.get(name, {}), table).items():
            try:
                _add(available, shown, make_score(name, **options), table, fit, strict=strict)
            except DubitoError as error:  # noqa: PERF203 (a handful of scores)
                if strict:
                    raise
                available.left_out[shown] = str(error)
    return available


@sharing()
def requested_scores(
    scores: object,
    table: Table,
    train: Table | None,
    *,
    by: str,
    repair: str = "pass train=..., other in-distribution images, or a fitted score",
) -> AvailableScores:
    """The scores that a user passes or names, ready to score a table; where one must learn, a copy is fitted.

    Args:
        scores: Scores or names of registered ones: a single one, several, or a mapping from names of the user's.
        table: The table to score.
        train: In-distribution images to fit on.
        by: The function that the user called.
        repair: How to pass images to fit on, for errors.

    >>> table = Table(feature=[[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]] * 4, logit=[[1.0, 0.0]] * 12)
    >>> list(requested_scores(["neighbours", "entropy"], table, train=table, by="compare").fit_seconds)
    ['neighbours']
    """
    requested = AvailableScores(by_name(scores, by=by, arrays=False))
    for name, score in requested.scores.items():
        score.check_columns(table)
        if score.is_fitted:
            continue
        if train is None:
            raise NotFittedError(f"{by}: {name} learns from {', '.join(score.learns_from)}: {repair}.")
        requested.scores[name] = copy.deepcopy(score)
        requested.fit_seconds[name] = _fit(requested.scores[name], train)
    return requested


def default_score(table: Table, of_logits: Score | None = None) -> tuple[Score, str]:
    """The one uncertainty of a table where none is named, ready to score it; and what it is, in words.

    Without logits, it is the distance to the tenth nearest of the other images, which needs features alone.

    Args:
        table: The table to score.
        of_logits: What to use where there are logits; by default the head that ships for the model of the table, or
            max-probability.

    >>> default_score(Table(feature=[[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]))[0].k
    3
    """
    if "logit" not in table:
        words = "the distance of an image to its tenth nearest neighbour in this table, which has no logits"
        return neighbours_among(table), f"{Neighbours.name}, {words}"
    entry = None if of_logits else entry_for(table.provenance, shipped_only=True)
    if entry is not None:
        return UncertaintyHead.from_pretrained(entry.path), f"the head '{entry.name}', which ships for this model"
    score = of_logits or MaxProbability()
    return score, score.name


def why_not_comparable(score: Score, table: Table, other: Table) -> str | None:
    """Why the values of a score on two tables cannot be compared: a column is missing, or settings differ.

    None where they can.
    """
    missing = [column for column in score.columns_in(other) if column not in other]
    if missing:
        return f"{other.name} lacks column '{missing[0]}'"
    if score.family is None or (differs := settings_difference(table, other, score.family)) is None:
        return None
    return f"'{score.family}' of {table.name} and of {other.name} were extracted with different settings ({differs})"


def _per_ensemble(name: str, options: Mapping[str, Any], table: Table) -> dict[str, dict[str, Any]]:
    """A score by the name that is shown, with its settings; one of an ensemble once for each, unless `of` is set."""
    if name not in SCORES or not SCORES[name].per_ensemble or "of" in options:
        return {name: dict(options)}
    ensembles = ensembles_in(table.columns)
    tiles = sorted((one for one in ensembles if one.startswith("tiles_")), key=lambda one: int(one.rpartition("_")[2]))
    ensembles = tuple(one for one in ensembles if one not in tiles[:-1])  # of tiles, the finest grid alone
    if len(ensembles) < 2:
        return {name: {**options, "of": ensembles[0]} if ensembles else dict(options)}
    return {f"{name}:{one}": {**options, "of": one} for one in ensembles}


def _add_head(available: AvailableScores, table: Table) -> None:
    """The head that ships for the model of the table; one of the user's own is named, never used."""
    name, shipped = UncertaintyHead.name, entry_for(table.provenance, shipped_only=True)
    if shipped is not None:
        _add(available, name, UncertaintyHead.from_pretrained(shipped.path), table, None, strict=False)
        available.remarks.append(f"{name}: {shipped.name}, which ships with dubito for this model.")
    elif (own := entry_for(table.provenance)) is not None:
        available.left_out[name] = f"a head of your own is used only if you name it; '{own.name}' fits this model"
    else:
        available.left_out[name] = "no head ships for the model of the table (train one: dubito.train)"
        available.not_extracted.append(name)


def _fit(score: Score, table: Table) -> float:
    """Fit a score on images that the user gave for all scores; returns the seconds."""
    if isinstance(score, DEUP):
        warnings.warn(
            f"{score.name} is fitted on {table.name}. If the model was trained on these images, their losses are far "
            f"too low, and what it predicts is, too. Then fit it on other labelled images, and pass the fitted score.",
            DubitoWarning,
            stacklevel=5,  # of the function that the user called
        )
    start = perf_counter()
    score.fit(table)
    return perf_counter() - start


def _add(available: AvailableScores, name: str, score: Score, table: Table, fit: Table | None, *, strict: bool) -> None:
    missing = [column for column in score.columns_in(table) if column not in table]
    if missing and not strict:
        available.left_out[name] = (
            f"there is no column '{missing[0]}'; it is written by {writer_of(missing[0]) or 'no probe here'}"
        )
        available.not_extracted += [name] if score.own_probe else []
        return
    score.check_columns(table)
    if fit is None and not score.is_fitted:
        reason = f"learns from {', '.join(score.learns_from)}: give other in-distribution images to fit on"
        if strict:
            raise NotFittedError(f"{name} {reason}.")
        available.left_out[name] = f"it {reason}"
        available.unfitted.append(name)
        return
    if fit is not None and not score.is_fitted:
        if not strict and isinstance(score, Density):
            # One that is fitted in seconds: full covariances of wide features take minutes by EM.
            score = default_density(fit, by="density.fit", most=QUICK)
            if score != Density():
                described = f"density: {describe_density(score, fit)}"
                available.remarks.append(f"{described}, to suit {len(fit):,} images of {fit.name}.")
        available.fit_seconds[name] = _fit(score, fit)
    available.scores[name] = score
