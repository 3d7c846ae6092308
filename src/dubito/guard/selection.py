"""What is decided before calibration: which scores, how they are combined, which rows serve which purpose.

Everything here rests on the reference images (and on those that scores learn from), never on calibration images, so
whatever is chosen, well or badly, cannot invalidate the guarantee.

Reference images are few, because every one of them is missing from the calibration. So they serve twice: scores learn
from all of them, and are compared by values of folds that they have not learned from (cross-fitting). The first
candidate is max-probability at a temperature that fits the reference labels: of a score of the logits, a calibrated
probability of being right is the best that selective prediction can use.
"""

import contextlib
import copy
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float64
from safetensors.torch import load_file, save
from torch import Tensor

from dubito.errors import (
    ArtefactError,
    DubitoError,
    DubitoWarning,
    GuardError,
    MissingColumnError,
    TableError,
    UnlabelledError,
)
from dubito.evaluate.evaluate import check_any_scores
from dubito.guard.combination import Combination, choose, quantiles
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
"""Rows of `train` that scores learn from: they are kept in part with the guard, and it should stay small."""
REFERENCE, _FEWEST, _MOST = 0.1, 40, 10_000
"""Reference images: this share of a table, but at least 40 unless these were more than a fifth, and at most 10,000."""
_FEWEST_TO_GATE = 20
"""With fewer reference images, a gate above all of them would refuse too many others: there is none."""
_FOLDS = 3
_EPISTEMIC = (
    *("mutual_information", "regrad", "density", "vbll", "laplace"),
    *("neighbours", "mahalanobis_pp", "layer_mahalanobis", "nnguide"),
)
"""Scores that measure it, of which the first is taken: models of the uncertainty before distances. The density costs
nothing more, because the novelty gate needs it anyway; `neighbours` and `mahalanobis_pp` find more OOD images."""
_STATE, _UNCERTAINTY = "state.safetensors", "uncertainty"
_MEMORISED = (
    "Scores that have learned from them have memorised them, and the guarantee would not hold for other images. Pass "
    "other images as train, or leave it out: a part of the table is set aside for it."
)
_TWICE = "The guarantee counts them as independent, and may not hold. Leave duplicates out: dubito.audit finds them."

Scores = Mapping[str, Score | str] | Sequence[Score | str] | Score | str
"""By name; or scores, or names of registered ones."""


