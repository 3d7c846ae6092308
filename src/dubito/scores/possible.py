"""Which scores a table allows: all that are registered, fitted where they learn, and for the others why not."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import final

from dubito.errors import DubitoError, TableError
from dubito.heads.score import UncertaintyHead
from dubito.heads.shelf import entry_for
from dubito.scores._layers import ScoreOfLayers
from dubito.scores._members import ScoreOfMembers
from dubito.scores.default_density import QUICK, default_density
from dubito.scores.last_layer_gradient import GradNorm
from dubito.scores.perturbation import PerturbationVariance
from dubito.scores.registry import SCORES, make_score
from dubito.scores.temperature import Temperature
from dubito.table import Table, asked_otherwise, ensembles_in, writer_of
from dubito.types import Score


@final
@dataclass
class Possible:
    """Scores that are ready, and those that are not.

    Attributes:
        scores: By name, fitted.
        fit_seconds: What fitting took, of those that learn here.
        left_out: By name, why.
    """

    scores: dict[str, Score] = field(default_factory=dict)
    fit_seconds: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def possible_scores(table: Table, train: Table | None) -> Possible:
    """Every registered score that the columns of a table allow; those that learn are fitted on `train`.

    A score of members comes once for each ensemble of the table (of tiles, the finest grid). An uncertainty head is
    taken from the shelf if one was trained for the model that made the table.
    """
    found = Possible()
    for name in SCORES:
        if name == UncertaintyHead.name:
            _add_head(found, table)
            continue
        for shown, score in _made(name, table).items():
            _add(found, shown, score, table, train)
    return found


def ensembles_to_score(table: Table) -> tuple[str, ...]:
    """The ensembles of a table, of tiles only the finest grid.

    >>> ensembles_to_score(Table(tiles_2=[[0.0]], tiles_7=[[0.0]], members=[[0.0]]))
    ('tiles_7', 'members')
    """
    found = ensembles_in(table.columns)
    tiles = sorted((one for one in found if one.startswith("tiles_")), key=lambda one: int(one.rpartition("_")[2]))
    return tuple(one for one in found if one not in tiles[:-1])


def why_not_foreign(score: Score, table: Table, foreign: Table) -> str | None:
    """Why a score cannot be compared across two tables: a column is missing, or was asked otherwise."""
    missing = [column for column in reads(score, foreign) if column not in foreign]
    if missing:
        return f"{foreign.name} lacks column '{missing[0]}'"
    inner = score.score_of if isinstance(score, Temperature) else score
    of = inner.of if isinstance(inner, ScoreOfMembers | ScoreOfLayers | GradNorm) else None
    differs = asked_otherwise(table, foreign, of) if of is not None else None
    return (
        f"'{of}' of {table.name} and of {foreign.name} were asked with other settings ({differs})" if differs else None
    )


def reads(score: Score, table: Table) -> tuple[str, ...]:
    """The columns of a table that a score reads: of an ensemble, its summary or its members' logits."""
    return (score.column_in(table),) if isinstance(score, ScoreOfMembers) else score.needs


def _made(name: str, table: Table) -> dict[str, Score]:
    kind = SCORES[name]
    if not issubclass(kind, ScoreOfMembers) or issubclass(kind, PerturbationVariance):
        return {name: make_score(name)}
    ensembles = ensembles_to_score(table)
    if len(ensembles) < 2:
        return {name: make_score(name, of=ensembles[0]) if ensembles else make_score(name)}
    return {f"{name}:{one}": make_score(name, of=one) for one in ensembles}


def _add(found: Possible, name: str, score: Score, table: Table, train: Table | None) -> None:
    try:
        _check(score, table)
        if score.learned:
            if train is None:
                found.left_out[name] = f"it learns first: give train, with {', '.join(score.learns_from)}"
                return
            start = perf_counter()
            if name == "density":
                score = default_density(train, by="density.fit", most=QUICK)
            score.fit(train)
            found.fit_seconds[name] = perf_counter() - start
    except DubitoError as error:
        found.left_out[name] = str(error)
    else:
        found.scores[name] = score


def _check(score: Score, table: Table) -> None:
    for column in reads(score, table):
        if column not in table:
            raise TableError(f"there is no column '{column}'; it is written by {writer_of(column) or 'no probe here'}")
    if isinstance(score, ScoreOfLayers):
        score.check_layers_of(table)


def _add_head(found: Possible, table: Table) -> None:
    name = UncertaintyHead.name
    entry = entry_for(table.provenance)
    if entry is None:
        found.left_out[name] = "no head here was trained for the model that made the table (dubito.train trains one)"
    elif "feature" in table:
        found.scores[name] = UncertaintyHead.from_pretrained(entry.path)
    else:
        found.left_out[name] = f"it reads features, which {table.name} does not have"
