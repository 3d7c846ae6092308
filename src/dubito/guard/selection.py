"""What is decided before calibration: which scores, how they are combined, which rows serve which purpose.

Everything here rests on the selection images (and on those that scores learn from), never on calibration images, so
whatever is chosen, well or badly, cannot invalidate the guarantee.
"""

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float64
from safetensors.torch import load_file, save
from torch import Tensor

from dubito.errors import ArtefactError, DubitoError, DubitoWarning, GuardError
from dubito.evaluate.evaluate import check_any_scores
from dubito.guard.combination import Combination, choose, quantiles
from dubito.guard.thresholds import Outcomes
from dubito.metrics import wrong_predictions
from dubito.scores import Entropy, Temperature, UncertaintyHead, load_score, save_score
from dubito.scores.available import available_scores
from dubito.scores.density import QUICK, Density, default_density
from dubito.scores.registry import by_name
from dubito.storage import write_file
from dubito.table import Table
from dubito.table.views import chosen_rows
from dubito.types import Score
from dubito.validate import SHARED, check_disjoint, warn_shared

MOST_LEARNED = 50_000
"""Rows that scores learn from: they are kept in part with the guard, and it should stay small."""
_EPISTEMIC = ("mutual_information", "regrad", "density", "neighbours")
"""Scores that measure it, best first."""
_LEARN, _SELECT, _SELECT_ALONE = 0.15, 0.15, 0.2
"""Shares of a table: for scores to learn from, to select on; and to select on where nothing must be learned."""
_STATE, _UNCERTAINTY = "state.safetensors", "uncertainty"
_MEMORISED = (
    "Scores that have learned from them have memorised them, and the guarantee would not hold for other images. Pass "
    "other images as train, or leave it out: a part of the table is set aside for it."
)
_TWICE = "The guarantee counts them as independent, and may not hold. Leave duplicates out: dubito.audit finds them."

Scores = Mapping[str, Score | str] | Sequence[Score | str] | Score | str
"""By name; or scores, or names of registered ones."""


def split(table: Table, *, learn: bool, seed: int) -> tuple[Table | None, Table, Table]:
    """Cut a table at random into rows to learn from (None unless `learn`), to select on, and to calibrate.

    Scores are selected on the second part, and candidate thresholds are taken from it. The guarantee rests on the third
    part alone, which is seen once, when everything else is fixed.
    """
    n = len(table)
    if "image_index" in table and int(table.whole("image_index").unique().numel()) < n:
        raise GuardError(
            f"{table.name} has several augmented rows of each image; they are not independent, and a guarantee would "
            f"count each image several times. Extract every image once, without epochs=... ."
        )
    if n < 3:
        raise GuardError(
            f"Guard.fit needs at least three rows, one each to learn, select and calibrate; {table.name} has {n}. "
            f"Pass more images."
        )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    first = max(1, round(_LEARN * n)) if learn else 0
    last = first + max(1, round((_SELECT if learn else _SELECT_ALONE) * n))
    parts = [chosen_rows(table, rows.sort().values) for rows in (order[:first], order[first:last], order[last:])]
    return parts[0] if learn else None, parts[1], parts[2]


class Roles(NamedTuple):
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
        stands_in = " (no head or ensemble)" if self.aleatoric == Entropy.name else ""
        parts = [f"aleatoric by {self.aleatoric}{stands_in}"] if self.aleatoric else []
        return "; ".join(parts + ([f"epistemic by {self.epistemic}"] if self.epistemic else [])) or "not measured"


