"""The parts of a report: each is what another room computes from the tables, or the reason why it is missing."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dubito.active import find_label_issues
from dubito.active.label_issues import LabelIssues
from dubito.data.image_set import Subset
from dubito.errors import DubitoError, DubitoWarning, GuardError, TableError
from dubito.evaluate.compare import Comparison, compare
from dubito.evaluate.evaluate import Evaluation, evaluate
from dubito.explain.diagnosis import Diagnosis, diagnose
from dubito.explain.structure import Structure, structure
from dubito.guard import Guard
from dubito.guard.guarantee import Guarantee
from dubito.guard.missed import alerts
from dubito.guard.thresholds import needed
from dubito.heads.linear_logits import linear_logits
from dubito.protocols.corruption_curve import CorruptionCurves, corruption_curve
from dubito.report.page import match_images
from dubito.scores import Entropy
from dubito.scores.density import QUICK, default_density
from dubito.table import Table
from dubito.threads import quiet
from dubito.types import Classifier, Images, Score
from dubito.validate import has_model_labels

RISKS = (0.01, 0.05, 0.1)
"""Risks for which a report says what a guard would accept."""
_BY = "model_report"
_FEWEST = 10
"""Images that it takes to fit a guard at all."""
_MOST_TO_CLASSIFY = 1.5e8
"""Images times features times classes up to which classifiers on the features take about twenty seconds."""
_OF_MODEL = ("accuracy", "nll", "brier", "ece")
_SEVERITIES = (0, 1, 3, 5)
_LAYER_BATCHES = 10
"""Batches of 2,048 rows that the last layer is recovered from, at most."""
_EXACT = 1e-3
"""Share of the logits' deviation that a recovered layer may miss: half precision costs about as much."""

AnyPart = TypeVar("AnyPart")


class Missing(NamedTuple):
    """Why a part of a report is not there.

    Attributes:
        need: What would add it, a key of `ModelReport.how`; empty where nothing simple would.
        why: Otherwise, the reason.
    """

    need: str
    why: str = ""


class AcceptedAtRisk(NamedTuple):
    """What a guard accepts at one risk.

    Attributes:
        risk: At most this share of the accepted images is wrong.
        accepted: How many of the calibration images are accepted; None where the risk is not feasible.
        errors: How many of these are wrong.
        of: Number of calibration images.
        instead: What is feasible where the risk is not.
        ood: By OOD table, the share of its images that would be accepted.
    """

    risk: float
    accepted: int | None
    errors: int | None
    of: int
    instead: str
    ood: dict[str, float]


class Acceptance(NamedTuple):
    """What a guard accepts, risk by risk.

    Attributes:
        levels: One for each of RISKS.
        confidence: Of every guarantee by itself.
        reference: Number of images that the scores were selected on.
        own: Whether it is the user's guard; else one that was fitted on the images of the report.
        by: The uncertainty that it compares with its threshold.
    """

    levels: tuple[AcceptedAtRisk, ...]
    confidence: float
    reference: int
    own: bool
    by: str


