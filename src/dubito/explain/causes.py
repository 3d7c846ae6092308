"""What saturation, extrapolation and feature overlap cost on one set of out-of-distribution images, with findings.

    A = AUROC(max_probability)   B = AUROC(entropy)   C = AUROC(scaled_entropy)   D = AUROC(density)

    cause 1, saturation                             C - B
    cause 2, extrapolation with aleatoric overlap   D - C
    cause 3, feature overlap                        1 - D        together: 1 - B, all that the entropy misses

Pearce et al. 2021 (arXiv 2106.04972), section 6 and Table 1, on balanced sets (`metrics.balanced_auroc`). The caption
of Table 1 calls cause 1 dominant; its numbers say cause 3, and its 0.7 % for CIFAR-10 is 10.7 %.

Parts may be negative: with a thousand classes, C is far below B, and cause 2 makes up for that; with a poor density, D
is below C, and cause 3 is too large. So the main cause is looked for among steps that do not fall beyond their
intervals: where C < B, D - B and 1 - D; where D < C, C - B and 1 - C; where C < B and D < B, none can be separated.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from dubito.metrics.bootstrap import BalancedAuroc, percentiles

SCORES = ("max_probability", "entropy", "scaled_entropy", "density")
CAUSES = ("saturation", "extrapolation", "overlap")
TOGETHER, REST, ALL = "saturation and extrapolation", "extrapolation and overlap", "all causes"
"""Where one score of the chain is worse than the one before, the parts on both sides of it cannot be separated."""
_LITTLE = 0.005
"""Of AUROC: less than half a point is nothing to explain."""
_NAMES = {
    "saturation": "saturation",
    "extrapolation": "extrapolation with aleatoric overlap",
    "overlap": "feature overlap",
    TOGETHER: "saturation and extrapolation together",
    REST: "extrapolation and overlap together",
}
"""The parts as sentences call them."""


class Estimate(NamedTuple):
    """A mean over balanced draws, its bootstrap interval, and the standard deviation over the draws."""

    value: float
    low: float
    high: float
    spread: float

    def __str__(self) -> str:
        return f"{points(self.value)} [{points(self.low)}, {points(self.high)}]"


def points(share: float) -> str:
    """A share in per cent, one decimal, without a minus zero.

    >>> points(0.8571), points(-0.0001)
    ('85.7', '0.0')
    """
    return f"{round(100 * share, 1) + 0.0:.1f}"


class Causes(NamedTuple):
    """What each cause costs on one OOD set, or on average over several.

    Attributes:
        name: The name of the OOD set.
        rows: How many images of either side a balanced set has.
        auroc: By score of SCORES, the AUROC of OOD against in-distribution images.
        causes: By name (saturation, extrapolation, overlap), a difference of AUROCs, which may be negative.
        together: Saturation and extrapolation as one, D - B.
        parts: What is compared to find the main cause: the causes, or several as one where they cannot be separated.
        lead: By how much the largest part exceeds the second; None if there is only one.
        saturated: The share of the OOD images whose largest probability is exactly 1.0 in float32.
    """

    name: str
    rows: int
    auroc: dict[str, Estimate]
    causes: dict[str, Estimate]
    together: Estimate
    parts: dict[str, Estimate]
    lead: Estimate | None
    saturated: float

    @property
    def ranked(self) -> list[str]:
        """The parts, the largest first."""
        return sorted(self.parts, key=lambda part: -self.parts[part].value)

    @property
    def dominant(self) -> str | None:
        """The largest part if its lead is beyond the interval, else None."""
        return self.ranked[0] if self.lead is not None and self.lead.low > 0 else None


def cause_costs(name: str, results: Sequence[BalancedAuroc], saturated: Sequence[float], confidence: float) -> Causes:
    """From one set, or the mean over several, draw by draw and resample by resample."""
    drawn = _with_parts(np.mean([result.drawn for result in results], axis=0))
    resampled = _with_parts(np.mean([result.resampled for result in results], axis=0))

    def of(column: str, less: str | None = None) -> Estimate:
        of_draws, of_resamples = (part[column] - (0 if less is None else part[less]) for part in (drawn, resampled))
        low, high = percentiles(of_resamples, confidence).tolist()
        spread = float(of_draws.std(ddof=1)) if len(of_draws) > 1 else 0.0
        return Estimate(float(of_draws.mean()), low, high, spread)

    causes, together = {cause: of(cause) for cause in CAUSES}, of(TOGETHER)
    # Where a score is worse than the one before it, the causes on both sides of it count as one.
    if causes["saturation"].high < 0:
        compared: tuple[str, ...] = (ALL,) if together.high < 0 else (TOGETHER, "overlap")
    else:
        compared = ("saturation", REST) if causes["extrapolation"].high < 0 else CAUSES
    first, *others = sorted(compared, key=lambda part: -float(drawn[part].mean()))
    return Causes(
        name=name,
        rows=min(result.rows for result in results),
        auroc={score: of(score) for score in SCORES},
        causes=causes,
        together=together,
        parts={part: of(part) for part in compared},
        lead=of(first, less=others[0]) if others else None,
        saturated=float(np.mean(saturated)),
    )


def _with_parts(aurocs: Float64[np.ndarray, "b 4"]) -> dict[str, Float64[np.ndarray, "b"]]:
    """By name, the AUROCs and the parts that follow from them."""
    a, b, c, d = aurocs.T
    parts = {"saturation": c - b, "extrapolation": d - c, "overlap": 1 - d, TOGETHER: d - b, REST: 1 - c, ALL: 1 - b}
    return {**dict(zip(SCORES, (a, b, c, d), strict=True)), **parts}


def verdict(causes: Causes) -> str:
    """Which cause is the largest, and whether that is more than chance."""
    missed = 1 - causes.auroc["entropy"].value
    if missed < _LITTLE:
        return f"There is little to explain: the entropy misses {points(missed)} points of AUROC."
    text = f"The entropy misses {points(missed)} points of AUROC."
    if causes.lead is None:
        return f"{text} Neither the scaled entropy nor the density does better, so the causes cannot be separated."
    first, second, *_ = causes.ranked
    text += f" The largest part is {_NAMES[first]}, {causes.parts[first]}"
    lead = f"it exceeds {_NAMES[second]} by {causes.lead}"
    if causes.dominant:
        return f"{text}; {lead}, beyond the interval."
    return f"{text}, but {lead}: within the interval, so neither can be called the main cause."


def cause_findings(causes: Causes, name: str, classes: int, saturated: float) -> list[str]:
    """The verdict, then a sentence or two about each cause.

    Args:
        causes: Of one OOD set.
        name: The name of the in-distribution images.
        classes: The number of classes.
        saturated: The share of the in-distribution images whose largest probability is exactly 1.0 in float32.
    """
    saturation = _saturation(causes, name, classes, saturated)
    return [verdict(causes), saturation, _extrapolation(causes, name), _overlap(causes, name)]


def _saturation(causes: Causes, name: str, classes: int, saturated: float) -> str:
    part = causes.causes["saturation"]
    shares = (
        f"In float32, the largest probability is exactly 1 for {points(saturated)} % of {name} and "
        f"{points(causes.saturated)} % of {causes.name}."
    )
    if part.high < 0:
        return (
            f"Saturation: {part} points, negative. Scaling the logits down makes it worse: it lets all small logits "
            f"count, and those of {classes} classes outweigh the large ones. Saturation is not the problem: stay "
            f"with the entropy. {shares}"
        )
    if part.low <= 0:
        return f"Saturation costs nothing distinguishable from zero, {part} points. {shares}"
    return (
        f"Saturation costs {part} points: so many probabilities lie so close to 1 that their order is lost or turned. "
        f"The score `scaled_entropy`, the entropy of 0.1 x logits, recovers these points with the same model. {shares}"
    )


def _extrapolation(causes: Causes, name: str) -> str:
    title, part = "Extrapolation with aleatoric overlap", causes.causes["extrapolation"]
    scaled_worse = causes.causes["saturation"].high < 0 < part.value
    if scaled_worse:
        part = causes.together
        text = (
            f"{title}: {causes.causes['extrapolation']} points, which first of all make up for what scaling lost. "
            f"Compared with the entropy itself, the density gains {part} points"
        )
    else:
        text = f"{title}{': ' if part.high < 0 else ' costs '}{part} points"
    rival = "entropy" if scaled_worse else "softmax"
    if part.high < 0:
        return (
            f"{text}, negative. The density is a worse guide than the {rival}: it has too few training images for its "
            f"covariances, or the features are not Gaussian. Fit it on more training images or with another "
            f"covariance, or pass a density of your own, such as Density(space='log'), one tuned with Density.tune, "
            f"or Neighbours()."
        )
    if part.low <= 0:
        return f"{text}, indistinguishable from zero: the {rival} is as good a guide as the density."
    return (
        f"{text}: images of {causes.name} lie away from the features of {name}, but the softmax is confident, or as "
        f"uncertain about ambiguous images of {name}. The score `density` recovers these points on the same features."
    )


def _overlap(causes: Causes, name: str) -> str:
    part = causes.causes["overlap"]
    if part.value < _LITTLE:
        return f"Feature overlap costs next to nothing, {part} points: the features separate {causes.name} from {name}."
    text = (
        f"Feature overlap costs {part} points: features of {causes.name} lie where those of {name} lie. No score on "
        f"these features can repair that, as far as the density is a good one. It takes other features: another model, "
        f"an earlier layer, or training on more kinds of images."
    )
    if causes.causes["extrapolation"].high < 0 or causes.together.high < 0:
        best = max(causes.auroc, key=lambda score: causes.auroc[score].value)
        least = points(1 - causes.auroc[best].value)
        text += f" Here the density is a poor one: `{best}` misses only {least} points, so overlap is at most that."
    if causes.auroc["density"].high < 0.5:
        text += (
            f" D is even below 50 %: images of {causes.name} lie closer to the training features than those of {name} "
            f"do, as plain or faint images often do."
        )
    return text
