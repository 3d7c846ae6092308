"""Which scores a guard may use, and which of them tell the aleatoric, the epistemic and the density of an image."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from dubito.errors import DubitoError, DubitoWarning, GuardError
from dubito.evaluate.uncertainties import check_any_scores
from dubito.scores import UncertaintyHead
from dubito.scores.available import available_scores
from dubito.scores.density import QUICK, Density, default_density
from dubito.scores.registry import by_name
from dubito.scores.softmax import Entropy
from dubito.scores.temperature import Temperature
from dubito.table import Table
from dubito.table.views import chosen_rows
from dubito.types import Score

MOST_LEARNED = 50_000
"""Rows that scores learn from: they are kept in part with the guard, and it should stay small."""
_EPISTEMIC = ("mutual_information", "regrad", "density", "neighbours")
"""Whom to ask for it, best first."""

Scores = Mapping[str, Score | str] | Sequence[Score | str] | Score | str
"""By name; or scores, or names of registered ones."""


@final
@dataclass(frozen=True)
class Roles:
    """Names of the scores that tell what kind of doubt it is; None for none.

    Attributes:
        aleatoric: Ambiguity of the image: a head, an ensemble's expected entropy, else the entropy of the softmax.
        epistemic: Novelty to the model: an ensemble's disagreement, REGrad, else the density.
        density: How rare the feature is among known ones.
    """

    aleatoric: str | None
    epistemic: str | None
    density: str | None

    def __str__(self) -> str:
        stands_in = ", which stands in for it" if self.aleatoric == Entropy.name else ""
        told = [f"aleatoric by {self.aleatoric}{stands_in}"] if self.aleatoric else []
        return "; ".join(told + ([f"epistemic by {self.epistemic}"] if self.epistemic else [])) or "not told"

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are there."""
        return tuple(name for name in (self.aleatoric, self.epistemic, self.density) if name)


def given_scores(scores: Scores) -> dict[str, Score]:
    """By name, made where only a name came; at least one."""
    found: dict[str, Score] = by_name(scores, by="guard.fit", arrays=False)
    check_any_scores(found, by="guard.fit")
    return found


def learns(scores: Mapping[str, Score] | None) -> bool:
    """Whether any of them has still to learn; None stands for all that there are."""
    return scores is None or any(not score.is_fitted for score in scores.values())


def fitted_scores(scores: Mapping[str, Score] | None, table: Table, learn: Table | None) -> dict[str, Score]:
    """Ready for tables like this: those given, or all that its columns allow.

    Those that learn do so from `learn`; a temperature from the table itself, because images that a model was trained on
    tell nothing of its overconfidence. A head from the shelf is there to tell the aleatoric, see `competing`.
    """
    if scores is not None:
        found = dict(scores)
        for name, score in found.items():
            if not score.is_fitted:
                found[name] = _fitted(name, score, table if isinstance(score, Temperature) else learn)
            for column in score.needs:
                table.require(column, by=f"guard: {name}")
        return found
    found = available_scores(table, learn).scores
    if not found:
        raise GuardError(f"no score can be computed from {table.name}, which has {', '.join(table.columns)}.")
    if "temperature" in found or "label" in table:
        try:
            found["temperature"] = Temperature().fit(table)
        except DubitoError:  # all right or all wrong: there is no best temperature
            found.pop("temperature", None)
    return found


def competing(found: Mapping[str, Score], given: bool) -> list[str]:
    """Which of them the uncertainty may be made of: all that were given, else all but a head from the shelf.

    Nobody can tell which images that one has learned from. Were they those of the table, labels and all, it would know
    the calibration images by heart, and the promise would not hold.
    """
    return [name for name, score in found.items() if given or not isinstance(score, UncertaintyHead)]


def lacks_density(scores: Mapping[str, Score] | None, table: Table, novel: float) -> bool:
    """Whether novel images are to be refused, and could be, but none of the scores that were given is a density."""
    if novel <= 0 or scores is None or "feature" not in table:
        return False
    return not any(isinstance(score, Density) for score in scores.values())


def with_density(found: Mapping[str, Score], learn: Table | None) -> dict[str, Score]:
    """One more score, which tells novelty and does not compete; a warning where no density can be had."""
    if learn is None:  # what learns has a part of the table, or a table of its own
        return dict(found)
    try:
        density = default_density(learn, by="guard.fit", most=QUICK).fit(learn)
    except DubitoError as error:
        warnings.warn(
            f"guard.fit: images unlike the known ones will not be refused, because no density could be learned "
            f"({error}) Give more images, or say novel=0.",
            DubitoWarning,
            stacklevel=3,
        )
        return dict(found)
    return {**found, Density.name if Density.name not in found else "novelty": density}


def roles_of(scores: dict[str, Score], table: Table) -> Roles:
    """Which score tells what; entropy stands in where nothing tells the ambiguity of an image by itself."""
    aleatoric = next((name for name, score in scores.items() if score.kind == "aleatoric"), None)
    if aleatoric is None and "logit" in table and table.shape("logit")[1] > 1:
        aleatoric = Entropy.name
        scores.setdefault(aleatoric, Entropy())
    epistemic = next((name for wanted in _EPISTEMIC for name, one in scores.items() if one.name == wanted), None)
    if epistemic is None:
        epistemic = next((name for name, score in scores.items() if score.kind == "epistemic"), None)
    return Roles(aleatoric, epistemic, next((name for name, score in scores.items() if score.name == "density"), None))


def few(learn: Table | None) -> Table | None:
    """Not more rows to learn from than a guard keeps: `MOST_LEARNED` at random."""
    if learn is None or len(learn) <= MOST_LEARNED:
        return learn
    rows = torch.randperm(len(learn), generator=torch.Generator().manual_seed(0))[:MOST_LEARNED].sort().values
    return chosen_rows(learn, rows)


def _fitted(name: str, score: Score, learn: Table | None) -> Score:
    """A fitted copy, so that the user's own stays as it is; of a density without settings, the one that suits."""
    if learn is None:
        raise GuardError(
            f"score '{name}' is not fitted, and there is nothing to learn from. Fit it, or give train=... ."
        )
    suiting = default_density(learn, by="density.fit", most=QUICK) if score == Density() else None
    return (suiting or copy.deepcopy(score)).fit(learn)
