"""The page of a report: the summary, one section after the other, galleries, and what was run to make it."""

import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from dubito.guard.thresholds import percent
from dubito.page.render import fill, words
from dubito.report import sections
from dubito.report.gallery import Card, render_card
from dubito.report.report import ModelReport
from dubito.report.sections import Blocks, short_place
from dubito.report.summary import ACCEPTED, Answer, share, summary
from dubito.report.trust import GUARD, RankedImage, cards
from dubito.table import Table

_LISTED = 100
"""Images that could not be decoded: so many are listed."""
_PACKAGES = ("dubito", "torch", "numpy", "scipy", "Pillow", "timm")
_NEEDS = {
    "label": "Labels of the model's classes",
    "ood": "Out-of-distribution images",
    "feature": "Features",
    "images": "The images themselves",
    "issues": "Classifiers on the features, which take long here,",
    "model": "The model and its images",
}
"""By key of `ModelReport.how`: what it is."""
_NUMBERS = (
    (
        "scores",
        "Scores",
        "Every score by what it should find: wrong predictions (error AUROC and AURC, where lower is better) and "
        "out-of-distribution images. Intervals are below the values. Where some scores are worse by more than noise, "
        "those that could be the best are in colour.",
        sections.score_table,
    ),
    (
        "calibration",
        "Calibration",
        "Is a prediction with 80 % right in 80 % of the cases? Points above the dashed line: the model is better than "
        "it claims; below: worse. Vertical lines are exact 95 % intervals.",
        sections.reliability,
    ),
    (
        "risk",
        "Risk and coverage",
        "What is gained by accepting the most certain images alone: the lower a curve, the fewer errors remain.",
        sections.risk_coverage,
    ),
    (
        "histograms",
        "In and out of distribution",
        "Uncertainties of the model's own kind of images and of others; further to the right is more uncertain. Where "
        "the two overlap, the score cannot separate them.",
        sections.in_and_out,
    ),
    (
        "corruption",
        "Corruption",
        "Does the uncertainty grow as images are blurred, covered, zoomed and made noisy?",
        sections.corruption,
    ),
    (
        "causes",
        "Causes of failure",
        "Why confidence fails to separate out-of-distribution images, in points of AUROC: saturated probabilities, "
        "confidence far from the training features, or features that overlap.",
        sections.causes,
    ),
    (
        "geometry",
        "Geometry of the last layer",
        "Weights of the classes, beside the structure that would serve confidence best: equal lengths, no biases, and "
        "the same angle between all pairs.",
        sections.geometry,
    ),
)
"""Key, title, what it shows, and the function that makes it."""


class Section(NamedTuple):
    """One section of the page.

    Attributes:
        key: Its name in addresses.
        title: The heading.
        about: What it shows, in a sentence or two.
        blocks: What it shows; see `sections`.
        missing: Where there is nothing to show, the reason.
        how: The call that would add it.
    """

    key: str
    title: str
    about: str
    blocks: Blocks
    missing: str = ""
    how: str = ""


def report_page(report: ModelReport) -> str:
    """The page as text."""
    trust, acceptance = report.trust, report.acceptance
    model = "the model" if trust.model is None else trust.model.rpartition(":")[2]
    levels = () if acceptance is None else acceptance.levels
    numbers = [
        Section(key, title, about, blocks) if (blocks := make(report)) else _lacking(report, key, title)
        for key, title, about, make in _NUMBERS
    ]
    return fill(
        "report.html.j2",
        title=f"How far can you trust {model}?",
        lead=f"{_count(trust.total, 'image')} of {short_place(trust.name)} as {model} sees "
        f"{'them' if trust.total > 1 else 'it'}: how good it is, when it is uncertain, and where to look.",
        facts=_facts(report),
        answers=[*_answers(report)],
        levels=[(share(one.risk), None if one.accepted is None else one.accepted / one.of) for one in levels],
        percent=share,
        notes=report.notes,
        sections=[*numbers, *_watch(report), *_galleries(report), _undecodable(report), _provenance(report)],
    )


