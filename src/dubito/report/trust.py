"""Which images to trust least, and why: every image with a verdict, a reason and its ranks, the worst first.

With a guard, verdicts and reasons are the guard's. Without one, they only read the model's own probabilities, and
nothing is guaranteed:

    look at it         a second class comes close, no class has half of the probability, or it is unlike the others
    confident          the predicted class has at least 90 % of the probability
    fairly confident   all others

Images are ordered by their rank: the share of the other images that are less uncertain by the first score. An image is
unlike the others if its distance d to the fifth nearest other image, on normalised features (Sun et al. 2022), is far
out as Tukey (1977) has it, d > Q3 + 3 (Q3 - Q1) of all distances. A model can be confident about such an image and
wrong, so its rank is by d where that is higher. Equal ranks are ordered by the first score, then by id.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float64
from PIL import Image

from dubito.data import open_images
from dubito.data.thumbnails import read_pixels, shrink, thumbnail_of
from dubito.errors import BrokenImageError, ValueRangeError
from dubito.evaluate.evaluate import ErrorsAtCoverage, coverage_facts, errors_at_coverage, uncertainty
from dubito.guard import Guard
from dubito.guard.thresholds import percent
from dubito.guard.verdict import class_name, rival_classes, top_two, unlike
from dubito.heads.score import UncertaintyHead
from dubito.metrics import Array, RiskCoverage, risk_coverage, wrong_predictions
from dubito.page.render import words
from dubito.page.svg import Axis, Line, lines
from dubito.report.gallery import Card, Summary, cards_page, shares_below
from dubito.report.page import match_images
from dubito.result import Result, cell, html_card
from dubito.scores.neighbours import neighbours_among
from dubito.scores.registry import make_score
from dubito.table import Table
from dubito.types import Images, Score
from dubito.validate import check_number, check_rows, has_model_labels

SCORES = ("entropy", "max_probability", "margin", "energy")
"""Shown for every image; the first one orders them."""
LOOK, FAIR, CONFIDENT = "look at it", "fairly confident", "confident"
ABSTAIN, ACCEPT = "abstain", "accept"
_TONES = {LOOK: "bad", ABSTAIN: "bad", FAIR: "fair", CONFIDENT: "good", ACCEPT: "good"}
_SURE, _HALF = 0.9, 0.5
_NEIGHBOUR, _FENCE = 5, 3.0
_FEWEST = 20
"""Images that it takes to call one of them unlike the others."""
_DRAWN, _REASONS, _CARDS = 200, 5, 200
_NO_GUARANTEE = (
    "These verdicts read the model's own probabilities and ranks among these images; they guarantee nothing. A guard "
    "does: fit one on labelled images."
)
GUARD = "guard"
SCORE_MEANINGS = {
    "entropy": "How spread out the predicted probabilities are, in nats: 0 is all on one class, 6.9 even over 1000.",
    "max_probability": "Minus the probability of the predicted class.",
    "margin": "Minus the gap between the two most probable classes: near zero, a second class comes close.",
    "energy": "Minus the log-sum-exp of the logits: high when no class gets a large logit.",
    UncertaintyHead.name: "A small network on the model's features that has learned which images are hard.",
    GUARD: "What the guard compares with its threshold. Its rank is among the guard's reference images.",
}


@final
@dataclass(frozen=True)
class RankedImage:
    """One image, what the model predicts for it, and how far to trust that.

    Attributes:
        id: The image's name.
        verdict: "abstain" or "accept" with a guard; without one "look at it", "fairly confident" or "confident".
        reason: Why, in words.
        predicted: The predicted class.
        predicted_class: Its name, if names are known.
        probability: Its softmax probability.
        rank: The share of the other images that are trusted more; with a guard, of its reference images.
        scores: By name, higher = more uncertain.
        ranks: By score, the share of the other images that are less uncertain.
        label: The true class, if it is known and one of the model's.
        label_class: Its name, if names are known.
    """

    id: str
    verdict: str
    reason: str
    predicted: int
    predicted_class: str | None
    probability: float
    rank: float
    scores: dict[str, float]
    ranks: dict[str, float]
    label: int | None = None
    label_class: str | None = None

    @property
    def short_prediction(self) -> str:
        """The predicted class without its synonyms."""
        return (self.predicted_class or f"class {self.predicted}").partition(",")[0]

    def record(self) -> dict[str, Any]:
        """As one row of a table: ranks are in per cent, each beside its score."""
        row: dict[str, Any] = {name: getattr(self, name) for name in ("id", "verdict", "reason", "predicted")}
        row |= {"predicted_class": self.predicted_class, "probability": self.probability}
        row |= {} if self.label is None else {"label": self.label, "label_class": self.label_class}
        row["rank_percent"] = round(100 * self.rank, 2)
        for name, value in self.scores.items():
            row |= {name: value, f"{name}_rank_percent": round(100 * self.ranks[name], 2)}
        return row


@final
@dataclass(frozen=True)
class TrustReport(Result):
    """Images with verdicts and reasons, the least trusted first.

    Attributes:
        name: Name of the table.
        model: Name of the model, if it is known.
        total: Images of the table.
        order_by: What orders the images.
        verdicts: How many images of the table have each verdict.
        images: The least trusted, worst first; as many as were requested.
        guard_findings: What the guard guarantees, whether that says anything about these images, and whether it is
            kept on them; empty without a guard.
        shifted: Whether the guard was calibrated on other images than these, by its tests.
        errors_at_coverage: The share of wrong predictions among the most trusted half, 80 %, 90 % and all images;
            empty without labels of the model's classes.
        curve: The same for every share of images; None without labels.
        skipped: Images that could not be decoded, each with the reason.
        pictures: The images themselves, if they are at hand.
    """

    name: str
    model: str | None
    total: int
    order_by: str
    verdicts: dict[str, int]
    images: tuple[RankedImage, ...]
    guard_findings: tuple[str, ...] = ()
    shifted: bool = False
    errors_at_coverage: ErrorsAtCoverage = field(default_factory=dict)
    curve: RiskCoverage | None = field(default=None, repr=False, compare=False)
    skipped: tuple[tuple[str, str], ...] = ()
    pictures: Images | None = field(default=None, repr=False, compare=False)

    titles: ClassVar = {"id": "image", "predicted_class": "predicted", "rank_percent": "rank", "probability": "p"}
    columns: ClassVar = ("id", "verdict", "predicted_class", "probability", "rank_percent", "reason")

    def __post_init__(self) -> None:
        if all(image.predicted_class is None for image in self.images):  # numbers where there are no names
            columns = tuple("predicted" if key == "predicted_class" else key for key in self.columns)
            object.__setattr__(self, "columns", columns)

    def __len__(self) -> int:
        return len(self.images)

    def top(self, count: int) -> "TrustReport":
        """The same report with the `count` least trusted images alone."""
        return replace(self, images=self.images[:count])

    def title(self) -> str:
        """How many images, and what orders them."""
        if len(self) == 1:
            return f"{self.name}: the least trusted of {self.total:,} images, by {words(self.order_by)}"
        return f"{self.name}: the {len(self):,} least trusted of {self.total:,} images, by {words(self.order_by)}"

    def records(self) -> list[dict[str, Any]]:
        """One row per image, the least trusted first."""
        return [image.record() for image in self.images]

    def cell(self, key: str, value: Any) -> str:
        """Shares in per cent, class names without their synonyms."""
        if key in ("probability", "rank_percent"):
            return percent(value if key == "probability" else value / 100)
        if key == "predicted_class" and value is not None:
            return str(value).partition(",")[0]
        return cell(value)

    def facts(self) -> dict[str, str]:
        """How many of the most trusted images are wrong, where there are labels."""
        return coverage_facts({words(self.order_by): self.errors_at_coverage})

    def findings(self) -> list[str]:
        """How many images have each verdict, and what that is worth."""
        counts = ", ".join(f"{count:,} {verdict}" for verdict, count in self.verdicts.items() if count)
        sentences = [f"Of {self.total:,} images: {counts}.", *(self.guard_findings or [_NO_GUARANTEE])]
        if count := len(self.skipped):
            reasons = [reason.rstrip(".") for _, reason in self.skipped[:_REASONS]]
            more = [f"and {count - _REASONS:,} more"] if count > _REASONS else []
            sentences.append(f"{count:,} could not be decoded and have no verdict: {'; '.join(reasons + more)}.")
        return sentences

    def _page(self) -> str:
        """Cards of at most 200 images, about 15 KB each; `top` makes them fewer."""
        return trust_page(self.top(_CARDS))

    def _html_body(self) -> str:
        """Cards with pictures, for a notebook."""
        return "".join(
            html_card(
                image.short_prediction,
                percent(image.probability),
                image.verdict,
                image.reason,
                good=_TONES[image.verdict] == "good",
                below=f"{image.id} · rank {percent(image.rank)}",
                picture="" if self.pictures is None else thumbnail_of(self.pictures, image.id),
            )
            for image in self.images[: self.text_rows]
        )


def least_trusted(
    table: Table,
    images: Any = None,
    *,
    top: int | None = 20,
    guard: Guard | None = None,
    scores: Mapping[str, Array | Score] | None = None,
) -> TrustReport:
    """The images of a table that should be trusted least, each with the reason.

    Args:
        table: Images with logits, such as `dubito.extract` returns; features let it see images unlike the others.
        images: Anything that dubito.open_images accepts: the images of the table, for pages and notebooks.
        top: Largest number of images; None for all of them.
        guard: A fitted guard, whose verdicts and reasons are used then.
        scores: By name, fitted scores or (n) uncertainties; the first orders the images. By default the softmax family.

    >>> table = Table(logit=[[4.0, 0.0], [0.1, 0.0]], id=["a.jpg", "b.jpg"], classes=["tench", "eel"])
    >>> [(one.id, one.verdict, one.reason) for one in least_trusted(table, top=1).images]
    [('b.jpg', 'look at it', 'ambiguous between tench (52 %) and eel (48 %)')]
    """
    check_rows(table, by="least_trusted")
    table.require("logit", by="least_trusted")
    if top is not None:
        check_number(top, "[1, inf)", by="least_trusted", what="top", whole=True, hint="20 is usual.")
    opened = None if images is None else open_images(images)
    ids = table.row_ids()
    if opened is not None:
        match_images(ids, opened, by="least_trusted")
    columns = {name: _column(one, table, name) for name, one in (scores or _softmax_scores()).items()}
    decisions = None if guard is None else guard.decide(table)
    if decisions is None:
        readings = _read_probabilities(table, next(iter(columns.values())).ranks)
    else:
        columns = {GUARD: _Column(decisions.uncertainty.numpy(), decisions.rank.numpy()), **columns}
        readings = [TrustVerdict(ACCEPT if one.accept else ABSTAIN, one.reason, one.rank) for one in decisions]
    order_by, first = next(iter(columns.items()))
    worst_first = [(one.verdict != ABSTAIN, -one.rank, -first.u[row], ids[row]) for row, one in enumerate(readings)]
    order = sorted(range(len(table)), key=worst_first.__getitem__)
    counts = Counter(one.verdict for one in readings)
    return TrustReport(
        name=table.name,
        model=table.provenance.model if table.provenance else None,
        total=len(table),
        order_by=order_by,
        verdicts={verdict: counts[verdict] for verdict in _TONES if verdict in counts},
        images=_ranked(table, order[:top], readings, columns),
        guard_findings=() if decisions is None else tuple(decisions.findings()),
        shifted=decisions is not None and decisions.shift.detected,
        **_errors(table, order),
        skipped=tuple(table.skipped),
        pictures=opened,
    )


def trust_page(
    report: TrustReport,
    *,
    title: str = "",
    lead: str = "",
    facts: Sequence[str] = (),
    summary: Summary | None = None,
    changes: Mapping[str, Mapping[str, Any]] = {},
) -> str:
    """A report as a page of cards.

    Args:
        report: The result of `least_trusted`.
        title: The heading.
        lead: The sentences below it.
        facts: Further facts.
        summary: What stands above the cards; by default findings, and the curve where there are labels.
        changes: By image, fields of its card that are different, such as its caption.
    """
    short = "/".join(report.name.rstrip("/").split("/")[-2:])  # where images lie on this machine is nobody's business
    shown = (
        "All images" if len(report) == report.total else f"The {len(report):,} least trusted of {report.total:,} images"
    )
    model = "the model" if report.model is None else report.model.rpartition(":")[2]
    return cards_page(
        title or f"Which images should {model} not be trusted on?",
        [replace(card, **changes.get(card.caption, {})) for card in cards(report)],
        lead=lead or f"{shown} of {short}, each with a verdict and the reason. The least trusted come first.",
        facts=(*([f"model {report.model}"] if report.model else []), f"{report.total:,} images", *facts),
        about={name: SCORE_MEANINGS[name] for name in report.images[0].scores if name in SCORE_MEANINGS},
        summary=summary or _summary(report),
        order="least trusted",
    )


class TrustVerdict(NamedTuple):
    """Verdict, reason and rank of one image."""

    verdict: str
    reason: str
    rank: float

    @property
    def tone(self) -> str:
        """How pages colour the verdict: "good", "fair" or "bad"."""
        return _TONES[self.verdict]


def read_probabilities(
    probability: Sequence[float],
    predicted: Sequence[int],
    classes: Sequence[str] | None,
    *,
    rank: float,
    rarity: float = math.nan,
) -> TrustVerdict:
    """What the model's own probabilities say about one image, where there is no guard.

    Args:
        probability: Of the most likely class and of the second.
        predicted: These two classes.
        classes: Names of the classes, if known.
        rank: The share of the other images that are less uncertain.
        rarity: Of an image unlike the others, the share of these that are nearer to their neighbours; else NaN.
    """
    top, name = percent(probability[0]), class_name(classes, predicted[0])
    rivals = rival_classes(classes, predicted, probability)
    if not math.isnan(rarity):
        return TrustVerdict(LOOK, unlike(1 - rarity, "other images"), max(rank, rarity))
    if rivals is not None:
        return TrustVerdict(LOOK, rivals, rank)
    if probability[0] < _HALF:
        return TrustVerdict(LOOK, f"the likeliest class, {name}, has only {top}", rank)
    verdict = CONFIDENT if probability[0] >= _SURE else FAIR
    return TrustVerdict(verdict, f"{top} {name}; more certain than {percent(1 - rank)} of the other images", rank)


class _Column(NamedTuple):
    """One score of every image, and its ranks."""

    u: Float64[np.ndarray, "n"]
    ranks: Float64[np.ndarray, "n"]


def _column(score: Array | Score, table: Table, name: str) -> _Column:
    u = uncertainty(score, table, by="least_trusted", name=name).double().numpy()
    return _Column(u, shares_below(u))


def _softmax_scores() -> dict[str, Score]:
    return {name: make_score(name) for name in SCORES}


def _read_probabilities(table: Table, ranks: Float64[np.ndarray, "n"]) -> list[TrustVerdict]:
    """Verdict, reason and rank of every image, without a guard."""
    rarity = _rarity(table)
    return [
        read_probabilities(*top, table.classes, rank=float(ranks[row]), rarity=float(rarity[row]))
        for row, top in enumerate(_top_two(table))
    ]


def _top_two(table: Table) -> Iterator[tuple[list[float], list[int]]]:
    """Probabilities and classes of the two most likely, row by row."""
    for batch in table.batches("logit"):
        probability, predicted = top_two(batch.logit)
        yield from zip(probability.tolist(), predicted.tolist(), strict=True)


def _rarity(table: Table) -> Float64[np.ndarray, "n"]:
    """Of images unlike the others, the share of these that are nearer to their neighbours; NaN for all the rest."""
    nothing = np.full(len(table), np.nan)
    if "feature" not in table or len(table) < _FEWEST:
        return nothing
    try:
        distance = neighbours_among(table, _NEIGHBOUR).score(table).numpy()
    except ValueRangeError:  # features that are all zero have no direction
        return nothing
    low, high = np.quantile(distance, (0.25, 0.75))
    return np.where(distance > high + _FENCE * (high - low), shares_below(distance), np.nan)


def _ranked(
    table: Table, rows: Sequence[int], readings: Sequence[TrustVerdict], columns: Mapping[str, _Column]
) -> tuple[RankedImage, ...]:
    chosen = table.select(*(name for name in ("id", "logit", "label") if name in table)).rows(torch.tensor(rows))
    labels = chosen.label.tolist() if has_model_labels(table) else [None] * len(rows)
    return tuple(
        RankedImage(
            name,
            **readings[row]._asdict(),
            predicted=predicted[0],
            predicted_class=table.classes[predicted[0]] if table.classes else None,
            probability=probability[0],
            scores={key: float(column.u[row]) for key, column in columns.items()},
            ranks={key: float(column.ranks[row]) for key, column in columns.items()},
            label=label,
            label_class=table.classes[label] if table.classes and label is not None else None,
        )
        for row, name, label, (probability, predicted) in zip(
            rows, table.row_ids(rows), labels, _top_two(chosen), strict=True
        )
    )


def _errors(table: Table, order: Sequence[int]) -> dict[str, Any]:
    """The error of the most trusted images, by their share of all; nothing without labels of the model's classes."""
    if not has_model_labels(table):
        return {}
    wrong, place = wrong_predictions(table, by="least_trusted")[torch.tensor(order)].flip(0), torch.arange(len(order))
    return {"errors_at_coverage": errors_at_coverage(place.double(), wrong), "curve": risk_coverage(place, wrong)}


