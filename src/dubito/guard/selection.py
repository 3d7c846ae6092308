"""What is decided before calibration: which scores, how they are combined, which rows serve which purpose.

Everything here rests on the selection images (and on those that scores learn from), never on calibration images, so
whatever is chosen, well or badly, cannot invalidate the guarantee.
"""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from dubito.errors import DubitoError, DubitoWarning, GuardError
from dubito.evaluate.uncertainties import check_any_scores
from dubito.guard.combination import Combination, choose, quantiles
from dubito.guard.guarantee import Guarantee, Outcomes
from dubito.guard.thresholds import Threshold
from dubito.metrics import wrong_predictions
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
"""Scores that measure it, best first."""
_LEARN, _SELECT, _SELECT_ALONE = 0.15, 0.15, 0.2
"""Shares of a table: for scores to learn from, to select on; and to select on where nothing must be learned."""

Scores = Mapping[str, Score | str] | Sequence[Score | str] | Score | str
"""By name; or scores, or names of registered ones."""


class Split(NamedTuple):
    """Rows of a table, each for one purpose.

    Attributes:
        learn: What scores learn from; None where they have a table of their own, or nothing to learn.
        select: Which scores are selected on, and candidate thresholds are taken from.
        calibrate: What the guarantee rests on: seen once, when everything else is fixed.
    """

    learn: Table | None
    select: Table
    calibrate: Table

    @classmethod
    def of(cls, table: Table, *, learn: bool, seed: int) -> "Split":
        """Cut a table at random; `learn` says whether scores have still to learn from it."""
        if "image_index" in table and int(table.whole("image_index").unique().numel()) < len(table):
            raise GuardError(
                f"{table.name} has several augmented rows of each image; they are not independent, and a guarantee "
                f"would count each image several times. Extract every image once, without epochs=... ."
            )
        if len(table) < 3:
            raise GuardError(f"a guard needs at least three rows, one per purpose; {table.name} has {len(table)}.")
        order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
        first = max(1, round(_LEARN * len(table))) if learn else 0
        last = first + max(1, round((_SELECT if learn else _SELECT_ALONE) * len(table)))
        parts = [chosen_rows(table, rows.sort().values) for rows in (order[:first], order[first:last], order[last:])]
        return cls(parts[0] if learn else None, parts[1], parts[2])


@final
@dataclass(frozen=True)
class Roles:
    """Names of the scores that measure each kind of uncertainty; None for none.

    Attributes:
        aleatoric: Ambiguity of the image: a head, an ensemble's expected entropy, else the entropy of the softmax.
        epistemic: Novelty to the model: an ensemble's disagreement, REGrad, else the density.
        density: How rare the feature is among in-distribution ones.
    """

    aleatoric: str | None
    epistemic: str | None
    density: str | None

    @classmethod
    def of(cls, scores: dict[str, Score], table: Table) -> "Roles":
        """Which score measures what; entropy is added where nothing measures the ambiguity of an image by itself."""
        aleatoric = next((name for name, score in scores.items() if score.kind == "aleatoric"), None)
        if aleatoric is None and "logit" in table and table.shape("logit")[1] > 1:
            aleatoric = Entropy.name
            scores.setdefault(aleatoric, Entropy())
        epistemic = next((name for best in _EPISTEMIC for name, one in scores.items() if one.name == best), None)
        if epistemic is None:
            epistemic = next((name for name, score in scores.items() if score.kind == "epistemic"), None)
        density = next((name for name, score in scores.items() if score.name == Density.name), None)
        return cls(aleatoric, epistemic, density)

    def __str__(self) -> str:
        stands_in = ", which stands in for it" if self.aleatoric == Entropy.name else ""
        parts = [f"aleatoric by {self.aleatoric}{stands_in}"] if self.aleatoric else []
        return "; ".join(parts + ([f"epistemic by {self.epistemic}"] if self.epistemic else [])) or "not measured"

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are there."""
        return tuple(name for name in (self.aleatoric, self.epistemic, self.density) if name)


@final
@dataclass
class ScoreSelection:
    """What the selection images decide.

    Attributes:
        combination: Which scores make the uncertainty, and how.
        scores: The scores that are needed, fitted.
        reference_quantiles: By score, its quantiles on the selection images, to rank others by.
        uncertainty_quantiles: Quantiles of the uncertainty itself.
        roles: Which score measures which kind of uncertainty.
        gate: Images with a density score above it are refused; None for no such rule.
        outcomes: Uncertainties and errors of the selection images.
        novel: Calibration images above the gate, once a threshold was calibrated.
    """

    combination: Combination
    scores: dict[str, Score]
    reference_quantiles: dict[str, Float64[Tensor, "_"]]
    uncertainty_quantiles: Float64[Tensor, "q"]
    roles: Roles
    gate: float | None
    outcomes: Outcomes
    novel: int = 0

    @classmethod
    def fit(
        cls, scores: dict[str, Score], candidates: list[str], table: Table, *, labelled: bool, novel: float, seed: int
    ) -> "ScoreSelection":
        """From the selection images alone."""
        roles = Roles.of(scores, table)
        values = {name: score.score(table) for name, score in scores.items()}
        wrong = wrong_predictions(table, by="guard.fit").numpy() if labelled else None
        if wrong is None:
            combination = Combination({candidates[0]: 1.0}, {})
        else:
            combination = choose({name: values[name].numpy() for name in candidates}, wrong, seed)
        kept = dict.fromkeys([*combination.weights, *roles.names])
        reference = {name: quantiles(values[name]) for name in kept}
        gate = None
        if roles.density is not None and novel > 0:
            gate = float(np.quantile(values[roles.density].numpy(), 1 - novel, method="higher"))
        u = combination.of(values, reference)
        refused = novel_rows(values, roles.density, gate, len(table))
        outcomes = (torch.where(refused, torch.inf, u).numpy(), wrong)
        return cls(combination, {name: scores[name] for name in kept}, reference, quantiles(u), roles, gate, outcomes)

    def threshold(self, guarantee: Guarantee, calibrate: Table, rows: int) -> Threshold:
        """From the calibration images, which are seen here for the first time; the whole table has `rows`."""
        names = dict.fromkeys([*self.combination.weights, *([self.roles.density] if self.roles.density else [])])
        values = {name: self.scores[name].score(calibrate) for name in names}
        refused = novel_rows(values, self.roles.density, self.gate, len(calibrate))
        self.novel = int(refused.sum())
        u = torch.where(refused, torch.inf, self.combination.of(values, self.reference_quantiles)).numpy()
        wrong = None if self.outcomes[1] is None else wrong_predictions(calibrate, by="guard.fit").numpy()
        try:
            return guarantee.threshold(self.outcomes, (u, wrong))
        except GuardError as error:
            raise GuardError(
                f"guard.fit: {error} Of the table's {rows} rows, {len(calibrate)} are there to calibrate; the "
                f"uncertainty is {self.combination}."
            ) from error


def named_scores(scores: Scores) -> dict[str, Score]:
    """The user's scores by name, made where only a name is given; at least one."""
    named: dict[str, Score] = by_name(scores, by="guard.fit", arrays=False)
    check_any_scores(named, by="guard.fit")
    return named


