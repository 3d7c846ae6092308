"""Accept or abstain: a threshold on an uncertainty that keeps a guarantee, and for every image the reason in words.

    rows of the table -> reference   a tenth: what scores learn from, which scores, how combined, what is novel
                         calibrate   the guarantee and prediction sets: seen once, when all else is fixed

The two parts are disjoint and drawn at random, so what is chosen on the first cannot invalidate the guarantee; see
`thresholds` for the proof. It holds for images like those of the table. Images whose features are rarer than almost
all of the in-distribution ones are refused whatever their score: for them, no guarantee was tested. Whether new images
are like the calibration images is tested wherever many are decided on (`shift`), and with labels also whether the
guarantee is kept (`check`).
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float64
from safetensors.numpy import load_file, save
from torch import Tensor

from dubito.cache.disk import model_identity
from dubito.cache.labels import resolve_labels
from dubito.cache.runner import predict_table
from dubito.data import Subset
from dubito.data.image_set import hash_bytes
from dubito.data.open import one_or_many
from dubito.errors import (
    BrokenImageError,
    DubitoWarning,
    GuardError,
    ImagesError,
    ModelError,
    OwnLabelsWarning,
    TableError,
)
from dubito.guard.check import GuaranteeCheck, check_guarantee
from dubito.guard.combination import rank
from dubito.guard.conformal import PredictionSets, fitted_sets
from dubito.guard.selection import Scores, ScoreSelection, select_scores
from dubito.guard.shift import Observations, find_shift
from dubito.guard.thresholds import Guarantee, Threshold, percent
from dubito.guard.verdict import Decisions, Verdict, top_two
from dubito.guard.watch import Watch
from dubito.metrics import wrong_predictions
from dubito.models.frozen import signature
from dubito.models.load import as_classifier
from dubito.models.wrap import eager
from dubito.probes.registry import probes_for
from dubito.result import Result
from dubito.scores.registry import check_registered
from dubito.storage import COUNT, Place, RemotePath, SavedFolder, check_layout, to_place, write_file
from dubito.table import Table, check_table, chosen_rows
from dubito.table.overlap import shared_rows, sketch
from dubito.table.provenance import Provenance
from dubito.threads import quiet
from dubito.types import Classifier, Images, Json, Probe
from dubito.validate import (
    SHARED,
    check_model_first,
    check_number,
    check_rows,
    check_same_model,
    check_seed,
    has_model_labels,
)

NOVEL = 0.005
FOLDER = SavedFolder(kind="guard", description="guard.json", format=4, parts=("parts",), how="Guard.save")
_OBSERVED = "observed.safetensors"
_SETS = {"coverage": float, "method": str, "class_wise": bool, "rows": COUNT, "thresholds": [float | None, ...]}
_LAYOUT = {
    "guarantee": {"kind": str, "level": float, "confidence": float},
    "threshold": {"value": float, "accepted": COUNT, "errors": (None, COUNT), "of": COUNT},
    "scores": [str, ...],
    "weights": {str: float},
    "aurc": {str: float},
    "gate": float | None,
    "roles": {"aleatoric": str | None, "epistemic": str | None, "density": str | None},
    "sets": (None, _SETS),
    "classes": (None, [str, ...]),
    "rows": dict.fromkeys(("table", "train", "reference", "calibrate", "novel"), COUNT),
}
"""Of guard.json."""
_MOST_COMPARED = 2048
"""Images that are compared with the calibration images, to see whether they are these."""


@final
@dataclass(eq=False, repr=False)
class Guard(Result):
    """A classifier's predictions, accepted or refused under a guarantee. Made by `Guard.fit`, read by `Guard.load`.

    Attributes:
        guarantee: What is guaranteed.
        threshold: The threshold that keeps it, and what it did on the calibration images.
        selection: Which scores make the uncertainty, and what the reference images say about them.
        calibration: What was observed of the calibration images, to test other guarantees and to compare new images.
        sets: Prediction sets, if there are any.
        classes: Names of the classes, if known.
        provenance: Which model it belongs to, part by part.
        rows: How many images the table and each of its parts had.
        model: The model itself; without it, only tables can be decided on.
        probes: Probes of columns that cannot be rebuilt from the provenance.
    """

    guarantee: Guarantee
    threshold: Threshold
    selection: ScoreSelection
    calibration: Observations
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
        model: Classifier | str | None,
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
            model: The model whose predictions are guarded, or its name; None to decide on tables only.
            table: Labelled images that the model was not trained on, like those to come. With coverage=..., labels
                may be missing.
            risk: At most this share of the accepted images is wrong; 0.05 unless another guarantee is chosen.
            confidence: Probability, over tables like this one, that the guarantee holds.
            coverage: Guarantee instead that at least this share of all images is accepted.
            false_alarms: Guarantee instead that at most this share of the correct predictions is refused.
            scores: Scores to choose among, by name or as a list; the first stays unless another is clearly better. By
                default all that the columns allow, max-probability at the best temperature first, but no
                uncertainty head. Scores that are fitted already, and heads, must have learned from other images than
                the table's.
            train: Table that scores learn from, such as the model's training images; by default a part of the table.
            sets: Prediction sets: how they are made, or False for none. By default of coverage 0.9, where the table
                has labels and at least nine rows to calibrate.
            novel: Refuse images whose features are rarer than all but this share of the in-distribution ones; 0 for
                none. A density measures that, even if it is not among `scores`; without features, or with fewer than
                100 rows, there is none.
            probes: Probes that the table was extracted with, if they cannot be rebuilt from its provenance.
            seed: Seed of the split.

        Raises:
            GuardError: The guarantee cannot be given with these images; the message says how many it takes.
        """
        check_model_first(model, table, by="Guard.fit", what="table")
        guarantee = Guarantee.of(confidence, risk=risk, coverage=coverage, false_alarms=false_alarms)
        check_table(table, by="Guard.fit")
        if train is not None:
            check_rows(train, by="Guard.fit", what="train")
            check_same_model(table, {"train": train}, by="Guard.fit")
        check_number(novel, "[0, 1)", by="Guard.fit", what="novel", hint=f"{NOVEL} is usual.")
        check_seed(seed, by="Guard.fit")
        table.require("logit", by="Guard.fit")
        labelled = guarantee.kind != "coverage" or has_model_labels(table)
        if labelled:
            wrong_predictions(table, by="Guard.fit")  # checks the labels
        provenance, checked = table.provenance, None
        if model is not None:
            model = as_classifier(model, by="Guard.fit")
            checked = _identity(model, provenance, of=f"Guard.fit: {table.name}")
            provenance = checked[0] if provenance is None else provenance.with_model(checked[0])
        selection, calibrate, rows = select_scores(table, scores, train, labelled=labelled, novel=novel, seed=seed)
        names = dict.fromkeys([*selection.combination.weights, *filter(None, [selection.roles.density])])
        values = {name: selection.scores[name].score(calibrate) for name in names}
        calibration = _with_sketch(_observe(selection, values, calibrate, labelled=labelled), calibrate)
        rows = {"table": len(table), **rows, "novel": int(np.isinf(calibration.uncertainty).sum())}
        guard = cls(
            guarantee=guarantee,
            threshold=_threshold(guarantee, selection, calibration, len(table), by="Guard.fit"),
            selection=selection,
            calibration=calibration,
            sets=fitted_sets(sets, calibrate, labelled=labelled),
            classes=table.classes if model is None else model.classes or table.classes,
            provenance=provenance,
            rows=rows,
            model=model,
            probes=probes,
        )
        guard._checked = checked
        return guard

    def with_risk(self, risk: float, confidence: float | None = None) -> "Guard":
        """The same guard with another risk: a threshold tested on the same calibration images; no score is refitted.

        Each guarantee holds with its own confidence, not all of them together. For three that hold together with
        confidence 0.95, use 1 - 0.05 / 3 for each (Bonferroni). A risk that is chosen because it is the smallest that
        passes is one of many that were tried: choose one that you can accept anyway.

        Args:
            risk: At most this share of the accepted images is wrong.
            confidence: Probability, over calibration sets, that this holds; by default that of this guard.

        Raises:
            GuardError: The risk cannot be guaranteed; the message says which one can, and estimates how many images it
                would take.
        """
        guarantee = Guarantee("risk", risk, self.guarantee.confidence if confidence is None else confidence)
        threshold = _threshold(guarantee, self.selection, self.calibration, self.rows["table"], by="guard.with_risk")
        guard = replace(self, guarantee=guarantee, threshold=threshold)
        guard._checked = self._checked
        return guard

    def refit(self, labelled: Any) -> "Guard":
        """The same scores with a threshold of new calibration images, for images like these: after a change, say.

        No score was chosen on them, so all of them are there to calibrate, and the guarantee is about images like them.

        Args:
            labelled: A table, or images, with labels of the model's own classes, drawn at random from what is to come.
                They must be images that the guard was not fitted on: shared ones are warned of.

        Raises:
            GuardError: The guarantee cannot be given with these images; the message says how many it takes.
        """
        table = labelled if isinstance(labelled, Table) else self.predict(labelled)
        check_table(table, by="guard.refit")
        self._check_model(table)
        has_labels = self.guarantee.kind != "coverage" or _labels_are_classes(table)
        if has_labels:
            wrong_predictions(table, by="guard.refit")  # checks the labels
        fitted = self.rows["calibrate"] < self.rows["table"]  # and not refitted: no score was chosen on the images then
        if fitted and (own := self._own_images(table)):
            warnings.warn(
                f"guard.refit: about {percent(own)} of the images of {table.name} are calibration images of this "
                f"guard, and its scores were probably chosen on some of the others: the guarantee may not hold. Pass "
                f"images that it was not fitted on.",
                DubitoWarning,
                stacklevel=2,
            )
        values = {name: score.score(table) for name, score in self.selection.scores.items()}
        calibration = _with_sketch(_observe(self.selection, values, table, labelled=has_labels), table)
        rows = {**self.rows, "table": len(table), "calibrate": len(table)}
        guard = replace(
            self,
            calibration=calibration,
            threshold=_threshold(self.guarantee, self.selection, calibration, len(table), by="guard.refit"),
            sets=fitted_sets((has_labels and self.sets) or False, table, labelled=has_labels),
            rows={**rows, "novel": int(np.isinf(calibration.uncertainty).sum())},
        )
        guard._checked = self._checked
        return guard

    def __call__(self, images: Any) -> Verdict | Decisions:
        """A verdict of one image, or of each of many.

        Args:
            images: Whatever `dubito.open_images` takes, or a table. A path or URL of an image, a Pillow image, an array
                (h, w, 3) or an input (3, h, w) is one image, anything else is many.
        """
        decisions, single = self.decide_images(images)
        return decisions[0] if single else decisions

    def decide_images(self, images: Any) -> tuple[Decisions, bool]:
        """Verdicts of images or of a table, and whether it is one image alone."""
        if isinstance(images, Table):
            return self.decide(images), False
        opened, single = one_or_many(images)
        return replace(self.decide(self.predict(opened)), images=opened), single

    def stream(self, images: Any, *, batch: int = 64, watch: Watch | None = None) -> Iterator[Verdict]:
        """Verdicts of images one after the other: a few are in memory at a time, however many there are.

        Args:
            images: Whatever `dubito.open_images` takes, or a table.
            batch: How many are decided on at once.
            watch: A watch of this guard that takes note of them.
        """
        check_number(batch, "[1, inf)", by="guard.stream", what="batch", whole=True, hint="64 is usual.")
        if watch is not None:
            watch.check_guard(self, by="guard.stream")
        opened = images if isinstance(images, Table) else one_or_many(images)[0]
        for start in range(0, len(opened), batch):
            rows = range(start, min(start + batch, len(opened)))
            part = opened.rows(slice(rows.start, rows.stop)) if isinstance(opened, Table) else Subset(opened, rows)
            try:
                decisions, _ = self.decide_images(part)
            except BrokenImageError as error:  # not one of the batch can be decoded
                warnings.warn(str(error), DubitoWarning, stacklevel=2)
                continue
            if watch is not None:
                watch.update(decisions)
            yield from decisions

    def watch(self, folder: str | Path | None = None, *, alpha: float | None = None, seed: int | None = None) -> Watch:
        """Watch what this guard decides, for as long as it is used; see `dubito.guard.watch`.

        Args:
            folder: Where its state is kept, in one small file; None keeps it in memory.
            alpha: The probability of a false alarm, over the whole life; by default that of the folder, 0.01 for a new
                one.
            seed: Seed of tie-breaking, and of the images that labels are requested for; by default that of the
                folder, 0 for a new one.
        """
        return Watch(self, folder, alpha=alpha, seed=seed)

    def predict(self, images: Any) -> Table:
        """The model's table of images, with every column that the guard reads, and labels that are its own classes."""
        if self.model is None:
            raise GuardError("guard: images need the model. Load it with the guard: Guard.load(path, model).")
        self._check_unchanged(self.model)
        probes = probes_for(self.needs, self.provenance, self.probes, by="guard")
        opened = one_or_many(images)[0]
        labelled = _has_labels(opened, self.model)
        return predict_table(self.model, opened, probes, provenance=self.provenance, labelled=labelled)

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
        """A verdict of every row of a table of the same model, and whether the guarantee is about such images.

        See `dubito.guard.shift` for the tests. With labels of the model's classes, the guarantee is checked, too.
        """
        check_table(table, by="guard.decide")
        self._check_model(table)
        selection, roles = self.selection, self.selection.roles
        values = {name: score.score(table) for name, score in selection.scores.items()}
        ranks = {name: rank(values[name], selection.reference_quantiles[name]) for name in filter(None, roles)}
        u, novel = selection.uncertainty(values)
        accept = (u <= self.threshold.value) & ~novel
        p, predicted = top_two(table.logit)
        density = ranks.get(roles.density or "")
        threshold = torch.tensor([self.threshold.value], dtype=torch.float64)
        observed = _observe(selection, values, table, labelled=_labels_are_classes(table))
        shift = find_shift(self.calibration, observed, threshold=self.threshold.value, classes=self.classes)
        check = None
        if (wrong := observed.wrong) is not None:
            own = self._own_images(table)
            check = check_guarantee(self.guarantee, accept.numpy(), wrong, shift, own=own)
        return Decisions(
            ids=table.row_ids(),
            classes=self.classes,
            predicted=predicted,
            probability=p,
            uncertainty=u,
            rank=rank(u, selection.uncertainty_quantiles),
            accept=accept,
            novel=novel,
            aleatoric=ranks.get(roles.aleatoric or ""),
            epistemic=ranks.get(roles.epistemic or ""),
            density_rank=None if density is None else 1 - density,
            sets=None if self.sets is None else self.sets.classes(table),
            threshold_rank=float(rank(threshold, selection.uncertainty_quantiles)),
            guarantee=self.guarantee.sentence(self.threshold.of),
            shift=shift,
            check=check,
            label=None if wrong is None else table.label,
            skipped=table.skipped,
        )

    def check(self, labelled: Any) -> GuaranteeCheck:
        """Whether the guarantee is kept on labelled images: what is observed, with an exact interval.

        Args:
            labelled: A table, or images, with labels of the model's own classes, that the guard was not fitted on. For
                a guaranteed coverage, labels may be missing.
        """
        table = labelled if isinstance(labelled, Table) else self.predict(labelled)
        check_table(table, by="guard.check")
        needs_labels = self.guarantee.kind != "coverage"
        wrong = wrong_predictions(table, by="guard.check").numpy() if needs_labels else None
        decisions = self.decide(table)
        own = self._own_images(table) if decisions.check is None else decisions.check.own
        return check_guarantee(self.guarantee, decisions.accept.numpy(), wrong, decisions.shift, own=own)

    def _own_images(self, table: Table) -> float:
        """The share of a table's images that are calibration images, by content; 0 where it is one percent at most.

        Of a large table, it is estimated from rows that are drawn at random.
        """
        if len(table) > _MOST_COMPARED:
            drawn = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[:_MOST_COMPARED]
            table = chosen_rows(table, drawn.sort().values)
        here, there = sketch(table), self.calibration.sketch
        if here is None or there is None or not len(here):
            return 0.0
        share = len(shared_rows(Table(feature=here), Table(feature=there)).here) / len(here)
        return share if share > SHARED else 0.0

    def _check_model(self, table: Table) -> None:
        """Raise TableError for a table of another model."""
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

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that its scores read."""
        scores = self.selection.scores.values()
        return tuple(dict.fromkeys(column for score in scores for column in ("logit", *score.needs)))

    @property
    def fingerprint(self) -> str:
        """A hash of everything that its verdicts depend on: model, scores, calibration images, threshold and sets."""
        made = None if self.provenance is None else self.provenance.to_json()
        known = [self.to_dict(), list(self.selection.scores), self.classes, made]
        described = json.dumps(known, sort_keys=True, default=str)
        observed = [one for _, one in sorted(self.calibration.arrays().items())]
        # What scores have learned shows in their values of the reference images.
        quantiles = [one.numpy() for _, one in sorted(self.selection.reference_quantiles.items())]
        arrays = [*observed, *quantiles, self.selection.uncertainty_quantiles.numpy()]
        return hash_bytes(described.encode(), *(np.ascontiguousarray(one).tobytes() for one in arrays)).hex()

    def save(self, to: str | Place) -> Place:
        """Write it into a folder: JSON and safetensors, with the model's fingerprint, and nothing that is executed.

        The folder, on the disk or at an address such as s3://bucket/guard, must be new or empty, or that of a guard,
        which is then replaced in one step.
        """
        for score in self.selection.scores.values():
            check_registered(score)
        described = {
            **self.to_dict(),
            "scores": list(self.selection.scores),
            "classes": None if self.classes is None else list(self.classes),
            "provenance": None if self.provenance is None else self.provenance.to_json(),
        }
        place = to_place(to)
        FOLDER.save(place, lambda into: {**described, "parts": FOLDER.put_folder(into, "parts", self._write)})
        return place

    def _write(self, folder: Path) -> None:
        self.selection.write(folder)
        arrays = {name: np.ascontiguousarray(one) for name, one in self.calibration.arrays().items()}
        write_file(folder / _OBSERVED, save(arrays))

    @classmethod
    def load(cls, path: str | Place, model: Classifier | str | None = None, *, probes: Sequence[Probe] = ()) -> "Guard":
        """Read back what `save` wrote; another model than the guard's own is refused.

        Args:
            path: The folder or its address.
            model: The model whose predictions it guards, or its name; None to decide on tables only.
            probes: As in `fit`.
        """
        if not isinstance(path, str | Path | RemotePath):
            raise GuardError(
                f"Guard.load: path must be the folder of a guard; got {type(path).__name__}. The folder comes first, "
                f"then the model: Guard.load(path, model)."
            )
        guard = FOLDER.load(to_place(path), lambda described: cls._read(to_place(path), described))
        if model is not None:
            model = as_classifier(model, by="Guard.load")
            guard._checked = _identity(model, guard.provenance, of=f"guard in '{path}'")
            guard.classes = guard.classes or model.classes
        guard.model, guard.probes = model, probes
        return guard

    @classmethod
    def _read(cls, folder: Place, described: Mapping[str, Any]) -> "Guard":
        check_layout(described, _LAYOUT)
        parts = FOLDER.part(folder, described["parts"])
        return cls(
            guarantee=Guarantee(**described["guarantee"]),
            threshold=Threshold(**described["threshold"]),
            selection=ScoreSelection.read(parts, described),
            calibration=Observations.from_arrays(load_file(parts / _OBSERVED)),
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
        return f"guarantee: {self.guarantee.sentence(self.threshold.of)}"

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
        kind = f"{self.guarantee.kind} {self.guarantee.level:g}, confidence {self.guarantee.confidence:g}"
        return f"Guard({kind}; by {self.selection.combination}; {accepted})"

    def __str__(self) -> str:
        lines = {"guarantee": self.guarantee.sentence(self.threshold.of), **self.facts()}
        return "\n".join(f"{name:12}  {text}" for name, text in lines.items())


def _observe(
    selection: ScoreSelection, values: Mapping[str, Float64[Tensor, "n"]], table: Table, *, labelled: bool
) -> Observations:
    """What a guard observes of a table, from its scores."""
    u, novel = selection.uncertainty(values)
    predicted = [torch.zeros(0, dtype=torch.long), *(batch.logit.argmax(1) for batch in table.batches("logit"))]
    density = selection.roles.density
    return Observations(
        uncertainty=torch.where(novel, torch.inf, u).numpy(),
        predicted=torch.cat(predicted).numpy(),
        density=None if density is None else values[density].numpy(),
        wrong=wrong_predictions(table, by="guard").numpy() if labelled else None,
    )


def _with_sketch(calibration: Observations, table: Table) -> Observations:
    """With what calibration images are recognised by, should they come again."""
    drawn = sketch(table)
    return calibration if drawn is None else replace(calibration, sketch=drawn.numpy())


def _threshold(
    guarantee: Guarantee, selection: ScoreSelection, calibration: Observations, rows: int, *, by: str
) -> Threshold:
    """The threshold that keeps a guarantee; GuardError says what could be kept instead."""
    try:
        return guarantee.threshold(calibration.outcomes)
    except GuardError as error:
        feasible = guarantee.feasible(calibration.outcomes, rows)
        raise GuardError(
            f"{by}: {error} Of the table's {rows} rows, {len(calibration)} are there to calibrate; the uncertainty is "
            f"{selection.combination}. {feasible}".rstrip()
        ) from error


def _has_labels(images: Images, model: Classifier) -> bool:
    """Whether images bring labels that are classes of the model; where some of its names are not, they are none."""
    if images.labels is None or (images.classes is not None and model.classes is None):
        return False
    try:
        with quiet(category=OwnLabelsWarning):
            return resolve_labels(images, model, None)[1] == "model"
    except ImagesError:
        return False


def _labels_are_classes(table: Table) -> bool:
    """Whether a table has labels, all of which are classes of the model."""
    if len(table) == 0 or not has_model_labels(table):
        return False
    return int(table.label.min()) >= 0 and int(table.label.max()) < table.shape("logit")[1]


def _identity(model: Classifier, made: Provenance | None, *, of: str) -> tuple[Provenance, tuple[object, ...]]:
    """The model's own record, and the signature of its module.

    ModelError for one that is not the one that made the table or guard.
    """
    own, signed = model_identity(model), signature(eager(model.module))
    if made and (reason := made.difference(own)):
        raise ModelError(
            f"{of} belongs to another model than {model.name}: {reason}. A guarantee of that one says nothing about "
            f"this one: extract images with {model.name}, and fit a guard on them."
        )
    return own, signed