def _answers(report: ModelReport) -> Iterator[Answer]:
    """The summary, without the sentence that the table of risks shows."""
    feasible = report.acceptance is not None and any(one.accepted is not None for one in report.acceptance.levels)
    for answer in summary(report):
        yield answer._replace(sentences=answer.sentences[1:]) if answer.question == ACCEPTED and feasible else answer


def _lacking(report: ModelReport, key: str, title: str) -> Section:
    """A section that says what would add it."""
    lacks = report.missing.get(key)
    if lacks is None:
        return Section(key, title, "", [], "There is nothing to show for these images.")
    if lacks.need:
        return Section(key, title, "", [], f"{_NEEDS[lacks.need]} would add this section:", report.how[lacks.need])
    return Section(key, title, "", [], f"Not for these images: {re.sub(r'^[a-z_.]+: ', '', lacks.why)}")


def _facts(report: ModelReport) -> list[str]:
    """Short facts below the title."""
    table, model = report.tables["images"], report.trust.model
    labels = "no labels"
    if "label" in table:
        labels = "labels of the model's classes" if table.label_space == "model" else "labels of other classes"
    others = [f"{role}, {_count(len(one), 'image')}" for role, one in report.tables.items() if one is not table]
    named = [f"model {model}"] if model else []
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return [*named, _count(len(table), "image"), _count(report.classes, "class", "es"), labels, *others, today]


def _watch(report: ModelReport) -> Iterator[Section]:
    """What a watch has seen; whoever has none is not asked for one."""
    if blocks := sections.watch_history(report):
        about = (
            "Evidence that images are no longer like those of the guard's calibration, and that its guarantee is "
            "broken, after every image that it was used on. Shaded: from where a change has most likely begun to its "
            "alarm."
        )
        yield Section("watch", "The guard's watch", about, blocks)


def _galleries(report: ModelReport) -> Iterator[Section]:
    """The most and the least certain images, confident mistakes and likely label issues."""
    trust, most, half = report.trust, report.gallery, len(report.trust) // 2  # no image is at both ends
    by = "your guard" if trust.order_by == GUARD else words(trust.order_by)
    pictures = [("more", (f"{_NEEDS['images']} would add pictures:", report.how["images"]))]
    certain = trust.images[len(trust) - min(most, half) :][::-1]
    if certain:
        about = f"The images that the model is most certain about, by {by}."
        yield Section("certain", "Most certain", about, [("cards", _cards(report, certain))])
    about = f"The images to trust least, by {by}: look at these first."
    least = ("cards", _cards(report, trust.images[: min(most, len(trust) - half)]))
    blocks = [*(pictures if trust.pictures is None else []), least, ("words", trust.findings())]
    yield Section("uncertain", "Least certain", about, blocks)
    yield _mistakes(report)
    yield _issues(report)


def _mistakes(report: ModelReport) -> Section:
    """Wrong predictions, the most certain first."""
    key, title = "mistakes", "Confident mistakes"
    if report.evaluation is None:
        return _lacking(report, key, title)
    mistakes = [image for image in report.trust.images[::-1] if image.label != image.predicted]
    if not mistakes:
        return Section(key, title, "", [], "No prediction is wrong.")
    about = "Wrong predictions that the model is most certain about: these pass any threshold first."
    return Section(key, title, about, [("cards", _cards(report, mistakes[: report.gallery]))])


