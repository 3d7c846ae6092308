"""The causes of a diagnosis in plain words: what each costs, what it means, and what to do about it."""

from typing import TYPE_CHECKING

from dubito.explain._balanced import points

if TYPE_CHECKING:
    from dubito.explain.causes_result import Causes

CAUSES = ("saturation", "extrapolation", "overlap")
TOGETHER, REST, ALL = "saturation and extrapolation", "extrapolation and overlap", "all causes"
"""Where one score of the chain is worse than the one before, the parts on both sides of it cannot be told apart."""
TITLES = {
    "saturation": "saturation",
    "extrapolation": "extrapolation with aleatoric overlap",
    "overlap": "feature overlap",
    TOGETHER: "saturation and extrapolation together",
    REST: "extrapolation and overlap together",
}
"""As sentences call them."""
LITTLE = 0.005
"""Of AUROC: less than half a point is nothing to explain."""
_MANY_CLASSES = 100


def verdict(causes: "Causes") -> str:
    """Which cause is the largest, and whether that is more than chance."""
    missed = 1 - causes.auroc["entropy"].value
    if missed < LITTLE:
        return f"There is little to explain: the entropy misses {points(missed)} points of AUROC."
    found = f"The entropy misses {points(missed)} points of AUROC."
    if causes.lead is None:
        return f"{found} Neither cooling nor the density does better, so the causes cannot be told apart."
    first, second, *_ = causes.ranked
    found += f" The largest part is {TITLES[first]}, {causes.parts[first]}"
    lead = f"it is ahead of {TITLES[second]} by {causes.lead}"
    if causes.dominant:
        return f"{found}; {lead}, beyond the interval."
    return f"{found}, but {lead}: within the interval, so neither can be called the main cause."


def findings(causes: "Causes", known: str, classes: int, known_saturated: float) -> list[str]:
    """A few sentences for each of the three causes."""
    return [
        _saturation(causes, known, classes, known_saturated),
        _extrapolation(causes, known),
        _overlap(causes, known),
    ]


def _saturation(causes: "Causes", known: str, classes: int, known_saturated: float) -> str:
    part = causes.causes["saturation"]
    shares = (
        f"In float32, the largest probability is exactly 1 for {points(known_saturated)} % of {known} and "
        f"{points(causes.saturated)} % of {causes.name}."
    )
    if part.high < 0:
        why = (
            f"0.1 x logits flatten the softmax of {classes} classes so far that the many small logits outweigh the "
            f"large ones"
            if classes >= _MANY_CLASSES
            else "it lets all small logits count, and here they tell less than the large ones"
        )
        return (
            f"Saturation: {part} points, negative. Cooling makes it worse: {why}. So saturation is not the trouble: "
            f"stay with the entropy. {shares}"
        )
    if part.low <= 0:
        return f"Saturation costs nothing that could be told from zero, {part} points. {shares}"
    return (
        f"Saturation costs {part} points: so many probabilities lie so close to 1 that their order is lost or turned "
        f"around. The score `scaled_entropy`, the entropy of 0.1 x logits, gets these points back, with the same model. {shares}"
    )


def _extrapolation(causes: "Causes", known: str) -> str:
    title, part = "Extrapolation with aleatoric overlap", causes.causes["extrapolation"]
    cooled = causes.causes["saturation"].high < 0 < part.value
    if cooled:
        part = causes.together
        found = (
            f"{title}: {causes.causes['extrapolation']} points, which first of all make up for what cooling lost. "
            f"Against the entropy itself, the density brings {part} points"
        )
    else:
        found = f"{title}{': ' if part.high < 0 else ' costs '}{part} points"
    rival = "entropy" if cooled else "softmax"
    if part.high < 0:
        return (
            f"{found}, negative. The density is a worse guide than the {rival}: it has too few training images for its "
            f"covariances, or the features are not Gaussian. Give it more training images (train=..., --train "
            f"CACHE) or another covariance (--covariance); in Python also space='log', Density.tune on known images, "
            f"or density=Neighbours()."
        )
    if part.low <= 0:
        return f"{found}, which cannot be told from zero: the {rival} is as good a guide as the density."
    return (
        f"{found}: images of {causes.name} lie off the features of {known}, yet the softmax is sure of them, or it "
        f"doubts ambiguous images of {known} as much. The score `density` gets these points back, on the same features."
    )


def _overlap(causes: "Causes", known: str) -> str:
    part = causes.causes["overlap"]
    if part.value < LITTLE:
        return f"Feature overlap costs next to nothing, {part} points: the features tell {causes.name} from {known}."
    found = (
        f"Feature overlap costs {part} points: features of {causes.name} lie where those of {known} lie. No score on "
        f"these features can repair it, as far as the density is a good one. It takes other features: another model, "
        f"an earlier layer, or training on more kinds of images."
    )
    if _poor(causes):
        best = max(causes.auroc, key=lambda score: causes.auroc[score].value)
        least = points(1 - causes.auroc[best].value)
        found += f" Here the density is a poor one: `{best}` misses {least} points only, so overlap is at most that."
    if causes.auroc["density"].high < 0.5:
        found += (
            f" D is even below 50 %: images of {causes.name} lie closer to the training features than those of {known} "
            f"do, as plain or faint images often do."
        )
    return found


def _poor(causes: "Causes") -> bool:
    """Whether the softmax beats the density beyond the interval."""
    return causes.causes["extrapolation"].high < 0 or causes.together.high < 0
