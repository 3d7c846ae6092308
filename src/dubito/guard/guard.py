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
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, final

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from dubito.cache.runner import predict_table
from dubito.data import Subset
from dubito.data.image_set import hash_bytes
from dubito.data.open import one_or_many
from dubito.errors import BrokenImageError, DubitoWarning, GuardError
from dubito.guard.calibrated import CalibratedThresholds, fit_thresholds
from dubito.guard.check import GuaranteeCheck, check_guarantee
from dubito.guard.conformal import PredictionSets, fitted_sets
from dubito.guard.costs import CostMatrix
from dubito.guard.decide import decide
from dubito.guard.groups import Group, GroupThreshold, groups_in
from dubito.guard.groups import limits as limits_of
from dubito.guard.guarantee import CLASS, Guarantee
from dubito.guard.guard_folder import FOLDER, read_guard, write_guard
from dubito.guard.guard_words import facts
from dubito.guard.identity import (
    ModelRecord,
    check_table_of,
    check_unchanged,
    images_have_labels,
    labels_are_classes,
    share_of_calibration_images,
)
from dubito.guard.missed import MissedThreshold, missed_classes
from dubito.guard.selection import Scores, ScoreSelection, select_scores
from dubito.guard.shift import Observations
from dubito.guard.thresholds import Threshold, percent
from dubito.guard.verdict import Decisions, Verdict
from dubito.guard.watch import Watch
from dubito.metrics import wrong_predictions
from dubito.models.load import as_classifier
from dubito.probes.registry import probes_for
from dubito.result import Result
from dubito.storage import Place, RemotePath, to_place
from dubito.table import Table, check_table
from dubito.table.provenance import Provenance
from dubito.types import Classifier, Json, Probe
from dubito.validate import check_model_first, check_number, check_rows, check_same_model, check_seed, has_model_labels