def _issues(report: ModelReport) -> Section:
    """Labels that are likely wrong, with the class that the model suggests."""
    issues, title = report.issues, "Likely label issues"
    if issues is None:
        return _lacking(report, "issues", title)
    if not len(issues):
        return Section("issues", title, "", [], "No label looks wrong, as far as these predictions can tell.")
    by_id = {image.id: image for image in report.trust.images}
    shown = issues.records()[: report.gallery]
    made = []
    for record, card in zip(shown, _made(report, [by_id[record["id"]] for record in shown]), strict=True):
        label, suggested = (issues.cell(key, record[key]) for key in ("label", "suggested"))
        reason = f"labelled {label}; the likeliest other class is {suggested}"
        verdict = f"{percent(record['probability'])} wrong"
        made.append(replace(card, mark=f"label: {label}", verdict=verdict, reason=reason, tone="bad"))
    about = f"Of {_count(issues.images, 'label')}, {len(issues):,} may well be wrong; the most probable come first."
    if issues.suspicious:
        about = f"Of {_count(issues.images, 'label')}, none is shown to be wrong; the most suspicious come first."
    return Section(
        "issues",
        title,
        about,
        [("cards", [render_card(card) for card in made]), ("words", issues.findings())],
    )


def _cards(report: ModelReport, images: Iterable[RankedImage]) -> list[dict[str, object]]:
    return [render_card(card) for card in _made(report, images)]


def _made(report: ModelReport, images: Iterable[RankedImage]) -> list[Card]:
    return cards(replace(report.trust, images=tuple(images)))


def _undecodable(report: ModelReport) -> Section:
    skipped, title = report.trust.skipped, "Images that could not be decoded"
    if not skipped:
        return Section("undecodable", title, "", [], "All images could be decoded.")
    rows = [[(name, "", "word"), (reason, "", "word")] for name, reason in skipped[:_LISTED]]
    more = [("words", [f"and {len(skipped) - _LISTED:,} more"])] if len(skipped) > _LISTED else []
    about = f"{_count(len(skipped), 'file')} could not be read as images. No number on this page includes them."
    return Section("undecodable", title, about, [("table", {"header": ["file", "reason"], "rows": rows}), *more])


def _provenance(report: ModelReport) -> Section:
    """Which model, which data, which versions, and the calls that make the report again."""
    made = report.tables["images"].provenance
    model = {} if made is None else {"model": made.model or "not named", "model id": made.model_id or "not known"}
    if made is not None:
        weights = made.checkpoint["path"].rpartition("/")[2] if made.checkpoint else ""
        model |= {"weights": f"{(made.weights or 'not known')[:16]}{f', from {weights}' if weights else ''}"}
        model |= {"transform": _settings(made.transform)} if made.transform else {}
        model |= {f"probe {name}": _settings(one.get("settings", {})) for name, one in made.probes.items()}
    model |= {"versions": ", ".join(f"{name} {text}" for name, text in _versions().items())}
    header = ["data", "images", "columns", "labels"]
    rows = [
        [
            (short_place(table.name), role, ""),
            (f"{len(table):,}", "", ""),
            (", ".join(table.columns), "", "word fold"),
            (_labels(table), "", "word"),
        ]
        for role, table in report.tables.items()
    ]
    blocks: Blocks = [("facts", model), ("table", {"header": header, "rows": rows})]
    if lines := report.how.get("reproduce"):
        blocks += [("heading", "Make this report again"), ("code", lines)]
    return Section(
        "provenance", "What was run", "The model, the data and the versions behind every number here.", blocks
    )


def _labels(table: Table) -> str:
    if "label" not in table:
        return "none"
    return "the model's classes" if table.label_space == "model" else "other classes"


def _settings(settings: object) -> str:
    if not isinstance(settings, dict):
        return str(settings)
    return ", ".join(f"{key} {_short(value)}" for key, value in settings.items()) or "defaults"


def _short(value: object) -> str:
    """A setting, numbers to four digits."""
    if isinstance(value, list | tuple):
        return "/".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _versions() -> dict[str, str]:
    """Of Python, and of the packages that are installed."""
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _count(count: int, what: str, plural: str = "s") -> str:
    return f"{count:,} {what}{'' if count == 1 else plural}"