def _summary(report: TrustReport) -> Summary:
    """The findings, beside the curve where there are labels."""
    remarks = [*(f"{name.capitalize()}: {text}." for name, text in report.facts().items()), *report.findings()]
    if report.curve is None:
        return Summary("", remarks=remarks)
    coverage, risk = (100 * values.numpy() for values in report.curve)
    # Of a handful of images, the error jumps; from there on, as many points as a line needs.
    first = min(len(risk) - 1, len(risk) // 20)
    places = np.unique(np.linspace(first, len(risk) - 1, min(len(risk), _DRAWN)).astype(int))
    drawn = Line(coverage[places].tolist(), risk[places].tolist(), name="most trusted images", colour="#d0591c")
    level = Line([0.0, 100.0], [float(risk[-1])] * 2, name="all images", dashed=True)
    drawing = lines(
        [level, drawn],
        x=Axis(0.0, 100.0),
        y=Axis(0.0, max(float(risk[places].max()), 1.0)),
        label=f"Errors from {risk[first]:.1f} % of the most trusted images to {risk[-1]:.1f} % of all.",
        x_ticks=(0.0, 20.0, 40.0, 60.0, 80.0, 100.0),
    )
    return Summary(
        "Errors among the accepted images, in %, by coverage, in %",
        remarks=remarks,
        drawing=drawing,
        small="the most trusted are accepted first; dashed: all images",
    )


def cards(report: TrustReport) -> list[Card]:
    """The images of a report as cards, with pictures where they are at hand."""
    row_of = {} if report.pictures is None else {name: row for row, name in enumerate(report.pictures.ids)}
    return [
        Card(
            image=_picture(report.pictures, row_of.get(image.id)),
            title=image.short_prediction,
            detail=percent(image.probability),
            caption=image.id,
            group=image.verdict,
            scores=image.scores,
            mark=_error(image),
            verdict=image.verdict,
            reason=image.reason,
            tone=_TONES[image.verdict],
            ranks=image.ranks,
        )
        for image in report.images
    ]


def _error(image: RankedImage) -> str:
    """That a prediction is wrong, where the label is known."""
    if image.label is None or image.label == image.predicted:
        return ""
    return f"wrong: {(image.label_class or f'class {image.label}').partition(',')[0]}"


def _picture(images: Images | None, row: int | None) -> Image.Image | None:
    """A small copy, so that many cards fit into memory; None for an image that is missing or cannot be read."""
    if images is None or row is None:
        return None
    try:
        return shrink(read_pixels(images, row, by="report"))
    except (BrokenImageError, ValueRangeError):  # a file that has changed, or a model input, which is no picture
        return None