@final
@dataclass
class ScoreSelection:
    """What the selection images decide.

    Attributes:
        combination: Which scores make the uncertainty, and how.
        scores: The scores that are needed, fitted.
        reference_quantiles: By score, its quantiles on the selection images, to rank others by.
        uncertainty_quantiles: Quantiles of the uncertainty itself.
        roles: Which score measures the aleatoric uncertainty, the epistemic one and the density.
        gate: Images with a density score above it are refused; None for no such rule.
    """

    combination: Combination
    scores: dict[str, Score]
    reference_quantiles: dict[str, Float64[Tensor, "_"]]
    uncertainty_quantiles: Float64[Tensor, "q"]
    roles: Roles
    gate: float | None

    @classmethod
    def fit(
        cls, scores: dict[str, Score], candidates: list[str], table: Table, *, labelled: bool, novel: float, seed: int
    ) -> tuple["ScoreSelection", Outcomes]:
        """From the selection images alone; also returns their uncertainties and errors."""
        roles = Roles.of(scores, table)
        values = {name: score.score(table) for name, score in scores.items()}
        combination, wrong = Combination({candidates[0]: 1.0}, {}), None
        if labelled:
            wrong = wrong_predictions(table, by="Guard.fit").numpy()
            combination = choose({name: values[name].numpy() for name in candidates}, wrong, seed)
        kept = dict.fromkeys([*combination.weights, *filter(None, roles)])
        reference = {name: quantiles(values[name], name) for name in kept}
        gate = None
        if roles.density is not None and novel > 0:
            gate = float(np.quantile(values[roles.density].numpy(), 1 - novel, method="higher"))
        ranked = quantiles(combination.of(values, reference), str(combination))
        selection = cls(combination, {name: scores[name] for name in kept}, reference, ranked, roles, gate)
        u, refused = selection.uncertainty(values)
        return selection, (torch.where(refused, torch.inf, u).numpy(), wrong)

    def uncertainty(self, values: Mapping[str, Tensor]) -> tuple[Float64[Tensor, "n"], Bool[Tensor, "n"]]:
        """The uncertainty of rows from their scores, and which of them are refused as novel."""
        u = self.combination.of(values, self.reference_quantiles)
        if self.gate is None or self.roles.density is None:
            return u, torch.zeros_like(u, dtype=torch.bool)
        return u, ~(values[self.roles.density] <= self.gate)

    def write(self, folder: Path) -> None:
        """Write scores and quantiles into a folder; what is left is plain values."""
        for place, score in zip(_places(folder, list(self.scores)), self.scores.values(), strict=True):
            save_score(score, place)
        reference = {f"score.{name}": values for name, values in self.reference_quantiles.items()}
        write_file(folder / _STATE, save({_UNCERTAINTY: self.uncertainty_quantiles, **reference}))

    @classmethod
    def read(cls, folder: Path, described: Mapping[str, Any]) -> "ScoreSelection":
        """Read back what `write` wrote, with the plain values that the guard's description has."""
        state, names = load_file(folder / _STATE), described["scores"]
        combination, roles = Combination(described["weights"], described["aurc"]), Roles(**described["roles"])
        unknown = [name for name in (*combination.weights, *filter(None, roles)) if name not in names]
        if unknown or not combination.weights:
            raise ArtefactError(
                f"guard in '{folder.parent}' lacks the score '{(unknown or ['any'])[0]}'. Save it again."
            )
        scores = {name: load_score(place) for name, place in zip(names, _places(folder, names), strict=True)}
        reference = {name: state[f"score.{name}"] for name in names}
        return cls(combination, scores, reference, state[_UNCERTAINTY], roles, described["gate"])


