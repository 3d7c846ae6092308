"""Accept or abstain: a threshold on an uncertainty that keeps a promise, and for every image the reason in words.

    rows of the table -> learn   scores that learn, where no table to learn from is given
                         choose  which scores, how combined, which thresholds to try
                         calibrate   the promise, and prediction sets: seen once, when all else is fixed

The three parts are disjoint and drawn at random, so what is chosen on the first two cannot spoil the promise; see
`thresholds` for the proof. It speaks of images like those of the table. Images whose features are rarer than almost all
of the known ones are refused whatever their score: for them, no promise was tested.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float64
from torch import Tensor

from dubito.cache.fingerprint import model_identity
from dubito.cache.runner import predict_table
from dubito.errors import GuardError, ModelError, TableError
from dubito.guard._given import (
    check_apart,
    check_model,
    check_settings,
    checked_labels,
    checked_provenance,
    not_the_same,
    split_rows,
    warn_of_twins,
)
from dubito.guard.candidates import (
    Roles,
    Scores,
    competing,
    few,
    fitted_scores,
    given_scores,
    lacks_density,
    learns,
    with_density,
)
from dubito.guard.combine import Combination, rank
from dubito.guard.conformal import PredictionSets, fitted_sets
from dubito.guard.inputs import as_images
from dubito.guard.judge import Judge, novel_rows
from dubito.guard.promise import Guarantee
from dubito.guard.thresholds import Threshold
from dubito.guard.verdict import Decisions, Verdict, top_two
from dubito.probes.registry import probes_for
from dubito.table import Provenance, Table, check_table
from dubito.types import Classifier, Json, Probe, Score

NOVEL = 0.005


@final
@dataclass(eq=False, repr=False)
class Guard:
    """A classifier's answers, accepted or refused under a promise. Made by `Guard.fit`, read back by `Guard.load`.

    Attributes:
        promise: What is promised.
        threshold: The threshold that keeps it, and what it did on the calibration images.
        combination: Which scores make the uncertainty.
        scores: The scores that it needs, fitted.
        grids: By score, quantiles on the selection images, to tell ranks by.
        known: Quantiles of the uncertainty itself.
        roles: Which score tells the aleatoric, the epistemic and the density.
        gate: Images with a density score above it are refused; None for no such rule.
        sets: Prediction sets, if there are any.
        classes: Names of the classes, if known.
        provenance: Which model it belongs to, part by part.
        rows: How many images each part of the table had.
        model: The model itself; without it, only tables can be judged.
        probes: Of columns that cannot be made anew from their names.
    """

    promise: Guarantee
    threshold: Threshold
    combination: Combination
    scores: dict[str, Score]
    grids: dict[str, Float64[Tensor, "_"]]
    known: Float64[Tensor, "q"]
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
        """Choose scores on one part of a table, a threshold on another, so that a promise is kept.

        Args:
            model: Whose answers are guarded; None where only tables will be judged.
            table: Labelled images that the model was not trained on, like those to come. With coverage=..., labels
                may be missing.
            risk: At most this share of the accepted images is wrong; 0.05 unless another promise is asked for.
            confidence: With this probability, over tables like this one.
            coverage: Guarantee instead that at least this share of all images is accepted.
            false_alarms: Guarantee instead that at most this share of the right answers is refused.
            scores: To choose among, by name or as a list; the first stays unless another is clearly better. By default
                all that the columns allow, max-probability first, but no uncertainty head. Those that are fitted
                already, and heads, must have learned from other images than the table's.
            train: What scores learn from, such as the model's training images; by default a part of the table.
            sets: Prediction sets: how they are made, or False for none. By default of coverage 0.9, where the table
                has labels, and at least nine rows to calibrate.
            novel: Refuse images whose features are rarer than all but this share of the known ones; 0 for none. A
                density tells that, also where it is not among `scores`; without features there is none.
            probes: Those that the table was extracted with, if they cannot be made anew from the names of columns
                (tiles and gradients can).
            seed: Of the split.

        Raises:
            GuardError: The promise cannot be kept with these images; the message says how many it takes.
        """
        promise = Guarantee.of(risk, confidence, coverage, false_alarms)
        check_table(table, by="guard.fit")
        if train is not None:
            check_table(train, by="guard.fit", what="train")
        check_settings(novel, seed)
        provenance, labelled = checked_provenance(model, table), checked_labels(table, promise)
        given = None if scores is None else given_scores(scores)
        more = lacks_density(given, table, novel)
        split = split_rows(table, learn=train is None and (more or learns(given)), seed=seed)
        warn_of_twins(split, table)
        learn = few(split.learn if train is None else train)
        if train is not None and learn is not None:
            check_apart(table, learn)
        found = fitted_scores(given, split.choose, learn)
        candidates = competing(found, given is not None)
        found = with_density(found, learn) if more else found
        judge = Judge.choose(found, candidates, split.choose, labelled=labelled, novel=novel, seed=seed)
        threshold = judge.threshold(promise, split, len(table))
        return cls(
            promise=promise,
            threshold=threshold,
            combination=judge.combination,
            scores=judge.scores,
            grids=judge.grids,
            known=judge.known,
            roles=judge.roles,
            gate=judge.gate,
            sets=fitted_sets(sets, split.calibrate, labelled=labelled),
            classes=table.classes if model is None else model.classes or table.classes,
            provenance=provenance,
            rows={
                "learn": 0 if learn is None else len(learn),
                "choose": len(split.choose),
                "calibrate": len(split.calibrate),
                "novel": judge.novel,
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
        opened, single = as_images(images)
        found = self.decide(self.asked(opened))
        return found[0] if single else found

    def asked(self, images: Any) -> Table:
        """What the model says of images, with every column that the guard reads."""
        if self.model is None:
            raise GuardError("guard: images need the model. Load it with the guard: Guard.load(path, model).")
        probes = probes_for(self.needs, self.provenance, self.probes, by="guard")
        return predict_table(self.model, as_images(images)[0], probes, provenance=self.provenance)

    def decide(self, table: Table) -> Decisions:
        """A verdict of every row of a table of the same model."""
        check_table(table, by="guard.decide")
        table.require("logit", by="guard")
        if self.classes is not None and table.shape("logit")[1] != len(self.classes):
            raise TableError(
                f"guard: logits must be of the {len(self.classes)} classes that the guard was fitted for; "
                f"{table.name} has {table.shape('logit')[1]}. Give a table of the same model."
            )
        reason = not_the_same(self.provenance, table.provenance)
        if reason:
            raise TableError(
                f"guard: {table.name} was made by another model than the guard was fitted for: {reason}. "
                f"Fit a guard on a table of this model."
            )
        scored = {name: score.score(table) for name, score in self.scores.items()}
        ranks = {name: rank(scored[name], self.grids[name]) for name in self.roles.names}
        u = self.combination.of(scored, self.grids)
        novel = novel_rows(scored, self.roles.density, self.gate, len(table))
        p, label = top_two(table.logit)
        density = ranks.get(self.roles.density or "")
        return Decisions(
            ids=table.id.tolist() if "id" in table else [str(row) for row in range(len(table))],
            classes=self.classes,
            label=label,
            probability=p,
            uncertainty=u,
            rank=rank(u, self.known),
            accept=(u <= self.threshold.value) & ~novel,
            novel=novel,
            aleatoric=ranks.get(self.roles.aleatoric or ""),
            epistemic=ranks.get(self.roles.epistemic or ""),
            density_rank=None if density is None else 1 - density,
            sets=None if self.sets is None else self.sets.classes(table),
            edge=float(rank(torch.tensor([self.threshold.value], dtype=torch.float64), self.known)),
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
        from dubito.guard.saving import write_guard  # noqa: PLC0415 (it knows guards)

        return write_guard(self, to)

    @classmethod
    def load(cls, path: str | Path, model: Classifier | None = None, *, probes: Sequence[Probe] = ()) -> "Guard":
        """Read back what `save` wrote; another model than the guard's own is refused.

        Args:
            path: The folder.
            model: The model whose answers it guards; None to judge tables only.
            probes: As in `fit`.
        """
        from dubito.guard.saved import read_guard  # noqa: PLC0415

        guard = read_guard(path)
        if model is not None:
            check_model(model, by="guard.load")
            reason = not_the_same(guard.provenance, model_identity(model))
            if reason:
                raise ModelError(
                    f"guard in '{path}' was fitted for another model than {model.name}: {reason}. Its promise says "
                    f"nothing of this one: fit a guard on a table of {model.name}."
                )
            guard.classes = guard.classes or model.classes
        guard.model, guard.probes = model, probes
        return guard

    def export_onnx(self, to: str | Path, example: Tensor | None = None) -> Path:
        """Write model, score and threshold as one ONNX file; see `dubito.guard.onnx_file`."""
        from dubito.guard.onnx_file import export_onnx  # noqa: PLC0415 (needs an optional package)

        return export_onnx(self, to, example)

    def to_json(self) -> Json:
        """What was promised, chosen and seen, as plain values."""
        return {
            "promise": {"kind": self.promise.kind, "level": self.promise.level, "confidence": self.promise.confidence},
            "threshold": self.threshold._asdict(),
            "weights": self.combination.weights,
            "aurc": self.combination.aurc,
            "gate": self.gate,
            "sets": None if self.sets is None else self.sets.to_json(),
            "rows": self.rows,
        }

    def __repr__(self) -> str:
        found = self.threshold
        return f"Guard({self.promise}; by {self.combination}; {found.accepted} of {found.of} accepted)"

    def __str__(self) -> str:
        found, sets = self.threshold, self.sets
        seen = f"{found.accepted} of {found.of} accepted ({found.accepted / found.of:.1%})"
        if found.errors is not None:
            seen += f", {found.errors} of them wrong ({found.errors / max(1, found.accepted):.1%})"
        lines = [f"promise       {self.promise}", f"uncertainty   {self.combination}", f"calibration   {seen}"]
        lines.append(f"kinds         {self.roles}")
        told = f"{self.rows['novel']} of {found.of} calibration images are refused as unlike the known ones"
        lines.append(f"novelty       {'not looked at' if self.gate is None else told}")
        if sets is not None:
            kind = "of every class" if sets.class_wise else "of images"
            lines.append(f"sets          hold the true class for {100 * sets.coverage:g} % {kind} ({sets.method})")
        return "\n".join(lines)