NOVEL = 0.005


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
        groups: The threshold of every predicted class or group, where the guarantee holds for each; `threshold` is then
            what they do together, and the largest of them.
        missed: From which probability on images are refused, so that a class is rarely missed.
        costs: What predictions cost, where that is bounded.
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
    groups: tuple[GroupThreshold, ...] = ()
    missed: tuple[MissedThreshold, ...] = ()
    costs: CostMatrix | None = None
    _model_record: ModelRecord | None = None

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
        per: str | None = None,
        costs: Any = None,
        missed: Mapping[Any, float] | None = None,
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
            per: "class": the risk holds for the accepted images of every predicted class, all together with the
                confidence; or the name of a column of the table, such as one with cameras: for those of every group.
                Classes and groups with too few images are refused.
            costs: What predictions cost, in place of 1 for wrong ones: a matrix (true class, predicted class) of
                numbers from 0 on. `risk` is then the largest mean cost of the accepted images, in the same unit.
            missed: By class, the largest share of its images that is accepted as another class: {"crack": 0.01}. Images
                that may be of the class are refused. Holds in addition to the other guarantee.
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
        check_table(table, by="Guard.fit")
        table.require("logit", by="Guard.fit")
        names = table.classes if model is None else getattr(model, "classes", None) or table.classes
        count = table.shape("logit")[1]
        matrix = None if costs is None else CostMatrix.of(costs, count)
        rare = missed_classes(missed, names, count, by="Guard.fit")
        levels = {"risk": risk, "coverage": coverage, "false_alarms": false_alarms}
        guarantee = Guarantee.of(confidence, per=per, costs=matrix, missed=rare, **levels)
        _check_inputs(guarantee, table, train, novel=novel, seed=seed)
        labelled = guarantee.needs_labels or has_model_labels(table)
        if labelled:
            wrong_predictions(table, by="Guard.fit")  # checks the labels
        provenance, record = table.provenance, None
        if model is not None:
            model = as_classifier(model, by="Guard.fit")
            record = ModelRecord.of(model, provenance, what=f"Guard.fit: {table.name}")
            provenance = record.provenance if provenance is None else provenance.with_model(record.provenance)
        selection, calibrate, rows = select_scores(table, scores, train, labelled=labelled, novel=novel, seed=seed)
        thresholds = CalibratedThresholds.fit(
            guarantee, selection, calibrate, matrix, labelled=labelled, rows=len(table), by="Guard.fit"
        )
        return cls(
            guarantee=guarantee,
            selection=selection,
            sets=fitted_sets(sets, calibrate, labelled=labelled),
            classes=table.classes if model is None else model.classes or table.classes,
            provenance=provenance,
            rows={"table": len(table), **rows, "novel": thresholds.novel(selection.gate)},
            model=model,
            probes=probes,
            costs=matrix,
            _model_record=record,
            **thresholds._asdict(),
        )

    def with_risk(self, risk: float, confidence: float | None = None) -> "Guard":
        """The same guard with another risk: a threshold tested on the same calibration images; no score is refitted.

        Each guarantee holds with its own confidence, not all of them together. For three that hold together with
        confidence 0.95, use 1 - 0.05 / 3 for each (Bonferroni). A risk that is chosen because it is the smallest that
        passes is one of many that were tried: choose one that you can accept anyway.

        What else is guaranteed stays: for every class or group, costs, missed classes.

        Args:
            risk: At most this share of the accepted images is wrong; or their largest mean cost.
            confidence: Probability, over calibration sets, that this holds; by default that of this guard.

        Raises:
            GuardError: The risk cannot be guaranteed; the message says which one can, and estimates how many images it
                would take.
        """
        if self.guarantee.missed and confidence not in (None, self.guarantee.confidence):
            raise GuardError(
                f"guard.with_risk: the guarantee about missed classes holds with confidence "
                f"{self.guarantee.confidence:g} only. Leave out confidence, or fit a guard with another one."
            )
        guarantee = self.guarantee.with_risk(risk, self.guarantee.confidence if confidence is None else confidence)
        names = tuple(one.group for one in self.groups)
        threshold, groups = fit_thresholds(
            guarantee, self.selection, self.calibration, names, self.rows["table"], by="guard.with_risk"
        )
        return replace(self, guarantee=guarantee, threshold=threshold, groups=groups)

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
        check_table_of(self, table)
        has_labels = self.guarantee.needs_labels or labels_are_classes(table)
        if has_labels:
            wrong_predictions(table, by="guard.refit")  # checks the labels
        fitted = self.rows["calibrate"] < self.rows["table"]  # and not refitted: no score was chosen on the images then
        if fitted and (own := share_of_calibration_images(self, table)):
            warnings.warn(
                f"guard.refit: about {percent(own)} of the images of {table.name} are calibration images of this "
                f"guard, and its scores were probably chosen on some of the others: the guarantee may not hold. Pass "
                f"images that it was not fitted on.",
                DubitoWarning,
                stacklevel=2,
            )
        thresholds = CalibratedThresholds.fit(
            self.guarantee, self.selection, table, self.costs, labelled=has_labels, rows=len(table), by="guard.refit"
        )
        return replace(
            self,
            sets=fitted_sets((has_labels and self.sets) or False, table, labelled=has_labels),
            rows={
                **self.rows,
                "table": len(table),
                "calibrate": len(table),
                "novel": thresholds.novel(self.selection.gate),
            },
            **thresholds._asdict(),
        )

    def __call__(self, images: Any, *, group: Group | None = None) -> Verdict | Decisions:
        """A verdict of one image, or of each of many.

        Args:
            images: Whatever `dubito.open_images` takes, or a table. A path or URL of an image, a Pillow image, an array
                (h, w, 3) or an input (3, h, w) is one image, anything else is many.
            group: The group of all these images, such as their camera, where the guarantee or prediction sets hold for
                every group. For images of several groups, decide on a table that has the column.
        """
        decisions, single = self.decide_images(images, group=group)
        return decisions[0] if single else decisions

    def decide_images(self, images: Any, *, group: Group | None = None) -> tuple[Decisions, bool]:
        """Verdicts of images or of a table, and whether it is one image alone."""
        if isinstance(images, Table):
            return self.decide(self._grouped(images, group)), False
        opened, single = one_or_many(images)
        return replace(self.decide(self._grouped(self.predict(opened), group)), images=opened), single

    def _grouped(self, table: Table, group: Any) -> Table:
        """A table whose rows are all of one group, if there is one."""
        if group is None:
            return table
        columns = self.group_columns
        if not isinstance(group, str | Integral):
            raise GuardError(
                f"guard: group is one name or whole number for all images; got {type(group).__name__}. For one per "
                f"image, add a column to a table: guard(table.extended({(*columns, 'camera')[0]}=[...]))."
            )
        if not columns:
            raise GuardError(
                "guard: group goes with a guarantee or prediction sets for every group, and this guard has neither. "
                "Leave it out."
            )
        if len(columns) > 1:
            raise GuardError(
                f"guard: group is one group, and this guard needs two: columns {' and '.join(map(repr, columns))}. "
                f"Decide on a table that has both: guard.decide(guard.predict(images).extended(...))."
            )
        return table.extended(**{columns[0]: [group] * len(table)})

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
        self._model_record = check_unchanged(self.model, self._model_record)
        probes = probes_for(self.needs, self.provenance, self.probes, by="guard")
        opened = one_or_many(images)[0]
        labelled = images_have_labels(opened, self.model)
        return predict_table(self.model, opened, probes, provenance=self.provenance, labelled=labelled)

    def decide(self, table: Table) -> Decisions:
        """A verdict of every row of a table of the same model, and whether the guarantee is about such images.

        See `dubito.guard.shift` for the tests. With labels of the model's classes, the guarantee is checked, too.
        """
        check_table(table, by="guard.decide")
        check_table_of(self, table)
        return decide(self, table)

    @property
    def line(self) -> float:
        """Up to which value of `Decisions.compared` images are accepted."""
        return 0.0 if self.groups else self.threshold.value

    def limits(self, observed: Observations) -> Float64[np.ndarray, "n"]:
        """Up to which uncertainty each image is accepted: the guard's threshold, or that of its class or group."""
        if not self.groups:
            return np.full(len(observed), self.threshold.value)
        if observed.group is None:
            raise GuardError(f"guard: the images lack their groups, column '{self.guarantee.per}'.")
        return limits_of(self.groups, observed.group)

    def check(self, labelled: Any) -> GuaranteeCheck:
        """Whether the guarantee is kept on labelled images: what is observed, with an exact interval.

        Args:
            labelled: A table, or images, with labels of the model's own classes, that the guard was not fitted on. For
                a guaranteed coverage, labels may be missing.
        """
        table = labelled if isinstance(labelled, Table) else self.predict(labelled)
        check_table(table, by="guard.check")
        if self.guarantee.needs_labels:
            wrong_predictions(table, by="guard.check")  # checks the labels
        decisions = self.decide(table)
        if decisions.check is not None:
            return decisions.check
        own = share_of_calibration_images(self, table)
        return check_guarantee(self.guarantee, decisions.accept.numpy(), None, decisions.shift, own=own)

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that its scores read."""
        scores = self.selection.scores.values()
        return tuple(dict.fromkeys(column for score in scores for column in ("logit", *score.needs)))

    @property
    def group_columns(self) -> tuple[str, ...]:
        """The columns with groups of images that it reads, for its guarantee and its prediction sets."""
        of_guarantee = None if self.guarantee.per == CLASS else self.guarantee.per
        of_sets = None if self.sets is None else self.sets.per
        return tuple(dict.fromkeys(filter(None, (of_guarantee, of_sets))))

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
        arrays += [] if self.costs is None else [self.costs.costs]
        return hash_bytes(described.encode(), *(np.ascontiguousarray(one).tobytes() for one in arrays)).hex()

    def save(self, to: str | Place) -> Place:
        """Write it into a folder: JSON and safetensors, with the model's fingerprint, and nothing that is executed.

        The folder, on the disk or at an address such as s3://bucket/guard, must be new or empty, or that of a guard,
        which is then replaced in one step.
        """
        place = to_place(to)
        write_guard(self, place)
        return place

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
        guard = FOLDER.load(to_place(path), lambda described: read_guard(cls, to_place(path), described))
        if model is not None:
            model = as_classifier(model, by="Guard.load")
            guard._model_record = ModelRecord.of(model, guard.provenance, what=f"guard in '{path}'")
            guard.classes = guard.classes or model.classes
        guard.model, guard.probes = model, probes
        return guard

    def export_onnx(self, to: str | Path, example: Tensor | None = None) -> Path:
        """Write model, score and threshold as one ONNX file; see `dubito.guard.onnx`."""
        from dubito.guard.onnx import export_onnx  # noqa: PLC0415 (needs an optional package)

        return export_onnx(self, to, example)

    def title(self) -> str:
        """What is guaranteed."""
        return f"guarantee: {self.guarantee.sentence(self.threshold.of)}"

    def facts(self) -> dict[str, str]:
        """How it decides, and what it did on the calibration images."""
        return facts(self)

    def to_dict(self) -> Json:
        """What is guaranteed, what was selected, and what was seen, as plain values."""
        parts: dict[str, Sequence[GroupThreshold] | Sequence[MissedThreshold]]
        parts = {"groups": self.groups, "missed": self.missed}
        return {
            **{name: [one.to_json() for one in part] for name, part in parts.items() if part},
            "guarantee": self.guarantee.to_json(),
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


def _check_inputs(guarantee: Guarantee, table: Table, train: Any, *, novel: Any, seed: Any) -> None:
    """Check what `Guard.fit` needs later, before anything that takes long."""
    if guarantee.per not in (None, CLASS):
        groups_in(table, str(guarantee.per), by="Guard.fit")
    if train is not None:
        check_rows(train, by="Guard.fit", what="train")
        check_same_model(table, {"train": train}, by="Guard.fit")
    check_number(novel, "[0, 1)", by="Guard.fit", what="novel", hint=f"{NOVEL} is usual.")
    check_seed(seed, by="Guard.fit")
