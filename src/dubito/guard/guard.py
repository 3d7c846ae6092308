"""Accept or abstain: a threshold on an uncertainty that keeps a guarantee, and for every image the reason in words.

    rows of the table -> learn       scores that learn, where no table to learn from is given
                         select      which scores, how combined, which thresholds to try
                         calibrate   the guarantee and prediction sets: seen once, when all else is fixed

The three parts are disjoint and drawn at random, so what is chosen on the first two cannot invalidate the guarantee;
see `thresholds` for the proof. It holds for images like those of the table. Images whose features are rarer than almost
all of the in-distribution ones are refused whatever their score: for them, no guarantee was tested.
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from PIL import Image
from torch import Tensor

from dubito.cache.manifest import model_identity
from dubito.cache.runner import predict_table
from dubito.data import open_images
from dubito.data.files import FileImages
from dubito.data.tree import is_image
from dubito.errors import DubitoWarning, GuardError, ImagesError, ModelError, TableError, ValueRangeError
from dubito.guard.combination import Combination, rank
from dubito.guard.conformal import PredictionSets, fitted_sets
from dubito.guard.guarantee import Guarantee
from dubito.guard.saving import read_guard, write_guard
from dubito.guard.selection import (
    Roles,
    Scores,
    ScoreSelection,
    Split,
    competing,
    fitted_scores,
    lacks_density,
    must_learn,
    named_scores,
    novel_rows,
    subsample,
    with_density,
)
from dubito.guard.thresholds import Threshold
from dubito.guard.verdict import Decisions, Verdict, top_two
from dubito.metrics import wrong_predictions
from dubito.probes.registry import probes_for
from dubito.result import Result
from dubito.table import Table, check_table
from dubito.table.overlap import example, shared_rows
from dubito.table.provenance import Provenance
from dubito.types import Classifier, Images, Json, Probe, Score
from dubito.validate import check_disjoint, check_same_model, has_model_labels

NOVEL = 0.005
_SHARED = 0.01
"""A few images may be the same by chance, in any large collection."""


@final
@dataclass(eq=False, repr=False)
class Guard(Result):
    """A classifier's predictions, accepted or refused under a guarantee. Made by `Guard.fit`, read by `Guard.load`.

    Attributes:
        guarantee: What is guaranteed.
        threshold: The threshold that keeps it, and what it did on the calibration images.
        combination: Which scores make the uncertainty.
        scores: The scores that it needs, fitted.
        reference_quantiles: By score, quantiles on the selection images, to rank others by.
        uncertainty_quantiles: Quantiles of the uncertainty itself.
        roles: Which score measures the aleatoric uncertainty, the epistemic one and the density.
        gate: Images with a density score above it are refused; None for no such rule.
        sets: Prediction sets, if there are any.
        classes: Names of the classes, if known.
        provenance: Which model it belongs to, part by part.
        rows: How many images each part of the table had.
        model: The model itself; without it, only tables can be decided on.
        probes: Probes of columns that cannot be rebuilt from the provenance.
    """

    guarantee: Guarantee
    threshold: Threshold
    combination: Combination
    scores: dict[str, Score]
    reference_quantiles: dict[str, Float64[Tensor, "_"]]
    uncertainty_quantiles: Float64[Tensor, "q"]
    roles: Roles
    gate: float | None
    sets: PredictionSets | None
    classes: Sequence[str] | None
    provenance: Provenance | None
    rows: dict[str, int]
    model: Classifier | None = None
    probes: Sequence[Probe] = ()

    @classmethod
    def fit(  # noqa: PLR0913 (one call that users type; everything after `confidence` is optional)
        cls,
        model: Classifier | None,
        table: Table,
        risk: float | None = None,
        confidence: float = 0.95,
        *,
        coverage: float | None = None,
        false_alarms: float | None = None,
        scores: Scores | None = None,
        train: Table | None = None,
        sets: PredictionSets | bool = True,
        novel: float = NOVEL,
        probes: Sequence[Probe] = (),
        seed: int = 0,
    ) -> "Guard":
        """Select scores on one part of a table and a threshold on another, so that a guarantee holds.

        Args:
            model: The model whose predictions are guarded; None to decide on tables only.
            table: Labelled images that the model was not trained on, like those to come. With coverage=..., labels
                may be missing.
            risk: At most this share of the accepted images is wrong; 0.05 unless another guarantee is chosen.
            confidence: Probability, over tables like this one, that the guarantee holds.
            coverage: Guarantee instead that at least this share of all images is accepted.
            false_alarms: Guarantee instead that at most this share of the correct predictions is refused.
            scores: Scores to choose among, by name or as a list; the first stays unless another is clearly better. By
                default all that the columns allow, max-probability first, but no uncertainty head. Scores that are
                fitted already, and heads, must have learned from other images than the table's.
            train: Table that scores learn from, such as the model's training images; by default a part of the table.
            sets: Prediction sets: how they are made, or False for none. By default of coverage 0.9, where the table
                has labels and at least nine rows to calibrate.
            novel: Refuse images whose features are rarer than all but this share of the in-distribution ones; 0 for
                none. A density measures that, even if it is not among `scores`; without features there is none.
            probes: Probes that the table was extracted with, if they cannot be rebuilt from its provenance.
            seed: Seed of the split.

        Raises:
            GuardError: The guarantee cannot be given with these images; the message says how many it takes.
        """
        guarantee = Guarantee.of(risk, confidence, coverage, false_alarms)
        check_table(table, by="guard.fit")
        if train is not None:
            check_table(train, by="guard.fit", what="train")
            check_same_model(table, {"train": train}, by="guard.fit")
        labelled = _checked(table, train, guarantee, novel, seed)
        provenance = _same_model(model, table)
        chosen = None if scores is None else named_scores(scores)
        needs_density = lacks_density(chosen, table, novel)
        split = Split.of(table, learn=train is None and (needs_density or must_learn(chosen)), seed=seed)
        _warn_duplicates(split, table)
        learn = subsample(split.learn if train is None else train)
        if train is not None and learn is not None:
            check_disjoint(table, learn, by="guard.fit", what="train", harm=_KNOWN_BY_HEART, error=GuardError)
        fitted = fitted_scores(chosen, split.select, learn)
        candidates = competing(fitted, chosen_by_user=chosen is not None)
        fitted = with_density(fitted, learn) if needs_density else fitted
        selection = ScoreSelection.fit(fitted, candidates, split.select, labelled=labelled, novel=novel, seed=seed)
        threshold = selection.threshold(guarantee, split.calibrate, len(table))
        return cls(
            guarantee=guarantee,
            threshold=threshold,
            combination=selection.combination,
            scores=selection.scores,
            reference_quantiles=selection.reference_quantiles,
            uncertainty_quantiles=selection.uncertainty_quantiles,
            roles=selection.roles,
            gate=selection.gate,
            sets=fitted_sets(sets, split.calibrate, labelled=labelled),
            classes=table.classes if model is None else model.classes or table.classes,
            provenance=provenance,
            rows={
                "learn": 0 if learn is None else len(learn),
                "select": len(split.select),
                "calibrate": len(split.calibrate),
                "novel": selection.novel,
            },
            model=model,
            probes=probes,
        )

    def __call__(self, images: Any) -> Verdict | Decisions:
        """A verdict of one image, or of each of many.

        Args:
            images: A path, a Pillow image, an array (h, w, 3) or an input (3, h, w) is one image. A folder, a list of
                any of these, a batch, or whatever else `dubito.open_images` takes, is many; so is a table.
        """
        if isinstance(images, Table):
            return self.decide(images)
        opened, single = one_or_many(images)
        decisions = self.decide(self.predict(opened))
        return decisions[0] if single else decisions

    def predict(self, images: Any) -> Table:
        """The model's table of images, with every column that the guard reads."""
        if self.model is None:
            raise GuardError("guard: images need the model. Load it with the guard: Guard.load(path, model).")
        probes = probes_for(self.needs, self.provenance, self.probes, by="guard")
        return predict_table(self.model, one_or_many(images)[0], probes, provenance=self.provenance)

    def decide(self, table: Table) -> Decisions:
        """A verdict of every row of a table of the same model."""
        check_table(table, by="guard.decide")
        table.require("logit", by="guard")
        if self.classes is not None and table.shape("logit")[1] != len(self.classes):
            raise TableError(
                f"guard: logits must be of the {len(self.classes)} classes that the guard was fitted for; "
                f"{table.name} has {table.shape('logit')[1]}. Give a table of the same model."
            )
        if self.provenance and table.provenance and (reason := self.provenance.difference(table.provenance)):
            raise TableError(
                f"guard: {table.name} was made by another model than the guard was fitted for: {reason}. "
                f"Fit a guard on a table of this model."
            )
        values = {name: score.score(table) for name, score in self.scores.items()}
        ranks = {name: rank(values[name], self.reference_quantiles[name]) for name in self.roles.names}
        u = self.combination.of(values, self.reference_quantiles)
        novel = novel_rows(values, self.roles.density, self.gate, len(table))
        p, label = top_two(table.logit)
        density = ranks.get(self.roles.density or "")
        threshold = torch.tensor([self.threshold.value], dtype=torch.float64)
        return Decisions(
            ids=table.id.tolist() if "id" in table else [str(row) for row in range(len(table))],
            classes=self.classes,
            label=label,
            probability=p,
            uncertainty=u,
            rank=rank(u, self.uncertainty_quantiles),
            accept=(u <= self.threshold.value) & ~novel,
            novel=novel,
            aleatoric=ranks.get(self.roles.aleatoric or ""),
            epistemic=ranks.get(self.roles.epistemic or ""),
            density_rank=None if density is None else 1 - density,
            sets=None if self.sets is None else self.sets.classes(table),
            threshold_rank=float(rank(threshold, self.uncertainty_quantiles)),
            skipped=table.skipped,
        )

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that its scores read."""
        return tuple(dict.fromkeys(column for score in self.scores.values() for column in ("logit", *score.needs)))

    def save(self, to: str | Path) -> Path:
        """Write it into a folder: JSON and safetensors, with the model's fingerprint, and nothing that is executed.

        The folder must be new or empty, or that of a guard, which is then replaced in one step.
        """
        write_guard(self, Path(to))
        return Path(to)

    @classmethod
    def load(cls, path: str | Path, model: Classifier | None = None, *, probes: Sequence[Probe] = ()) -> "Guard":
        """Read back what `save` wrote; another model than the guard's own is refused.

        Args:
            path: The folder.
            model: The model whose predictions it guards; None to decide on tables only.
            probes: As in `fit`.
        """
        guard = read_guard(Path(path))
        if model is not None:
            own = _provenance_of(model, by="guard.load")
            if guard.provenance and (reason := guard.provenance.difference(own)):
                raise ModelError(
                    f"guard in '{path}' was fitted for another model than {model.name}: {reason}. Its guarantee says "
                    f"nothing about this one: fit a guard on a table of {model.name}."
                )
            guard.classes = guard.classes or model.classes
        guard.model, guard.probes = model, probes
        return guard

    def export_onnx(self, to: str | Path, example: Tensor | None = None) -> Path:
        """Write model, score and threshold as one ONNX file; see `dubito.guard.onnx`."""
        from dubito.guard.onnx import export_onnx  # noqa: PLC0415 (needs an optional package)

        return export_onnx(self, to, example)

    def title(self) -> str:
        """What is guaranteed."""
        return f"guarantee: {self.guarantee}"

    def facts(self) -> dict[str, str]:
        """How it decides, and what it did on the calibration images."""
        threshold, sets = self.threshold, self.sets
        calibration = f"{threshold.accepted} of {threshold.of} accepted ({threshold.accepted / threshold.of:.1%})"
        if threshold.errors is not None:
            rate = threshold.errors / max(1, threshold.accepted)
            calibration += f", {threshold.errors} of them wrong ({rate:.1%})"
        novelty = f"{self.rows['novel']} of {threshold.of} calibration images are refused as unlike the others"
        facts = {
            "uncertainty": str(self.combination),
            "calibration": calibration,
            "kinds": str(self.roles),
            "novelty": "not checked" if self.gate is None else novelty,
        }
        if sets is not None:
            kind = "of every class" if sets.class_wise else "of images"
            facts["sets"] = f"contain the true class for {100 * sets.coverage:g} % {kind} ({sets.method})"
        return facts

    def to_dict(self) -> Json:
        """What is guaranteed, what was selected, and what was seen, as plain values."""
        return {
            "guarantee": asdict(self.guarantee),
            "threshold": self.threshold._asdict(),
            "weights": self.combination.weights,
            "aurc": self.combination.aurc,
            "roles": asdict(self.roles),
            "gate": self.gate,
            "sets": None if self.sets is None else self.sets.to_json(),
            "rows": self.rows,
        }

    def __repr__(self) -> str:
        accepted = f"{self.threshold.accepted} of {self.threshold.of} accepted"
        return f"Guard({self.guarantee}; by {self.combination}; {accepted})"

    def __str__(self) -> str:
        lines = {"guarantee": str(self.guarantee), **self.facts()}
        return "\n".join(f"{name:12}  {text}" for name, text in lines.items())


def one_or_many(images: Any) -> tuple[Images, bool]:
    """Anything that holds images as a set of images, and whether it is a single one."""
    if isinstance(images, (str, Path)):
        return open_images(images), is_image(Path(images).name) and not Path(images).is_dir()
    if isinstance(images, Image.Image):
        return open_images([images]), True
    if isinstance(images, (np.ndarray, Tensor)):
        single = _is_single(images)
        return open_images(images[None] if single else images), single
    if isinstance(images, Sequence) and len(images) and all(isinstance(one, (str, Path)) for one in images):
        return FileImages(Path(), [str(one) for one in images], name="a list of files"), False
    return open_images(images), False


_KNOWN_BY_HEART = (
    "Scores that have learned from them know them by heart, and the guarantee would not hold for other images. Give "
    "other images as train, or leave it out: a part of the table is set aside for it."
)


def _is_single(array: Shaped[np.ndarray, "..."] | Tensor) -> bool:
    """Inputs have channels first, pictures last: (3, h, w) or (h, w, 3), or a grey (h, w)."""
    if array.is_floating_point() if isinstance(array, Tensor) else array.dtype.kind == "f":
        return array.ndim == 3
    if array.ndim == 3 and array.shape[0] == 3 != array.shape[-1]:
        raise ImagesError(
            f"pixels of shape {tuple(array.shape)} may be one picture with channels first, or three grey ones. Give "
            f"the one as (h, w, 3), channels last; the three as a list."
        )
    # One or four channels are no stack of narrow grey pictures; `open_images` says what to do with them.
    return array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (1, 3, 4))


def _checked(table: Table, train: Table | None, guarantee: Guarantee, novel: Any, seed: Any) -> bool:
    """Whether labels show which predictions are wrong; a guarantee of coverage does without."""
    if train is not None and len(train) == 0:
        raise GuardError(f"guard.fit: train must have rows for scores to learn from; {train.name} has none.")
    if not (isinstance(novel, (int, float, np.floating)) and 0 <= novel < 1):
        raise ValueRangeError(f"guard.fit: novel must be a share from 0 to below 1; got {novel!r}.")
    if not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueRangeError(f"guard.fit: seed must be a whole number from 0 on; got {seed!r}.")
    table.require("logit", by="guard.fit")
    if guarantee.kind == "coverage" and not has_model_labels(table):
        return False
    wrong_predictions(table, by="guard.fit")
    return True


def _same_model(model: Classifier | None, table: Table) -> Provenance | None:
    """Which model the guard belongs to; ModelError where the table is another one's."""
    if model is None:
        return table.provenance
    own = _provenance_of(model, by="guard.fit")
    if table.provenance is None:
        return own
    if reason := table.provenance.difference(own):
        raise ModelError(
            f"guard.fit: {table.name} was made by another model than {model.name}: {reason}. "
            f"Extract images with this model first."
        )
    return table.provenance.with_model(own)


def _provenance_of(model: object, *, by: str) -> Provenance:
    if not isinstance(model, Classifier):
        raise ModelError(
            f"{by}: model must come from dubito.load or dubito.wrap; got {type(model).__name__}. "
            f"Wrap it: dubito.wrap(module, transform=...)."
        )
    return model_identity(model)


def _warn_duplicates(split: Split, table: Table) -> None:
    """Warn of images that are there twice: the test would count each of them as two."""
    shared = shared_rows(split.calibrate, split.select)
    if len(shared.here) > _SHARED * len(split.calibrate):
        warnings.warn(
            f"guard.fit: {table.name} has many images twice; at least {len(shared.here)} of {len(split.calibrate)} to "
            f"calibrate are among those that scores are selected on, too"
            f"{example(split.calibrate, split.select, shared)}. The guarantee counts them as independent, and may not "
            f"hold. Leave duplicates out: dubito.audit finds them.",
            DubitoWarning,
            stacklevel=3,
        )