def must_learn(scores: Mapping[str, Score] | None) -> bool:
    """Whether any of them has still to learn; None stands for all that the columns allow."""
    return scores is None or any(not score.is_fitted for score in scores.values())


def fitted_scores(scores: Mapping[str, Score] | None, table: Table, learn: Table | None) -> dict[str, Score]:
    """Ready for tables like this: the user's, or all that its columns allow.

    Those that learn do so from `learn`; a temperature from the table itself, because images that a model was trained on
    do not show its overconfidence. A head from the shelf measures the aleatoric uncertainty, see `competing`.
    """
    if scores is not None:
        ready = dict(scores)
        for name, score in ready.items():
            if not score.is_fitted:
                ready[name] = _fitted(name, score, table if isinstance(score, Temperature) else learn)
            table.require(*score.needs, by=f"guard: {name}")
        return ready
    ready = available_scores(table, learn).scores
    if not ready:
        raise GuardError(f"no score can be computed from {table.name}, which has {', '.join(table.columns)}.")
    if "temperature" in ready or "label" in table:
        try:
            ready["temperature"] = Temperature().fit(table)
        except DubitoError:  # all right or all wrong: there is no best temperature
            ready.pop("temperature", None)
    return ready


def competing(scores: Mapping[str, Score], *, chosen_by_user: bool) -> list[str]:
    """Which of them the uncertainty may be made of: all that the user chose, else all but a head from the shelf.

    Nobody knows which images that head has learned from. Were they those of the table, labels and all, it would know
    the calibration images by heart, and the guarantee would not hold.
    """
    return [name for name, score in scores.items() if chosen_by_user or not isinstance(score, UncertaintyHead)]


def lacks_density(scores: Mapping[str, Score] | None, table: Table, novel: float) -> bool:
    """Whether novel images are to be refused, and could be, but none of the user's scores is a density."""
    if novel <= 0 or scores is None or "feature" not in table:
        return False
    return not any(isinstance(score, Density) for score in scores.values())


def with_density(scores: Mapping[str, Score], learn: Table | None) -> dict[str, Score]:
    """One more score, which measures novelty and does not compete; a warning where no density can be fitted."""
    if learn is None:  # what learns has a part of the table, or a table of its own
        return dict(scores)
    try:
        density = default_density(learn, by="guard.fit", most=QUICK).fit(learn)
    except DubitoError as error:
        warnings.warn(
            f"guard.fit: images unlike the in-distribution ones will not be refused, because no density could be "
            f"learned ({error}) Give more images, or use novel=0.",
            DubitoWarning,
            stacklevel=3,
        )
        return dict(scores)
    return {**scores, Density.name if Density.name not in scores else "novelty": density}


def subsample(learn: Table | None) -> Table | None:
    """Not more rows to learn from than a guard keeps: `MOST_LEARNED` at random."""
    if learn is None or len(learn) <= MOST_LEARNED:
        return learn
    rows = torch.randperm(len(learn), generator=torch.Generator().manual_seed(0))[:MOST_LEARNED].sort().values
    return chosen_rows(learn, rows)


def novel_rows(values: Mapping[str, Tensor], density: str | None, gate: float | None, n: int) -> Bool[Tensor, "n"]:
    """Rows whose density score lies above the gate; none without one."""
    return torch.zeros(n, dtype=torch.bool) if density is None or gate is None else values[density] > gate


def _fitted(name: str, score: Score, learn: Table | None) -> Score:
    """A fitted copy, so that the user's own stays as it is; of a density without settings, the one that suits."""
    if learn is None:
        raise GuardError(
            f"score '{name}' is not fitted, and there is nothing to learn from. Fit it, or give train=... ."
        )
    suiting = default_density(learn, by="density.fit", most=QUICK) if score == Density() else None
    return (suiting or copy.deepcopy(score)).fit(learn)
