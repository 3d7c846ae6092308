"""A whole report on a model and its images: what the other rooms find out about them, in one result and on one page.

    any table                the images in the order of trust; what was run on which model and data
    labels                   accuracy, calibration, risk and coverage, what a guard would accept, label issues
    labels or OOD tables     every score by every question, with intervals and cost (`compare`)
    OOD tables               uncertainties in and out of distribution; with features, causes of failure (`diagnose`)
    features                 the last layer, recovered from features and logits (`structure`)
    a model and images       the corruption curve, on a sample
    a watch                  what the guard has been used on since, and whether that has changed

Nothing is computed here that another room does not compute. What a table does not allow is left out, and the report
says what would add it. Of more than 50,000 rows, a random sample of that size stands for all, and a note says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, final

import torch

from dubito.active.label_issues import LabelIssues
from dubito.data import open_images
from dubito.evaluate.compare import Comparison
from dubito.evaluate.evaluate import Evaluation
from dubito.explain.diagnosis import Diagnosis, short_name
from dubito.explain.structure import Structure
from dubito.guard import Guard, Watch, WatchReport
from dubito.metrics import confidence as confidence_of
from dubito.protocols.corruption_curve import CorruptionCurves
from dubito.report.page import match_images
from dubito.report.parts import Acceptance, Missing, Parts, best_score
from dubito.report.trust import SCORES, TrustReport, least_trusted
from dubito.result import Json, Result, plain
from dubito.table import Table
from dubito.table.views import chosen_rows
from dubito.types import Classifier, Images
from dubito.validate import check_number, check_rows, check_same_model

SURE = 0.9
"""Probability from which a prediction counts as confident."""
_BY = "model_report"
_MOST_ROWS = 50_000
PYTHON = {
    "label": "dubito.cache.label_cache(folder, labels)",
    "ood": "dubito.report.model_report(table, ood={'other': other})",
    "feature": "dubito.extract(model, images, to=folder)",
    "issues": "dubito.find_label_issues(table)",
    "images": "dubito.report.model_report(table, images)",
    "model": "dubito.report.model_report(table, images, model=model)",
    "train": "dubito.report.model_report(table, train=train)",
}
"""By what a report lacks, the call that adds it."""


@final
@dataclass(frozen=True)
class ModelReport(Result):
    """All that a table says about a model: print it, take it as JSON, or write it as a page.

    Attributes:
        trust: Every image with its verdict, the least trusted first.
        classes: Number of classes.
        comparison: Scores ranked; None without labels and OOD tables.
        evaluation: The model's own metrics, reliability and risk-coverage curves; None without labels.
        acceptance: What a guard would accept; None without labels.
        issues: Labels that are likely wrong; None without labels.
        diagnosis: Why confidence fails; None without OOD tables or features.
        structure: The geometry of the last layer; None without features.
        corruption: How uncertainty grows as images are corrupted; None without a model and images.
        confident_ood: By OOD table, the share of images whose predicted class has a probability of 90 % or more.
        missing: By part of the report, why it is not there.
        notes: What was left out or sampled.
        tables: The tables by role: "images", "OOD 'name'", "learned from".
        how: By what is missing, the call that would add it; under "reproduce", the calls that make this report.
        gallery: Largest number of images in each gallery of the page.
        watch: What a watch of the guard has seen; None without one.
    """

    trust: TrustReport
    classes: int
    comparison: Comparison | None
    evaluation: Evaluation | None
    acceptance: Acceptance | None
    issues: LabelIssues | None
    diagnosis: Diagnosis | None
    structure: Structure | None
    corruption: CorruptionCurves | None
    confident_ood: dict[str, float]
    missing: dict[str, Missing]
    notes: tuple[str, ...]
    tables: dict[str, Table] = field(repr=False, compare=False)
    how: Mapping[str, str] = field(repr=False)
    gallery: int = 12
    watch: WatchReport | None = None

    titles: ClassVar = TrustReport.titles
    columns: ClassVar = TrustReport.columns
    text_rows: ClassVar = 20

    def title(self) -> str:
        """How many images are listed, and what orders them."""
        return self.trust.top(self.text_rows or len(self.trust)).title()

    def facts(self) -> dict[str, str]:
        """The summary, question by question."""
        from dubito.report.summary import summary  # noqa: PLC0415 (which reads reports)

        return {answer.question: " ".join(answer.sentences) for answer in summary(self)}

    def records(self) -> list[dict[str, Any]]:
        """One row per image, the least trusted first."""
        return self.trust.records()

    def to_csv(self, path: str | Path) -> Path:
        """Write every image with its verdict, the least trusted first."""
        return self.trust.to_csv(path)

    def cell(self, key: str, value: Any) -> str:
        """As of the least trusted images."""
        return self.trust.cell(key, value)

    def findings(self) -> list[str]:
        """How many images have each verdict, and what was left out; nothing that the summary has said."""
        said = " ".join(self.facts().values())
        return [one for one in (*self.trust.findings(), *self.notes) if one not in said]

    def to_dict(self) -> Json:
        """The summary, the least trusted images and every part of the report, as plain values."""
        parts: dict[str, Result | None] = {
            name: getattr(self, name)
            for name in ("comparison", "evaluation", "issues", "diagnosis", "structure", "corruption", "watch")
        }
        return {
            **self.trust.top(self.text_rows or len(self.trust)).to_dict(),
            "summary": self.facts(),
            **{name: None if part is None else part.to_dict() for name, part in parts.items()},
            **{name: plain(getattr(self, name)) for name in ("acceptance", "confident_ood", "missing", "notes")},
        }

    def _page(self) -> str:
        from dubito.report.report_page import report_page  # noqa: PLC0415 (which draws reports)

        return report_page(self)


def model_report(  # noqa: PLR0913 (one call that users type; everything after `table` is optional)
    table: Table,
    images: Any = None,
    *,
    ood: Table | Mapping[str, Table] | None = None,
    train: Table | None = None,
    guard: Guard | None = None,
    watch: Watch | None = None,
    model: Classifier | None = None,
    corrupted: int = 32,
    gallery: int = 12,
    confidence: float = 0.95,
    seed: int = 0,
) -> ModelReport:
    """Everything that a table says about a model, for one page: `model_report(table, "photos").to_html("report.html")`.

    Args:
        table: Images with logits. Labels of the model's classes, features and further columns add to the report.
        images: Anything that dubito.open_images accepts: the images of the table, for pictures.
        ood: Out-of-distribution images by the same model: one table, or several by name.
        train: Other in-distribution images, for scores that learn.
        guard: A fitted guard, whose verdicts and guarantee are used; without one, the report fits one to show what it
            would accept.
        watch: A watch of the guard, for the history of what it was used on; its guard is used where none is passed.
        model: The model that made the table: with images, adds the corruption curve.
        corrupted: Images that the corruption curve is measured on, drawn at random; 0 for no curve.
        gallery: Largest number of images in each gallery of the page, about 15 KB each.
        confidence: Confidence of intervals and guarantees.
        seed: Seed of everything that is drawn at random.

    >>> report = model_report(Table(logit=[[4.0, 0.0], [0.1, 0.0]] * 10, label=[0, 1] * 10))
    >>> print(report.facts()["How good is the model?"].partition(".")[0])
    50 % of 20 images are predicted correctly (exact 95 % interval 27 to 73 %)
    """
    check_rows(table, by=_BY)
    table.require("logit", by=_BY)
    check_number(corrupted, "[0, inf)", by=_BY, what="corrupted", whole=True, hint="32 are usual; 0 for no curve.")
    check_number(gallery, "[1, inf)", by=_BY, what="gallery", whole=True, hint="12 are usual.")
    if watch is not None:
        guard = watch.guard if guard is None else guard
        watch.check_guard(guard, by=_BY)
    sets = _ood_tables(ood)
    check_same_model(table, {**{f"ood '{name}'": one for name, one in sets.items()}, "train": train}, by=_BY)
    opened = None if images is None else open_images(images)
    table, notes = _sampled(table, seed)
    if opened is not None and (lost := len(table) - len(match_images(table.row_ids(), opened, by=_BY))):
        notes.append(f"{lost:,} of the {len(table):,} images are not in {opened.name}, and have no picture.")
    parts = Parts(table, sets, train, confidence, seed)
    comparison = parts.comparison()
    return ModelReport(
        trust=least_trusted(table, opened, top=None, guard=guard, scores=_shown_scores(comparison)),
        classes=table.shape("logit")[1],
        comparison=comparison,
        evaluation=parts.evaluation(comparison),
        acceptance=parts.acceptance(guard),
        issues=parts.issues(),
        diagnosis=parts.diagnosis(),
        structure=parts.structure(model),
        corruption=parts.corruption(model, opened, comparison, corrupted),
        confident_ood={name: _confident(one) for name, one in sets.items()},
        missing=parts.missing,
        notes=tuple(notes),
        tables={
            "images": table,
            **{f"out-of-distribution: {name}": one for name, one in sets.items()},
            **({} if train is None else {"learned from": train}),
        },
        how=PYTHON | {"reproduce": _again(table, opened, sets, train)},
        gallery=gallery,
        watch=None if watch is None else watch.report(),
    )


def _shown_scores(comparison: Comparison | None) -> dict[str, Any] | None:
    """The uncertainties that cards show: of the score to use, which orders them, and of the softmax family."""
    if comparison is None:
        return None
    names = [name for name in dict.fromkeys([best_score(comparison), *SCORES]) if name in comparison.uncertainties]
    return {name: comparison.uncertainties[name][None] for name in names}


def _again(table: Table, images: Images | None, ood: Mapping[str, Table], train: Table | None) -> str:
    """The call that makes this report again, where its tables are caches."""
    others = "".join(f"{name!r}: dubito.open({one.name!r}), " for name, one in ood.items())
    parts = [
        f"dubito.open({table.name!r})",
        *([] if images is None else [repr(images.name)]),
        *([f"ood={{{others.removesuffix(', ')}}}"] if ood else []),
        *([] if train is None else [f"train=dubito.open({train.name!r})"]),
    ]
    return f"dubito.report.model_report({', '.join(parts)})"


def _ood_tables(ood: Any) -> dict[str, Table]:
    tables = {} if ood is None else dict(ood) if isinstance(ood, Mapping) else {short_name(ood, "ood"): ood}
    for name, one in tables.items():
        check_rows(one, by=_BY, what=f"ood '{name}'")
        one.require("logit", by=f"{_BY} (ood '{name}')")
    return tables


def _sampled(table: Table, seed: int) -> tuple[Table, list[str]]:
    """At most 50,000 rows, and a note where these are not all."""
    if len(table) <= _MOST_ROWS:
        return table, []
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    note = f"{_MOST_ROWS:,} of the {len(table):,} images, drawn with seed {seed}, stand for all of them."
    return chosen_rows(table, order[:_MOST_ROWS].sort().values), [note]


def _confident(table: Table) -> float:
    """The share of predictions with a probability of 90 % or more."""
    return sum(int((confidence_of(batch.logit) >= SURE).sum()) for batch in table.batches("logit")) / len(table)