def select_scores(
    table: Table, scores: Scores | None, train: Table | None, *, labelled: bool, novel: float, seed: int
) -> tuple[ScoreSelection, Outcomes, Table, dict[str, int]]:
    """The score selection and the outcomes of its images, the part to calibrate, and the size of each part.

    Arguments are those of `Guard.fit`; `labelled` says whether labels show which predictions are wrong.
    """
    chosen: dict[str, Score] | None = None if scores is None else by_name(scores, by="Guard.fit", arrays=False)
    if chosen is not None:
        check_any_scores(chosen, by="Guard.fit")
    must_learn = chosen is None or not all(score.is_fitted for score in chosen.values())
    has_density = chosen is None or any(isinstance(score, Density) for score in chosen.values())
    needs_density = novel > 0 and "feature" in table and not has_density
    own, select, calibrate = split(table, learn=train is None and (needs_density or must_learn), seed=seed)
    what = "the part that scores are selected on"
    warn_shared(calibrate, select, by="Guard.fit", what=what, harm=_TWICE, allowed=SHARED)
    learn = own if train is None else train
    if learn is not None and len(learn) > MOST_LEARNED:
        order = torch.randperm(len(learn), generator=torch.Generator().manual_seed(0))
        learn = chosen_rows(learn, order[:MOST_LEARNED].sort().values)
    if train is not None and learn is not None:
        check_disjoint(table, learn, by="Guard.fit", what="train", harm=_MEMORISED, error=GuardError)
    fitted, candidates = fitted_scores(chosen, select, learn)
    if needs_density and learn is not None:
        try:  # one more score, which measures novelty and does not compete
            density = default_density(learn, by="Guard.fit", most=QUICK).fit(learn)
            fitted["novelty" if Density.name in fitted else Density.name] = density
        except DubitoError as error:
            warnings.warn(
                f"Guard.fit: images unlike the in-distribution ones will not be refused, because no density could be "
                f"learned ({error}) Pass more images, or use novel=0.",
                DubitoWarning,
                stacklevel=3,
            )
    selection, outcomes = ScoreSelection.fit(fitted, candidates, select, labelled=labelled, novel=novel, seed=seed)
    rows = {"learn": 0 if learn is None else len(learn), "select": len(select), "calibrate": len(calibrate)}
    return selection, outcomes, calibrate, rows


def fitted_scores(
    scores: Mapping[str, Score] | None, table: Table, learn: Table | None
) -> tuple[dict[str, Score], list[str]]:
    """Scores that are ready for tables like this, and the names of those that the uncertainty may be made of.

    These are the user's, or all that the columns allow. Those that learn do so from `learn`; a temperature from the
    table itself, because images that a model was trained on do not show its overconfidence. A head that ships
    measures the aleatoric uncertainty, but does not compete: nobody knows which images it has learned from. If they
    were those of the table, it would have memorised the calibration images, and the guarantee would not hold.
    """
    if scores is not None:
        ready = dict(scores)
        for name, score in scores.items():
            source = table if isinstance(score, Temperature) else learn
            if not score.is_fitted and source is None:
                raise GuardError(
                    f"Guard.fit: score '{name}' is not fitted, and there is nothing to learn from. Fit it, or pass "
                    f"train=... ."
                )
            if not score.is_fitted and source is not None:  # a copy, so that the user's own stays as it is
                plain = score == Density()  # without settings, the one that suits
                copied = default_density(source, by="density.fit", most=QUICK) if plain else copy.deepcopy(score)
                ready[name] = copied.fit(source)
            table.require(*score.needs, by=f"guard: {name}")
        return ready, list(ready)
    ready = available_scores(table, learn).scores
    if not ready:
        raise GuardError(
            f"Guard.fit: no score can be computed from {table.name}, which has {', '.join(table.columns)}. "
            f"Extract logits, or pass scores=[...]."
        )
    if "temperature" in ready or "label" in table:
        try:
            ready["temperature"] = Temperature().fit(table)
        except DubitoError:  # all right or all wrong: there is no best temperature
            ready.pop("temperature", None)
    return ready, [name for name, score in ready.items() if not isinstance(score, UncertaintyHead)]


def _places(folder: Path, names: Sequence[str]) -> list[Path]:
    """Where scores are saved: folders inside this one, whatever their names."""
    return [folder / f"{number:02d}_{re.sub(r'[^a-zA-Z0-9_.-]', '_', name)}" for number, name in enumerate(names)]
