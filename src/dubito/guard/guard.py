"""Accept or abstain: a threshold on an uncertainty that keeps a guarantee, and for every image the reason in words.

    rows of the table -> learn       scores that learn, where no table to learn from is given
                         select      which scores, how combined, which thresholds to try
                         calibrate   the guarantee and prediction sets: seen once, when all else is fixed

The three parts are disjoint and drawn at random, so what is chosen on the first two cannot invalidate the guarantee;
see `thresholds` for the proof. It holds for images like those of the table. Images whose features are rarer than almost
all of the in-distribution ones are refused whatever their score: for them, no guarantee was tested.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from dubito.cache.disk import model_identity
from dubito.cache.runner import predict_table
from dubito.data.open import one_or_many
from dubito.errors import GuardError, ModelError, TableError
from dubito.guard.combination import rank
from dubito.guard.conformal import PredictionSets, fitted_sets
from dubito.guard.selection import Scores, ScoreSelection, select_scores
from dubito.guard.thresholds import Guarantee, Threshold
from dubito.guard.verdict import Decisions, Verdict, top_two
from dubito.metrics import wrong_predictions
from dubito.models.frozen import signature
from dubito.models.wrap import eager
from dubito.probes.registry import probes_for
from dubito.result import Result
from dubito.scores.registry import check_registered
from dubito.storage import SavedFolder
from dubito.table import Table, check_table
from dubito.table.provenance import Provenance
from dubito.types import Classifier, Json, Probe
from dubito.validate import check_model_first, check_number, check_rows, check_same_model, has_model_labels

NOVEL = 0.005
FOLDER = SavedFolder(kind="guard", description="guard.json", format=3, parts=("parts",), how="Guard.save")


@final
@dataclass(eq=False, repr=False)
class Guard(Result):
    """A classifier's predictions, accepted or refused under a guarantee. Made by `Guard.fit`, read by `Guard.load`.

    Attributes:
        guarantee: What is guaranteed.
        threshold: The threshold that keeps it, and what it did on the calibration images.
        selection: Which scores make the uncertainty, and what the selection images say about them.
        sets: Prediction sets, if there are any.
        classes: Names of the classes, if known.
        provenance: Which model it belongs to, part by part.
        rows: How many images each part of the table had.
        model: The model itself; without it, only tables can be decided on.
        probes: Probes of columns that cannot be rebuilt from the provenance.
    """

    guarantee: Guarantee
    threshold: Threshold
    selection: ScoreSelection
    sets: PredictionSets | None
    classes: Sequence[str] | None
    provenance: Provenance | None
    rows: dict[str, int]
    model: Classifier | None = None
    probes: Sequence[Probe] = ()
    _checked: tuple[Provenance, tuple[object, ...]] | None = field(default=None, init=False)
    """The model's own record, and the signature of its module at that time."""

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
        check_model_first(model, table, by="Guard.fit", what="table")
        guarantee = Guarantee.of(confidence, risk=risk, coverage=coverage, false_alarms=false_alarms)
        check_table(table, by="guard.fit")
        if train is not None:
            check_rows(train, by="guard.fit", what="train")
            check_same_model(table, {"train": train}, by="guard.fit")
        check_number(novel, "[0, 1)", by="guard.fit", what="novel", hint=f"{NOVEL} is usual.")
        check_number(seed, "[0, inf)", by="guard.fit", what="seed", whole=True, hint="0 is usual.")
        table.require("logit", by="guard.fit")
        labelled = guarantee.kind != "coverage" or has_model_labels(table)
        if labelled:
            wrong_predictions(table, by="guard.fit")  # checks the labels
        provenance, checked = table.provenance, None
        if model is not None:
            checked = _identity(model, provenance, of=f"guard.fit: {table.name}")
            provenance = checked[0] if provenance is None else provenance.with_model(checked[0])
        selection, selected_on, calibrate, rows = select_scores(
            table, scores, train, labelled=labelled, novel=novel, seed=seed
        )
        threshold, refused = selection.threshold(guarantee, selected_on, calibrate, len(table))
        guard = cls(
            guarantee=guarantee,
            threshold=threshold,
            selection=selection,
            sets=fitted_sets(sets, calibrate, labelled=labelled),
            classes=table.classes if model is None else model.classes or table.classes,
            provenance=provenance,
            rows={**rows, "novel": refused},
            model=model,
            probes=probes,
        )
        guard._checked = checked
        return guard

    def __call__(self, images: Any) -> Verdict | Decisions:
        """A verdict of one image, or of each of many.

        Args:
            images: Whatever `dubito.open_images` takes, or a table. A path or URL of an image, a Pillow image, an array
                (h, w, 3) or an input (3, h, w) is one image, anything else is many.
        """
        if isinstance(images, Table):
            return self.decide(images)
        opened, single = one_or_many(images)
        decisions = replace(self.decide(self.predict(opened)), images=opened)
        return decisions[0] if single else decisions

    def predict(self, images: Any) -> Table:
        """The model's table of images, with every column that the guard reads."""
        if self.model is None:
            raise GuardError("guard: images need the model. Load it with the guard: Guard.load(path, model).")
        self._check_unchanged(self.model)
        probes = probes_for(self.needs, self.provenance, self.probes, by="guard")
        return predict_table(self.model, one_or_many(images)[0], probes, provenance=self.provenance)

    def _check_unchanged(self, model: Classifier) -> None:
        """Raise ModelError if the model has been trained further, in place, since the guard was fitted or loaded.

        Weights are hashed only where the module's signature has changed.
        """
        if self._checked is not None and self._checked[1] == signature(eager(model.module)):
            return
        own, made = _identity(model, None, of="guard"), self._checked and self._checked[0]
        if made and (reason := made.difference(own[0])):
            raise ModelError(
                f"guard: {model.name} has changed since the guard was fitted or loaded: {reason}. Its guarantee says "
                f"nothing about the model as it is now: extract images with it, and fit a guard on them."
            )
        self._checked = own

    def decide(self, table: Table) -> Decisions:
        """A verdict of every row of a table of the same model."""
        check_table(table, by="guard.decide")
        table.require("logit", by="guard")
        reason, classes = None, table.shape("logit")[1]
        if self.classes is not None and classes != len(self.classes):
            reason = f"it has {classes} classes, not {len(self.classes)}"
        elif self.provenance and table.provenance:
            reason = self.provenance.difference(table.provenance)
        if reason:
            raise TableError(
                f"guard: {table.name} was made by another model than the guard was fitted for: {reason}. "
                f"Fit a guard on a table of this model."
            )
        selection, roles = self.selection, self.selection.roles
        values = {name: score.score(table) for name, score in selection.scores.items()}
        ranks = {name: rank(values[name], selection.reference_quantiles[name]) for name in filter(None, roles)}
        u, novel = selection.uncertainty(values)
        p, predicted = top_two(table.logit)
        density = ranks.get(roles.density or "")
        threshold = torch.tensor([self.threshold.value], dtype=torch.float64)
        return Decisions(
            ids=table.row_ids(),
            classes=self.classes,
            predicted=predicted,
            probability=p,
            uncertainty=u,
            rank=rank(u, selection.uncertainty_quantiles),
            accept=(u <= self.threshold.value) & ~novel,
            novel=novel,
            aleatoric=ranks.get(roles.aleatoric or ""),
            epistemic=ranks.get(roles.epistemic or ""),
            density_rank=None if density is None else 1 - density,
            sets=None if self.sets is None else self.sets.classes(table),
            threshold_rank=float(rank(threshold, selection.uncertainty_quantiles)),
            skipped=table.skipped,
        )

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that its scores read."""
        scores = self.selection.scores.values()
        return tuple(dict.fromkeys(column for score in scores for column in ("logit", *score.needs)))

    def save(self, to: str | Path) -> Path:
        """Write it into a folder: JSON and safetensors, with the model's fingerprint, and nothing that is executed.

        The folder must be new or empty, or that of a guard, which is then replaced in one step.
        """
        for score in self.selection.scores.values():
            check_registered(score)
        described = {
            **self.to_dict(),
            "scores": list(self.selection.scores),
            "classes": None if self.classes is None else list(self.classes),
            "provenance": None if self.provenance is None else self.provenance.to_json(),
        }
        FOLDER.save(
            Path(to), lambda into: {**described, "parts": FOLDER.put_folder(into, "parts", self.selection.write)}
        )
        return Path(to)

    @classmethod
    def load(cls, path: str | Path, model: Classifier | None = None, *, probes: Sequence[Probe] = ()) -> "Guard":
        """Read back what `save` wrote; another model than the guard's own is refused.

        Args:
            path: The folder.
            model: The model whose predictions it guards; None to decide on tables only.
            probes: As in `fit`.
        """
        guard = FOLDER.load(Path(path), lambda described: cls._read(Path(path), described))
        if model is not None:
            guard._checked = _identity(model, guard.provenance, of=f"guard in '{path}'")
            guard.classes = guard.classes or model.classes
        guard.model, guard.probes = model, probes
        return guard

    @classmethod
    def _read(cls, folder: Path, described: Mapping[str, Any]) -> "Guard":
        threshold = Threshold(**described["threshold"])
        if not math.isfinite(threshold.value):
            raise ValueError(f"a threshold of {threshold.value}")
        return cls(
            guarantee=Guarantee(**described["guarantee"]),
            threshold=threshold,
            selection=ScoreSelection.read(FOLDER.part(folder, described["parts"]), described),
            sets=None if described["sets"] is None else PredictionSets.from_json(described["sets"]),
            classes=described["classes"],
            provenance=Provenance.from_json(described["provenance"], f"guard in '{folder}'"),
            rows=described["rows"],
        )

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
            "uncertainty": str(self.selection.combination),
            "calibration": calibration,
            "kinds": str(self.selection.roles),
            "novelty": "not checked" if self.selection.gate is None else novelty,
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
            **asdict(self.selection.combination),
            "roles": self.selection.roles._asdict(),
            "gate": self.selection.gate,
            "sets": None if self.sets is None else self.sets.to_json(),
            "rows": self.rows,
        }

    def __repr__(self) -> str:
        accepted = f"{self.threshold.accepted} of {self.threshold.of} accepted"
        return f"Guard({self.guarantee}; by {self.selection.combination}; {accepted})"

    def __str__(self) -> str:
        lines = {"guarantee": str(self.guarantee), **self.facts()}
        return "\n".join(f"{name:12}  {text}" for name, text in lines.items())


def _identity(model: object, made: Provenance | None, *, of: str) -> tuple[Provenance, tuple[object, ...]]:
    """The model's own record, and the signature of its module.

    ModelError for what is no classifier, or not the one that made the table or guard.
    """
    if not isinstance(model, Classifier):
        raise ModelError(
            f"{of}: model must come from dubito.load or dubito.wrap; got {type(model).__name__}. "
            f"Wrap it: dubito.wrap(module, transform=...)."
        )
    own, signed = model_identity(model), signature(eager(model.module))
    if made and (reason := made.difference(own)):
        raise ModelError(
            f"{of} belongs to another model than {model.name}: {reason}. A guarantee of that one says nothing about "
            f"this one: extract images with {model.name}, and fit a guard on them."
        )
    return own, signed