def split(table: Table, *, seed: int) -> tuple[Table, Table]:
    """Cut a table at random into reference images and calibration images.

    The guarantee rests on the second part alone, which is seen once, when everything else is fixed.
    """
    n = len(table)
    if "image_index" in table and int(table.whole("image_index").unique().numel()) < n:
        raise GuardError(
            f"{table.name} has several augmented rows of each image; they are not independent, and a guarantee would "
            f"count each image several times. Extract every image once, without epochs=... ."
        )
    if n < 2:
        raise GuardError(
            f"Guard.fit needs at least two rows, one for reference and one to calibrate; {table.name} has {n}. "
            f"Pass more images."
        )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    count = max(1, min(_MOST, max(round(REFERENCE * n), min(_FEWEST, n // 5))))
    return chosen_rows(table, order[:count].sort().values), chosen_rows(table, order[count:].sort().values)


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
    """What the reference images decide.

    Attributes:
        combination: Which scores make the uncertainty, and how.
        scores: The scores that are needed, fitted.
        reference_quantiles: By score, its quantiles on the reference images, to rank others by.
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
        cls,
        scores: dict[str, Score],
        values: Mapping[str, Float64[Tensor, "n"]],
        candidates: Sequence[str],
        table: Table,
        *,
        labelled: bool,
        novel: float,
        seed: int,
    ) -> "ScoreSelection":
        """From the reference images alone: scores, their values there, and which of them may make the uncertainty."""
        roles = Roles.of(scores, table)
        values = dict(values) | {name: scores[name].score(table) for name in scores if name not in values}
        combination = Combination({candidates[0]: 1.0}, {})
        if labelled:
            wrong = wrong_predictions(table, by="Guard.fit").numpy()
            combination = choose({name: values[name].numpy() for name in candidates}, wrong, seed)
        kept = dict.fromkeys([*combination.weights, *filter(None, roles)])
        reference = {name: quantiles(values[name], name) for name in kept}
        gate = None
        if roles.density is not None and novel > 0:
            gate = float(np.quantile(values[roles.density].numpy(), 1 - novel, method="higher"))
        ranked = quantiles(combination.of(values, reference), str(combination))
        return cls(combination, {name: scores[name] for name in kept}, reference, ranked, roles, gate)

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
        for name, grid in state.items():
            if grid.dtype != torch.float64 or grid.ndim != 1 or not len(grid) or not grid.isfinite().all():
                raise ValueError(f"quantiles '{name}' must be finite numbers; got {grid.dtype}, {tuple(grid.shape)}")
        return cls(combination, scores, reference, state[_UNCERTAINTY], roles, described["gate"])


def select_scores(
    table: Table, scores: Scores | None, train: Table | None, *, labelled: bool, novel: float, seed: int
) -> tuple[ScoreSelection, Table, dict[str, int]]:
    """The score selection, the part of the table to calibrate, and the size of each part.

    Arguments are those of `Guard.fit`; `labelled` says whether labels show which predictions are wrong.
    """
    chosen: dict[str, Score] | None = None if scores is None else by_name(scores, by="Guard.fit", arrays=False)
    if chosen is not None:
        check_any_scores(chosen, by="Guard.fit")
    reference, calibrate = split(table, seed=seed)
    warn_shared(calibrate, reference, by="Guard.fit", what="its reference images", harm=_TWICE, allowed=SHARED)
    if train is not None and len(train) > MOST_LEARNED:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
        train = chosen_rows(train, order[:MOST_LEARNED].sort().values)
    if train is not None:
        check_disjoint(table, train, by="Guard.fit", what="train", harm=_MEMORISED, error=GuardError)
    gated = novel > 0 and "feature" in table and len(reference) >= _FEWEST_TO_GATE
    with _few_to_learn_from(table, reference) if train is None else contextlib.nullcontext():
        fitted, candidates = fitted_scores(chosen, reference, train, novelty=gated)
    values: dict[str, Tensor] = {}
    if train is None and len(reference) >= _FOLDS and any(score.learned for score in fitted.values()):
        values = _cross_fitted(reference, chosen, novelty=gated, seed=seed)
        kept = {*values, *(chosen or ())}  # without what some fold cannot learn, unless the user has chosen it
        fitted = {name: score for name, score in fitted.items() if name in kept}
        candidates = [name for name in candidates if name in kept]
    options: dict[str, Any] = {"labelled": labelled, "novel": novel if gated else 0.0, "seed": seed}
    selection = ScoreSelection.fit(fitted, values, candidates, reference, **options)
    if gated and selection.gate is None:
        warnings.warn(
            f"Guard.fit: images unlike the in-distribution ones will not be refused, because no density could be "
            f"learned from {len(reference if train is None else train)} images. Pass more images, or use novel=0.",
            DubitoWarning,
            stacklevel=3,
        )
    rows = {"train": 0 if train is None else len(train), "reference": len(reference), "calibrate": len(calibrate)}
    return selection, calibrate, rows


@contextlib.contextmanager
def _few_to_learn_from(table: Table, reference: Table) -> Iterator[None]:
    """Errors of scores that find a table too small, with the reason: they see the reference images alone."""
    try:
        yield
    except (MissingColumnError, UnlabelledError):
        raise
    except TableError as error:
        raise GuardError(
            f"Guard.fit: {error} Of the {len(table)} images of {table.name}, scores learn from the {len(reference)} "
            f"reference images; the others calibrate. Pass train=..., a table of other images to learn from, such as "
            f"the model's training images."
        ) from error


def fitted_scores(
    scores: Mapping[str, Score] | None,
    reference: Table,
    train: Table | None = None,
    *,
    novelty: bool = False,
    strict: bool = True,
) -> tuple[dict[str, Score], list[str]]:
    """Scores that are ready for tables like the reference, and the names of those that may make the uncertainty.

    These are the user's, or all that the columns allow, except for those that are designed for OOD images alone.
    Those that learn do so from `train`, else from the reference images; a temperature always from these, because
    images that a model was trained on do not show its overconfidence.
    With `novelty`, there is a density to measure it, which does not compete unless it is the user's. A head that ships
    measures the aleatoric uncertainty, but does not compete: nobody knows which images it has learned from. If they
    were those of the table, it would have memorised the calibration images, and the guarantee would not hold.
    Unless `strict`, scores that cannot learn from so few images are left out.
    """
    learn = reference if train is None else train
    if scores is not None:
        ready: dict[str, Score] = {}
        for name, score in scores.items():
            with contextlib.nullcontext() if strict else contextlib.suppress(DubitoError):
                ready[name] = _fitted(name, score, reference, learn)
        candidates = list(ready)
        if novelty and not any(isinstance(score, Density) for score in ready.values()):
            with contextlib.suppress(DubitoError):  # too few images: `select_scores` warns
                name = "novelty" if Density.name in ready else Density.name
                ready[name] = default_density(learn, by="Guard.fit", most=QUICK).fit(learn)
        return ready, candidates
    ready = available_scores(reference, learn, ood_only=False).scores
    if not ready:
        raise GuardError(
            f"Guard.fit: no score can be computed from {reference.name}, which has {', '.join(reference.columns)}. "
            f"Extract logits, or pass scores=[...]."
        )
    ready.pop(Temperature.name, None)
    if "label" in reference:
        with contextlib.suppress(DubitoError):  # all right or all wrong: there is no best temperature
            ready = {Temperature.name: Temperature().fit(reference), **ready}
    return ready, [name for name, score in ready.items() if not isinstance(score, UncertaintyHead)]


def _fitted(name: str, score: Score, reference: Table, learn: Table) -> Score:
    """A user's score, ready: a copy where it must learn, so that the user's own stays as it is."""
    reference.require(*score.needs, by=f"guard: {name}")
    if score.is_fitted:
        return score
    if isinstance(score, Temperature):
        return copy.deepcopy(score).fit(reference)
    plain = score == Density()  # without settings, the one that suits
    return (default_density(learn, by="density.fit", most=QUICK) if plain else copy.deepcopy(score)).fit(learn)


def _cross_fitted(
    reference: Table, chosen: Mapping[str, Score] | None, *, novelty: bool, seed: int
) -> dict[str, Float64[Tensor, "n"]]:
    """Of every row, the values of scores that were fitted on the other folds; those that some fold lacks are absent."""
    n = len(reference)
    fold = torch.randperm(n, generator=torch.Generator().manual_seed(seed)) % _FOLDS
    values: dict[str, Tensor] = {}
    for number in range(_FOLDS):
        inside = fold == number
        part, rest = (chosen_rows(reference, rows.nonzero()[:, 0]) for rows in (inside, ~inside))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DubitoWarning)  # what it says of all rows was said before
            scores = fitted_scores(chosen, rest, novelty=novelty, strict=False)[0]
        for name, score in scores.items():
            values.setdefault(name, torch.full((n,), torch.nan, dtype=torch.float64))[inside] = score.score(part)
    return {name: one for name, one in values.items() if not one.isnan().any()}


def _places(folder: Path, names: Sequence[str]) -> list[Path]:
    """Where scores are saved: folders inside this one, whatever their names."""
    return [folder / f"{number:02d}_{re.sub(r'[^a-zA-Z0-9_.-]', '_', name)}" for number, name in enumerate(names)]
