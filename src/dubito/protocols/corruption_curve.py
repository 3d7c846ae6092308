"""Does an uncertainty grow as images are corrupted? Blur, a grey box, zoom and noise, severity by severity.

Kirchhof et al., Pretrained Visual Uncertainties (2024), section 4.5 and Figure 6; the corruptions are those of
`dubito.data.corruptions` (the paper's were not released). For each corruption and score there are, at every severity s,
the median and the quartiles of u over the images, and two measures of monotonicity, both ours:

    rises    = how many steps s -> s' to the next severity raise the median of u
    Spearman = mean over images i of the rank correlation of s with u_i(s); 0 for an image whose u never changes

The first is about the images as a whole, the second about every image by itself; its interval is a bootstrap over
images. Every level has a cache of its own, so an interrupted run resumes; the clean images are run once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dubito.cache import extract
from dubito.cache.runner import bar
from dubito.data import open_images
from dubito.data.corruptions import CORRUPTIONS, Corrupted
from dubito.errors import TableError, ValueRangeError
from dubito.evaluate.evaluate import check_fitted_scores, uncertainties
from dubito.metrics import Interval, interval, mean
from dubito.models.load import as_classifier
from dubito.result import Axes, Result, axes, plain
from dubito.storage import to_place
from dubito.types import Classifier, Images, Json, Score
from dubito.validate import check_bootstrap, check_choice

SEVERITIES = (0, 1, 2, 3, 4, 5)


class CorruptionLevel(NamedTuple):
    """The quartiles of one score over all images, at one severity."""

    severity: int
    low: float
    median: float
    high: float


class CorruptionCurve(NamedTuple):
    """One score as one corruption grows.

    Attributes:
        corruption: Name of the corruption.
        score: Name of the score.
        levels: Quartiles, by rising severity.
        spearman: Mean over images of the rank correlation of severity and uncertainty.
    """

    corruption: str
    score: str
    levels: tuple[CorruptionLevel, ...]
    spearman: Interval

    @property
    def steps(self) -> int:
        """Number of steps from one severity to the next."""
        return len(self.levels) - 1

    @property
    def rises(self) -> int:
        """Number of steps that raise the median."""
        return sum(after.median > before.median for before, after in zip(self.levels, self.levels[1:], strict=False))


@final
@dataclass(frozen=True)
class CorruptionCurves(Result):
    """All scores on all corruptions.

    Attributes:
        name: Name of the images.
        rows: Number of images.
        severities: The severities that were run.
        curves: One curve for each score and corruption.
    """

    name: str
    rows: int
    severities: tuple[int, ...]
    curves: tuple[CorruptionCurve, ...]

    titles: ClassVar[Mapping[str, str]] = {"spearman": "Spearman"}
    naming: ClassVar = 2

    def curve(self, corruption: str, score: str) -> CorruptionCurve:
        """One of the curves."""
        for what, value in (("corruption", corruption), ("score", score)):
            known = dict.fromkeys(getattr(one, what) for one in self.curves)
            check_choice(value, known, by="CorruptionCurves.curve", what=what)
        return next(one for one in self.curves if (one.corruption, one.score) == (corruption, score))

    def title(self) -> str:
        """The images."""
        return f"{self.name}: {self.rows} images"

    def records(self) -> list[dict[str, Any]]:
        """One row for each score and corruption: the medians, and how they rise."""
        return [
            {"score": one.score, "corruption": one.corruption}
            | {f"median_at_{level.severity}": level.median for level in one.levels}
            | {"rises": f"{one.rises}/{one.steps}", "spearman": one.spearman}
            for one in self.curves
        ]

    def to_dict(self) -> Json:
        """Everything as plain values."""
        curves = [plain(one) | {"rises": one.rises, "steps": one.steps} for one in self.curves]
        return {**super().to_dict(), "curves": curves}

    def plot(self, ax: Axes | None = None, *, score: str | None = None) -> Axes:
        """The median of one score, by default the first, over severity; one line per corruption with its quartiles."""
        scores = list(dict.fromkeys(one.score for one in self.curves))
        chosen = scores[0] if score is None else score
        check_choice(chosen, scores, by="CorruptionCurves.plot", what="score")
        picture = axes(ax)
        for one in self.curves:
            if one.score == chosen:
                severity, low, median, high = zip(*one.levels, strict=True)
                (line,) = picture.plot(severity, median, marker="o", label=one.corruption)
                picture.fill_between(severity, low, high, color=line.get_color(), alpha=0.15)
        picture.set(xlabel="severity", ylabel=chosen, title=self.title(), xticks=self.severities)
        picture.legend(frameon=False)
        return picture


def corruption_curve(  # noqa: PLR0913 (one call that users type; everything after `to` is optional)
    model: Classifier | str,
    images: Any,
    scores: Mapping[str, Score],
    to: str | Path,
    *,
    corruptions: Sequence[str] = tuple(CORRUPTIONS),
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    confidence: float = 0.95,
    resamples: int = 1000,
    progress: bool = True,
    **extraction: Any,
) -> CorruptionCurves:
    """Run the model over the images at every severity, or open what was run before, and score each level.

    Args:
        model: A classifier from dubito.load or dubito.wrap, or a name, which is loaded.
        images: Whatever dubito.open_images accepts, as long as it yields pictures; labels are not used.
        scores: Fitted scores by name.
        to: Folder for one cache per level: `clean`, `blur-1`, `blur-2` and so on.
        corruptions: Names of the corruptions.
        severities: At least two rising severities, from 0 (clean) to 5.
        seed: Seed of the places of boxes and zooms, of the noise, and of the bootstrap.
        confidence: Confidence of the bootstrap intervals.
        resamples: Number of bootstrap resamples.
        progress: Whether to show a progress bar on a terminal.
        extraction: Further settings for dubito.extract, such as batch_size or workers.
    """
    check_bootstrap(by="corruption_curve", confidence=confidence, resamples=resamples, seed=seed)
    check_fitted_scores(scores, by="corruption_curve")
    opened = open_images(images)
    levels = _levels(opened, corruptions, severities, seed)
    model = as_classifier(model, by="corruption_curve")  # once for all levels
    bootstrap = partial(interval, mean, confidence=confidence, resamples=resamples, seed=seed)
    values: dict[str, dict[str, Float[Tensor, "n"]]] = {}
    ids: list[str] = []
    with bar(f"corruption_curve {opened.name}", len(opened) * len(levels), show=progress) as advance:
        for name, level in levels.items():
            table = extract(model, level, to_place(to) / name, label_space="own", progress=False, **extraction)
            ids = ids or list(table.id)
            if list(table.id) != ids:
                raise TableError(
                    f"corruption_curve: every level must have the same images; {table.name} has {len(table)}, the "
                    f"first level {len(ids)}. Look at the images that were skipped there."
                )
            values[name] = uncertainties(scores, table, by=f"corruption_curve ({name})")
            advance(len(opened))
    curves = []
    for score in scores:
        for corruption in corruptions:
            u = torch.stack([values[_level(corruption, severity)][score] for severity in severities], dim=1)
            quartiles = np.quantile(u.numpy(), (0.25, 0.5, 0.75), axis=0).T.tolist()
            rows = tuple(CorruptionLevel(severity, *row) for severity, row in zip(severities, quartiles, strict=True))
            curves.append(CorruptionCurve(corruption, score, rows, bootstrap(rank_correlations(u))))
    return CorruptionCurves(opened.name, len(ids), tuple(severities), tuple(curves))


def rank_correlations(u: Float[Tensor, "n s"]) -> Float[Tensor, "n"]:
    """The Spearman correlation of every row with its positions 0..s-1; 0 for a constant row."""
    steps = u.shape[1]
    above = (u[:, :, None] > u[:, None, :]).double() + (u[:, :, None] == u[:, None, :]).double() / 2
    ranks = above.sum(-1) - steps / 2  # mid ranks, minus their mean
    places = torch.arange(steps, dtype=torch.float64) - (steps - 1) / 2
    size = (ranks.square().sum(-1) * places.square().sum()).sqrt()
    return torch.where(size > 0, ranks @ places / size.clamp(min=1e-12), 0.0)


def _levels(images: Images, corruptions: Sequence[str], severities: Sequence[int], seed: int) -> dict[str, Images]:
    """The images of every level, by the name of its cache; the clean ones serve all corruptions."""
    if isinstance(corruptions, str) or not corruptions:
        known = ", ".join(CORRUPTIONS)
        raise ValueRangeError(
            f"corruption_curve: corruptions must be a list of {known}; got {corruptions!r}. Leave it out for all."
        )
    for corruption in corruptions:
        check_choice(corruption, CORRUPTIONS, by="corruption_curve", what="corruption")
    if len(severities) < 2 or list(severities) != sorted(set(severities) & set(SEVERITIES)):
        raise ValueRangeError(
            f"corruption_curve: severities must be at least two, rising, from 0 to {SEVERITIES[-1]}; got "
            f"{tuple(severities)}. Leave them out for all."
        )
    return {
        _level(corruption, severity): Corrupted(images, corruption, severity, seed=seed) if severity else images
        for corruption in corruptions
        for severity in severities
    }


def _level(corruption: str, severity: int) -> str:
    return f"{corruption}-{severity}" if severity else "clean"
