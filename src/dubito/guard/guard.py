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
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
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
from dubito.guard.check import GuaranteeCheck, GuaranteePart, check_guarantee
from dubito.guard.combination import rank
from dubito.guard.conformal import PredictionSets, fitted_sets
from dubito.guard.costs import CostMatrix
from dubito.guard.groups import Group, GroupThreshold, group_codes, group_thresholds, groups_in
from dubito.guard.groups import limits as limits_of
from dubito.guard.guard_layout import LAYOUT, check_guard
from dubito.guard.missed import MissedThreshold, alerts, missed_classes, missed_thresholds
from dubito.guard.selection import Scores, ScoreSelection, select_scores
from dubito.guard.shift import Observations, Shift, find_shift
from dubito.guard.thresholds import CLASS, NO_LIMIT, Guarantee, Threshold, percent
from dubito.guard.verdict import Decisions, Verdict, top_two
from dubito.guard.watch import Watch
from dubito.metrics import wrong_predictions
from dubito.models.frozen import signature
from dubito.models.load import as_classifier
from dubito.models.wrap import eager
from dubito.probes.registry import probes_for
from dubito.result import Result
from dubito.scores.registry import check_registered
from dubito.storage import Place, RemotePath, SavedFolder, check_layout, to_place, write_file
from dubito.table import Table, check_table, chosen_rows
from dubito.table.overlap import shared_rows, sketch
from dubito.table.provenance import Provenance, check_provenance
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
_OBSERVED, _COSTS = "observed.safetensors", "costs.safetensors"
_NAMED = 3
"""Refused classes or groups that are named."""
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
                that may be of the class are refused. Holds besides, together with the other guarantee.
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
        matrix = None if costs is None else CostMatrix.of(costs, table.shape("logit")[1])
        guarantee = Guarantee.of(confidence, risk=risk, coverage=coverage, false_alarms=false_alarms)
        classes = table.classes if model is None else getattr(model, "classes", None) or table.classes
        rare = missed_classes(missed, classes, table.shape("logit")[1], by="Guard.fit")
        guarantee = guarantee.extended(per=per, costs=matrix, missed=rare)
        if per not in (None, CLASS):
            groups_in(table, str(per), by="Guard.fit")
        if train is not None:
            check_rows(train, by="Guard.fit", what="train")
            check_same_model(table, {"train": train}, by="Guard.fit")
        check_number(novel, "[0, 1)", by="Guard.fit", what="novel", hint=f"{NOVEL} is usual.")
        check_seed(seed, by="Guard.fit")
        labelled = guarantee.needs_labels or has_model_labels(table)
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
        _, gated = selection.uncertainty(values)
        rules = missed_thresholds(guarantee, calibrate, gated.numpy())
        names_of_groups = _groups(guarantee, calibrate, by="Guard.fit")
        context = _Rules(guarantee, rules, names_of_groups, matrix)
        calibration = _with_sketch(_observe(selection, values, calibrate, context, labelled=labelled), calibrate)
        rows = {"table": len(table), **rows, "novel": int(np.isinf(calibration.uncertainty).sum())}
        threshold, groups = _threshold(guarantee, selection, calibration, len(table), names_of_groups, by="Guard.fit")
        guard = cls(
            guarantee=guarantee,
            threshold=threshold,
            selection=selection,
            calibration=calibration,
            sets=fitted_sets(sets, calibrate, labelled=labelled),
            classes=table.classes if model is None else model.classes or table.classes,
            provenance=provenance,
            rows=rows,
            model=model,
            probes=probes,
            groups=groups,
            missed=rules,
            costs=matrix,
        )
        guard._checked = checked
        return guard

    def with_risk(self, risk: float, confidence: float | None = None) -> "Guard":
        """The same guard with another risk: a threshold tested on the same calibration images; no score is refitted.

        Each guarantee holds with its own confidence, not all of them together. For three that hold together with
        confidence 0.95, use 1 - 0.05 / 3 for each (Bonferroni). A risk that is chosen because it is the smallest that
        passes is one of many that were tried: choose one that you can accept anyway.

        What holds besides stays: for every class or group, costs, missed classes.

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
        threshold, groups = _threshold(
            guarantee, self.selection, self.calibration, self.rows["table"], names, by="guard.with_risk"
        )
        guard = replace(self, guarantee=guarantee, threshold=threshold, groups=groups)
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
        has_labels = self.guarantee.needs_labels or _labels_are_classes(table)
        if has_labels:
            wrong_predictions(table, by="guard.refit")  # checks the labels
        names = _groups(self.guarantee, table, by="guard.refit")
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
        _, gated = self.selection.uncertainty(values)
        rules = missed_thresholds(self.guarantee, table, gated.numpy())
        context = _Rules(self.guarantee, rules, names, self.costs)
        calibration = _with_sketch(_observe(self.selection, values, table, context, labelled=has_labels), table)
        threshold, groups = _threshold(self.guarantee, self.selection, calibration, len(table), names, by="guard.refit")
        rows = {**self.rows, "table": len(table), "calibrate": len(table)}
        guard = replace(
            self,
            calibration=calibration,
            threshold=threshold,
            groups=groups,
            missed=rules,
            sets=fitted_sets((has_labels and self.sets) or False, table, labelled=has_labels),
            rows={**rows, "novel": int(np.isinf(calibration.uncertainty).sum())},
        )
        guard._checked = self._checked
        return guard

    def __call__(self, images: Any, *, group: Group | None = None) -> Verdict | Decisions:
        """A verdict of one image, or of each of many.

        Args:
            images: Whatever `dubito.open_images` takes, or a table. A path or URL of an image, a Pillow image, an array
                (h, w, 3) or an input (3, h, w) is one image, anything else is many.
            group: The group of all these images, such as their camera, where the guarantee holds for every group. For
                images of several groups, decide on a table that has the column.
        """
        decisions, single = self.decide_images(images, group=group)
        return decisions[0] if single else decisions

    def decide_images(self, images: Any, *, group: Group | None = None) -> tuple[Decisions, bool]:
        """Verdicts of images or of a table, and whether it is one image alone."""
        if isinstance(images, Table):
            return self.decide(self._grouped(images, group)), False
        opened, single = one_or_many(images)
        return replace(self.decide(self._grouped(self.predict(opened), group)), images=opened), single

    def _grouped(self, table: Table, group: Group | None) -> Table:
        """A table whose rows are all of one group, if there is one."""
        if group is None:
            return table
        if self.guarantee.per in (None, CLASS):
            raise GuardError("guard: group goes with a guarantee for every group, and this one has none. Leave it out.")
        return table.extended(**{str(self.guarantee.per): [group] * len(table)})

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
        rules = _Rules(self.guarantee, self.missed, tuple(one.group for one in self.groups), self.costs)
        observed = _observe(selection, values, table, rules, labelled=_labels_are_classes(table))
        limits, alert = self.limits(observed), alerts(self.missed, table)
        accept = torch.from_numpy(observed.uncertainty <= limits)
        p, predicted = top_two(table.logit)
        density = ranks.get(roles.density or "")
        before = self.limits(self.calibration)
        shift = find_shift(self.calibration, observed, threshold=limits, before=before, classes=self.classes)
        check = None
        if observed.wrong is not None:
            check = self._checked_on(table, observed, accept.numpy(), shift, own=self._own_images(table))
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
            threshold_rank=float(self._limit_rank(np.array([self.threshold.value]))),
            guarantee=self.guarantee.sentence(self.threshold.of),
            shift=shift,
            check=check,
            label=None if observed.wrong is None else table.label,
            skipped=table.skipped,
            rules=self._rules_in_words(observed, alert, torch.from_numpy(limits)),
            limit=torch.from_numpy(limits) if self.groups else None,
            limit_rank=self._limit_rank(limits) if self.groups else None,
        )

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

    def _limit_rank(self, limits: Float64[np.ndarray, "n"]) -> Float64[Tensor, "n"]:
        """The ranks of thresholds; infinite where there is no limit, so that no image is close to it."""
        values = torch.from_numpy(limits)
        return rank(values, self.selection.uncertainty_quantiles).masked_fill(values == NO_LIMIT, torch.inf)

    def _rules_in_words(
        self, observed: Observations, alert: Int64[Tensor, "n"], limits: Float64[Tensor, "n"]
    ) -> dict[int, tuple[str, str]]:
        """Of rows that are refused however certain they are, the kind of the reason, and the reason."""
        levels = {one.label: one for one in self.guarantee.missed}
        words: dict[int, tuple[str, str]] = {}
        if self.groups and observed.group is not None:
            what = "predicted class" if self.guarantee.per == CLASS else f"{self.guarantee.per}"
            for row in limits.isneginf().nonzero()[:, 0].tolist():
                place = int(observed.group[row])
                reason = self.groups[place].reason if place >= 0 else "it has no calibration images"
                name = self._group_name(place) if place >= 0 else "unknown"
                words[row] = f"{what} without a threshold", f"{what} {name} is refused: {reason}"
        for row in (alert >= 0).nonzero()[:, 0].tolist():
            one = levels[int(alert[row])]
            held = f"may be {one.name}, of which at most {100 * one.level:g} % may be missed"
            words[row] = f"may be {one.name}", held
        return words

    def _group_name(self, place: int) -> str:
        group = self.groups[place].group
        if self.guarantee.per == CLASS and self.classes is not None:
            return self.classes[int(group)].partition(",")[0]
        return str(group)

    def _checked_on(
        self, table: Table, observed: Observations, accept: Bool[np.ndarray, "n"], shift: Shift, *, own: float
    ) -> GuaranteeCheck:
        """What labelled images show about the guarantee, and about every part of it."""
        wrong = observed.wrong if self.costs is None else observed.loss
        parts: list[GuaranteePart] = []
        if wrong is not None and observed.wrong is not None:
            counted = wrong / self.guarantee.largest if self.costs is not None else wrong
            for place, one in enumerate(self.groups):
                if not one.reason:
                    about = accept & (observed.group == place)
                    parts.append(GuaranteePart(self._group_name(place), about, counted, self.guarantee.level))
            label = table.label.numpy()
            for rule in self.guarantee.missed:
                lost = accept & observed.wrong
                parts.append(GuaranteePart(f"missed {rule.name}", label == rule.label, lost, rule.level))
        return check_guarantee(self.guarantee, accept, wrong, shift, own=own, parts=parts)

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
        own = self._own_images(table)
        return check_guarantee(self.guarantee, decisions.accept.numpy(), None, decisions.shift, own=own)

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
        elif self.guarantee.per == CLASS and classes != len(self.groups):
            reason = f"it has {classes} classes, not {len(self.groups)}"
        elif self.costs is not None and classes != len(self.costs.costs):
            reason = f"it has {classes} classes, not {len(self.costs.costs)}"
        elif any(one.label >= classes for one in self.missed):
            reason = f"it has {classes} classes, and not class {max(one.label for one in self.missed)}"
        elif self.provenance and table.provenance:
            reason = self.provenance.difference(table.provenance)
        if reason:
            raise TableError(
                f"guard: {table.name} was made by another model than the guard was fitted for: {reason}. "
                f"Fit a guard on a table of this model."
            )
        check_provenance(table.provenance, self.provenance, by="guard", of=f"{table.name} and the guard's own table")

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
        arrays += [] if self.costs is None else [self.costs.costs]
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
        if self.costs is not None:
            write_file(folder / _COSTS, save({"costs": self.costs.costs}))
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
        check_layout(described, LAYOUT)
        parts = FOLDER.part(folder, described["parts"])
        guarantee, costs = Guarantee.from_json(described["guarantee"]), None
        if guarantee.kind == "cost":
            matrix = load_file(parts / _COSTS)["costs"]
            costs = CostMatrix.of(matrix, len(matrix))
        guard = cls(
            guarantee=guarantee,
            threshold=Threshold(**described["threshold"]),
            selection=ScoreSelection.read(parts, described),
            calibration=Observations.from_arrays(load_file(parts / _OBSERVED)),
            sets=None if described["sets"] is None else PredictionSets.from_json(described["sets"]),
            classes=described["classes"],
            provenance=Provenance.from_json(described["provenance"], f"guard in '{folder}'"),
            rows=described["rows"],
            groups=tuple(GroupThreshold.from_json(one) for one in described.get("groups", ())),
            missed=tuple(MissedThreshold.from_json(one) for one in described.get("missed", ())),
            costs=costs,
        )
        check_guard(guard)
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
        threshold, sets = self.threshold, self.sets
        calibration = f"{threshold.accepted} of {threshold.of} accepted ({threshold.accepted / threshold.of:.1%})"
        if threshold.errors is not None:
            rate = threshold.errors / max(1, threshold.accepted)
            what = "wrong" if self.costs is None else "at a cost"
            calibration += f", {threshold.errors} of them {what} ({rate:.1%})"
        if threshold.value == NO_LIMIT and not self.groups:
            calibration += "; no image is refused for its uncertainty"
        novelty = f"{self.rows['novel']} of {threshold.of} calibration images are refused as unlike the others"
        facts = {
            "uncertainty": str(self.selection.combination),
            "calibration": calibration,
            "kinds": str(self.selection.roles),
            "novelty": "not checked" if self.selection.gate is None else novelty,
        }
        if self.groups:
            facts |= {"classes" if self.guarantee.per == CLASS else "groups": self._groups_in_words()}
        if self.missed:
            facts["alerts"] = "; ".join(self._alert_in_words(one) for one in self.missed)
        if sets is not None:
            kind = "of every class" if sets.class_wise else "of images"
            kind = f"of every group of '{sets.per}'" if sets.per is not None else kind
            kind = f"of every cluster of classes, {sets.clusters} at most," if sets.clusters else kind
            kind += f" (of all images for {len(sets.marginal_)} classes)" if sets.marginal_ else ""
            facts["sets"] = f"contain the true class for {100 * sets.coverage:g} % {kind} ({sets.method})"
        return facts

    def _groups_in_words(self) -> str:
        """How many have a threshold, and the first of those that do not."""
        refused = [place for place, one in enumerate(self.groups) if one.reason]
        words = f"{len(self.groups) - len(refused)} of {len(self.groups)} have a threshold"
        if refused:
            first = [f"{self._group_name(place)} ({self.groups[place].reason})" for place in refused[:_NAMED]]
            more = f" and {len(refused) - _NAMED:,} more" if len(refused) > _NAMED else ""
            words += f"; refused are {', '.join(first)}{more}"
        return words

    def _alert_in_words(self, one: MissedThreshold) -> str:
        name = next(rule.name for rule in self.guarantee.missed if rule.label == one.label)
        missed = f"{one.missed} of {one.of} calibration images of {name} would be missed"
        if math.isinf(one.value):
            return f"{missed} without any alert"
        return f"{name} from a probability of {one.value:.2g} on: {missed}"

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


class _Rules(NamedTuple):
    """What decides about images besides their uncertainty."""

    guarantee: Guarantee
    missed: Sequence[MissedThreshold]
    groups: Sequence[Group]
    costs: CostMatrix | None


def _observe(
    selection: ScoreSelection,
    values: Mapping[str, Float64[Tensor, "n"]],
    table: Table,
    rules: _Rules,
    *,
    labelled: bool,
) -> Observations:
    """What a guard observes of a table, from its scores."""
    u, novel = selection.uncertainty(values)
    parts = [torch.zeros(0, dtype=torch.long), *(batch.logit.argmax(1) for batch in table.batches("logit"))]
    predicted, density, per = torch.cat(parts).numpy(), selection.roles.density, rules.guarantee.per
    group = None
    if per is not None:
        group = group_codes(predicted if per == CLASS else groups_in(table, per, by="guard"), rules.groups)
    refused = novel | (alerts(rules.missed, table) >= 0)
    wrong = wrong_predictions(table, by="guard").numpy() if labelled else None
    return Observations(
        uncertainty=torch.where(refused, torch.inf, u).numpy(),
        predicted=predicted,
        density=None if density is None else values[density].numpy(),
        wrong=wrong,
        loss=None if wrong is None or rules.costs is None else rules.costs.of_rows(table.label.numpy(), predicted),
        group=group,
    )


def _groups(guarantee: Guarantee, table: Table, *, by: str) -> tuple[Group, ...]:
    """All classes, or all groups that the calibration images have; none where the guarantee is about all images."""
    if guarantee.per is None:
        return ()
    if guarantee.per == CLASS:
        return tuple(range(table.shape("logit")[1]))
    return tuple(np.unique(groups_in(table, guarantee.per, by=by)).tolist())


def _with_sketch(calibration: Observations, table: Table) -> Observations:
    """With what calibration images are recognised by, should they come again."""
    drawn = sketch(table)
    return calibration if drawn is None else replace(calibration, sketch=drawn.numpy())


def _threshold(
    guarantee: Guarantee,
    selection: ScoreSelection,
    calibration: Observations,
    rows: int,
    groups: Sequence[Group],
    *,
    by: str,
) -> tuple[Threshold, tuple[GroupThreshold, ...]]:
    """The threshold that keeps a guarantee, and that of each group; GuardError says what could be kept instead."""
    u, wrong = calibration.outcomes
    loss = wrong if guarantee.kind != "cost" else calibration.loss
    try:
        if calibration.group is None or loss is None:
            return guarantee.threshold((u, loss)), ()
        return group_thresholds(guarantee, u, loss, calibration.group, groups)
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
    if made and made.calibration:
        raise ModelError(
            f"{of} has logits that were calibrated ({made.calibration}); those of {model.name} are not. "
            f"Leave the model out, and pass tables to which the same calibration was applied."
        )
    if made and (reason := made.difference(own)):
        raise ModelError(
            f"{of} belongs to another model than {model.name}: {reason}. A guarantee of that one says nothing about "
            f"this one: extract images with {model.name}, and fit a guard on them."
        )
    return own, signed
