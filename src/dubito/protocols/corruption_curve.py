"""Does an uncertainty grow as images are made worse? Blur, a grey box, zoom and noise, step by step.

Kirchhof et al., Pretrained Visual Uncertainties (2024), section 4.5 and Figure 6; the steps are those of
`dubito.data.deteriorate` (the paper's were not released). For each kind and score there is, at every severity s, the
median and the quartiles of u over the images, and two figures of monotonicity, both ours:

    rises    = how many steps s -> s' of the ladder raise the median of u
    Spearman = mean over images i of the rank correlation of s with u_i(s); 0 for an image whose u never changes

The first asks about the images as a whole, the second about every image by itself. Its interval is a bootstrap over
images. Every step is a cache of its own, so that a ladder goes on where it was stopped; clean images are run once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dubito.cache import extract
from dubito.cache.progress import bar
from dubito.data import open_images
from dubito.data.deteriorate import DETERIORATIONS
from dubito.data.deteriorated import Deteriorated
from dubito.errors import TableError, ValueRangeError
from dubito.evaluate.uncertainties import check_fitted_scores, uncertainties
from dubito.metrics import Interval, interval
from dubito.result import aligned, cell
from dubito.table import Table
from dubito.types import Classifier, Images, Json, Score

SEVERITIES = (0, 1, 2, 3, 4, 5)
CLEAN = "clean"


@final
@dataclass(frozen=True)
class CorruptionLevel:
    """The quartiles of one score over all images, at one severity."""

    severity: int
    low: float
    median: float
    high: float


@final
@dataclass(frozen=True)
class CorruptionCurve:
    """One score as one deterioration grows.

    Attributes:
        kind: The deterioration.
        score: The score's name.
        rungs: By rising severity.
        spearman: Mean over images of the rank correlation of severity and uncertainty.
    """

    kind: str
    score: str
    rungs: tuple[CorruptionLevel, ...]
    spearman: Interval

    @property
    def steps(self) -> int:
        """How many steps the ladder has."""
        return len(self.rungs) - 1

    @property
    def rises(self) -> int:
        """How many of them raise the median."""
        return sum(after.median > before.median for before, after in zip(self.rungs, self.rungs[1:], strict=False))


@final
@dataclass(frozen=True)
class Ladder:
    """All scores on all deteriorations: print it, or take it as JSON.

    Attributes:
        name: The images.
        rows: How many of them.
        severities: The steps.
        climbs: One for each score and kind.
    """

    name: str
    rows: int
    severities: tuple[int, ...]
    climbs: tuple[CorruptionCurve, ...]

    def climb(self, kind: str, score: str) -> CorruptionCurve:
        """One of them."""
        return next(one for one in self.climbs if (one.kind, one.score) == (kind, score))

    def to_json(self) -> Json:
        """Plain numbers."""
        return {
            "images": self.name,
            "rows": self.rows,
            "severities": list(self.severities),
            "climbs": [
                asdict(one) | {"spearman": one.spearman._asdict(), "rises": one.rises, "steps": one.steps}
                for one in self.climbs
            ],
        }

    def lines(self) -> list[list[str]]:
        """A header and one line for each score and kind, as text cells: the medians, and how they rise."""
        header = ["score", "kind", *(f"median at {severity}" for severity in self.severities), "rises", "Spearman"]
        body = [
            [
                one.score,
                one.kind,
                *(cell(rung.median) for rung in one.rungs),
                f"{one.rises}/{one.steps}",
                cell(one.spearman),
            ]
            for one in self.climbs
        ]
        return [header, *body]

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {self.rows} images", *aligned(self.lines())])


def corruption_curve(  # noqa: PLR0913 (one call that users type; everything after `to` is optional)
    model: Classifier,
    images: Any,
    scores: Mapping[str, Score],
    to: str | Path,
    *,
    kinds: Sequence[str] = tuple(DETERIORATIONS),
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
    progress: bool = True,
    **extraction: Any,
) -> Ladder:
    """Run the model over the images at every step, or open what was run before, and score each step.

    Args:
        model: From dubito.load or dubito.wrap.
        images: Whatever dubito.open_images takes, as long as it gives pictures; labels are not used.
        scores: Fitted scores by name.
        to: A folder, which gets one cache a step: `clean`, `blur-1`, `blur-2` and so on.
        kinds: Which deteriorations.
        severities: Rising, at least two, from 0 (clean) to 5.
        seed: Of the places of boxes and zooms, of the noise, and of the bootstrap.
        confidence: Of the bootstrap intervals.
        resamples: Of the bootstrap.
        progress: Show one bar when a terminal is watching.
        extraction: Further settings for dubito.extract, such as batch_size or workers.
    """
    check_fitted_scores(scores, by="corruption_curve")
    _check_steps(kinds, severities)
    opened = open_images(images)
    steps = _steps(opened, kinds, severities, seed)
    bootstrap = partial(interval, _mean, confidence=confidence, resamples=resamples, seed=seed)
    found: dict[str, dict[str, Float[Tensor, "n"]]] = {}
    ids: list[str] = []
    with bar(f"corruption_curve {opened.name}", len(opened) * len(steps), show=progress) as advance:
        for name, step in steps.items():
            table = extract(model, step, Path(to) / name, label_space="own", progress=False, **extraction)
            ids = _same_images(ids, table)
            found[name] = uncertainties(scores, table, by=f"corruption_curve ({name})")
            advance(len(opened))
    climbs = [
        _climb(kind, score, severities, [found[_step(kind, severity)][score] for severity in severities], bootstrap)
        for score in scores
        for kind in kinds
    ]
    return Ladder(opened.name, len(ids), tuple(severities), tuple(climbs))


def _steps(images: Images, kinds: Sequence[str], severities: Sequence[int], seed: int) -> dict[str, Images]:
    """Every set of images to run, by the name of its cache; the clean ones serve all kinds."""
    return {
        _step(kind, severity): Deteriorated(images, kind, severity, seed=seed) if severity else images
        for kind in kinds
        for severity in severities
    }


def _step(kind: str, severity: int) -> str:
    return f"{kind}-{severity}" if severity else CLEAN


def _climb(
    kind: str, score: str, severities: Sequence[int], steps: Sequence[Tensor], bootstrap: Any
) -> CorruptionCurve:
    u = torch.stack(list(steps), dim=1)
    quartiles = np.quantile(u.numpy(), (0.25, 0.5, 0.75), axis=0).T.tolist()
    rungs = tuple(CorruptionLevel(severity, *row) for severity, row in zip(severities, quartiles, strict=True))
    return CorruptionCurve(kind, score, rungs, bootstrap(rank_correlations(u)))


def rank_correlations(u: Float[Tensor, "n s"]) -> Float[Tensor, "n"]:
    """Of every row, the Spearman correlation with its position 0..s-1; 0 for a constant row."""
    steps = u.shape[1]
    above = (u[:, :, None] > u[:, None, :]).double() + (u[:, :, None] == u[:, None, :]).double() / 2
    ranks = above.sum(-1) - steps / 2  # mid ranks, minus their mean
    places = torch.arange(steps, dtype=torch.float64) - (steps - 1) / 2
    size = (ranks.square().sum(-1) * places.square().sum()).sqrt()
    return torch.where(size > 0, ranks @ places / size.clamp(min=1e-12), 0.0)


def _same_images(before: list[str], table: Table) -> list[str]:
    """The ids, or TableError: steps are compared image by image."""
    ids = [str(name) for name in table.id]
    if before and ids != before:
        raise TableError(
            f"corruption_curve: every step must have the same images; {table.name} has {len(ids)}, the first step "
            f"{len(before)}. Look at the images that were skipped there."
        )
    return ids


def _check_steps(kinds: Sequence[str], severities: Sequence[int]) -> None:
    unknown = [kind for kind in kinds if kind not in DETERIORATIONS]
    if unknown or not kinds or isinstance(kinds, str):
        raise ValueRangeError(
            f"corruption_curve: kinds must be a list of {', '.join(DETERIORATIONS)}; got {kinds!r}. Choose among those."
        )
    allowed = [severity for severity in severities if severity in SEVERITIES]
    if len(severities) < 2 or allowed != sorted(set(severities)):
        raise ValueRangeError(
            f"corruption_curve: severities must be at least two, rising, from 0 to {SEVERITIES[-1]}; got {tuple(severities)}. "
            f"Leave them out for all."
        )


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