@dataclass
class Parts:
    """Computes the parts of a report. One that the tables do not allow is None, and `missing` says why."""

    table: Table
    ood: dict[str, Table]
    train: Table | None
    confidence: float
    seed: int
    missing: dict[str, Missing] = field(default_factory=dict)

    def attempt(self, part: str, lacks: str | None, compute: Callable[[], AnyPart]) -> AnyPart | None:
        """The part, unless it lacks something, or an error says why it cannot be computed."""
        if lacks is not None:
            self.missing[part] = Missing(lacks)
            return None
        try:
            return compute()
        except DubitoError as error:
            self.missing[part] = Missing("", str(error))
            return None

    def lacks(self, *needs: str) -> str | None:
        """The first of some needs that the tables do not fulfil."""
        there = {
            "label": has_model_labels(self.table),
            "ood": bool(self.ood),
            "feature": all("feature" in one for one in (self.table, *self.ood.values())),
        }
        return next((need for need in needs if not there[need]), None)

    def comparison(self) -> Comparison | None:
        """All scores that the columns allow, ranked."""
        options: Any = {"confidence": self.confidence, "seed": self.seed}
        lacks = self.lacks("label") and self.lacks("ood") and "label"
        return self.attempt("scores", lacks, lambda: compare(self.table, self.ood or None, train=self.train, **options))

    def evaluation(self, comparison: Comparison | None) -> Evaluation | None:
        """The model's own metrics and the curves of every score, whose values are there already."""
        values = {} if comparison is None else comparison.uncertainties
        u: dict[str, Any] = {name: of[None] for name, of in values.items()}
        options: Any = {"metrics": _OF_MODEL, "confidence": self.confidence, "seed": self.seed}
        made = self.attempt("calibration", self.lacks("label"), lambda: evaluate(u, self.table, **options))
        if made is None:
            self.missing |= dict.fromkeys(("risk", "mistakes"), self.missing["calibration"])
        if comparison is None or not self.ood:
            self.missing["histograms"] = self.missing["scores"] if self.ood else Missing("ood")
        return made

    def acceptance(self, guard: Guard | None) -> Acceptance | None:
        """What a guard accepts at every risk: the user's, or one that is fitted on the table."""
        return self.attempt("acceptance", None if guard else self.lacks("label"), lambda: self._accepted(guard))

    def _accepted(self, guard: Guard | None) -> Acceptance:
        if guard is None and len(self.table) < _FEWEST:
            fewest = needed(RISKS[-1], self.confidence)
            raise GuardError(
                f"a guarantee takes more images: a risk of {RISKS[-1]:g} at least {fewest} to calibrate, all predicted "
                f"correctly; {self.table.name} has {len(self.table)}."
            )
        if guard is None:
            with quiet(category=DubitoWarning):  # nobody uses this guard: what it lacks is no reason for concern
                # Its own guarantee is not used: one that hardly any table is too small for.
                options: Any = {"confidence": self.confidence, "seed": self.seed, "train": self.train}
                fitted = Guard.fit(None, self.table, coverage=0.5, sets=False, **options)
        else:
            fitted = guard
        compared = {}
        for name, one in self.ood.items():
            with suppress(DubitoError):  # a column that the guard reads is missing there
                decisions = fitted.decide(one)
                refused = decisions.novel | (alerts(fitted.missed, one) >= 0)
                compared[name] = decisions.uncertainty.masked_fill(refused, torch.inf)

        def at(risk: float) -> AcceptedAtRisk:
            # With missed classes, whose thresholds were chosen on the same images, the test is stricter.
            guarantee = Guarantee("risk", risk, fitted.guarantee.confidence, missed=fitted.guarantee.missed)
            try:
                threshold = guarantee.threshold(fitted.calibration.outcomes)
            except GuardError as error:
                instead = guarantee.feasible(fitted.calibration.outcomes, fitted.rows["table"])
                return AcceptedAtRisk(risk, None, None, len(fitted.calibration), instead or str(error), {})
            accepted = {name: float((u <= threshold.value).double().mean()) for name, u in compared.items()}
            return AcceptedAtRisk(risk, threshold.accepted, threshold.errors, threshold.of, "", accepted)

        return Acceptance(
            levels=tuple(map(at, RISKS)),
            confidence=fitted.guarantee.confidence,
            reference=fitted.rows["reference"],
            own=guard is not None,
            by=str(fitted.selection.combination),
        )

    def issues(self) -> LabelIssues | None:
        """Labels that may be wrong; those of other classes by classifiers on the features, where these are quick."""
        lacks = "label"
        if has_model_labels(self.table):
            lacks = ""
        elif "label" in self.table and "feature" in self.table:
            rows, width = self.table.shape("feature")
            lacks = "issues" if rows * width * len(torch.unique(self.table.label)) > _MOST_TO_CLASSIFY else ""
        return self.attempt("issues", lacks or None, lambda: find_label_issues(self.table, seed=self.seed))

    def diagnosis(self) -> Diagnosis | None:
        """Why confidence does not separate OOD images; by a density that is fitted within seconds."""

        def diagnosed() -> Diagnosis:
            learn = self.table if self.train is None else self.train
            options: Any = {"confidence": self.confidence, "seed": self.seed, "train": self.train}
            with quiet(category=DubitoWarning):  # what it warns of are its notes
                return diagnose(self.table, self.ood, density=default_density(learn, by=_BY, most=QUICK), **options)

        return self.attempt("causes", self.lacks("ood", "feature"), diagnosed)

    def structure(self, model: Classifier | None) -> Structure | None:
        """The last layer, of the model or recovered, and the class means where labels show them."""
        labelled = self.table if has_model_labels(self.table) and len(torch.unique(self.table.label)) > 1 else None
        lacks = None if "feature" in self.table else "feature"

        def measured() -> Structure:
            if model is not None:
                return structure(model, labelled)
            return replace(structure(_recovered_layer(self.table), labelled), name="last layer")

        return self.attempt("geometry", lacks, measured)

    def corruption(
        self, model: Classifier | None, images: Images | None, comparison: Comparison | None, count: int
    ) -> CorruptionCurves | None:
        """The corruption curve of a sample of the images."""
        scores: dict[str, Score] = {} if comparison is None else comparison.fitted
        chosen = best_score(comparison)
        named = {name: scores[name] for name in (chosen, "entropy") if name in scores} or {"entropy": Entropy()}
        plain = {name: score for name, score in named.items() if set(score.needs) <= {"logit", "feature"}}

        if model is None or images is None or not count:
            self.missing["corruption"] = Missing("model")
            return None
        rows = sorted(match_images(self.table.row_ids(), images, by=_BY).values())
        drawn = np.random.default_rng(self.seed).permutation(rows)[:count]
        sample = Subset(images, sorted(drawn.tolist()))
        options: Any = {"severities": _SEVERITIES, "seed": self.seed, "confidence": self.confidence}
        with tempfile.TemporaryDirectory() as folder:
            to: Any = {"to": folder, "progress": False, "workers": 0}
            return self.attempt("corruption", None, lambda: corruption_curve(model, sample, plain, **to, **options))


def best_score(comparison: Comparison | None) -> str:
    """The score to use: `Comparison.choice`, or else the best one on the first question."""
    return "entropy" if comparison is None else comparison.choice or comparison.ranking[0]


def _recovered_layer(table: Table) -> tuple[Tensor, Tensor]:
    """Weight and bias of the layer between features and logits."""

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in islice(table.batches("feature", "logit"), _LAYER_BATCHES):
            yield batch.feature.double(), batch.logit.double()

    layer = linear_logits(pairs)
    if layer.missed is None:
        raise TableError(
            f"the last layer can be recovered from more images than features; {table.name} has {len(table):,} images "
            f"and {layer.rank:,} independent features. Pass more images, or the model."
        )
    if layer.missed > _EXACT:
        raise TableError(
            f"the logits of {table.name} are not those of a linear layer on its features: one misses "
            f"{layer.missed:.1%} of their deviation. Pass the model."
        )
    return layer.weight, layer.bias
