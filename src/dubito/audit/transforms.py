"""Wrong normalisation or channel order: is the model clearly better with other inputs than its transform gives?

With labels, an alternative wins if it is right on more of the same images: McNemar's exact test, corrected for the
number of alternatives, and a gain of at least two points. Without labels nobody knows what is right. Then it must be
surer on most images by far, and its answers must tell more (H(mean p) - mean H(p)): inputs that are far too large make
a model sure of one class for everything, which tells nothing. Its features must be about as long as before, because
longer ones make any network surer. That is reported as suspicious, never as wrong.
"""

from jaxtyping import Bool, Int
from torch import Tensor

from dubito.audit.finding import Finding, NotChecked, Outcome, percent
from dubito.audit.sample import Answers, Sample
from dubito.audit.significance import below, binomial_tail, paired_p
from dubito.types import Json

TRANSFORM = "wrong normalisation or channel order"
_GAIN, _ALPHA = 0.02, 0.01
_SURER, _MOST_IMAGES, _TELLS_MORE, _ALPHA_UNLABELLED = 0.05, 0.6, 0.25, 1e-4
_LONGER = 2.0


def check_transform(sample: Sample, labels: Int[Tensor, "n"] | None) -> Outcome:
    """Compare the own transform with the alternatives, by accuracy if there are labels."""
    own, *others = sample.ways
    if not others:
        return NotChecked("inputs are not colour images")
    usable = sample.finite
    if int(usable.sum()) == 0:
        return NotChecked("no image has finite logits")
    return _by_accuracy(own, others, labels, usable) if labels is not None else _by_doubt(own, others, usable)


def _by_accuracy(own: Answers, others: list[Answers], labels: Int[Tensor, "n"], usable: Bool[Tensor, "n"]) -> Outcome:
    mine = (own.predicted == labels)[usable]
    best: tuple[float, float, Answers] | None = None
    for other in others:
        theirs = (other.predicted == labels)[usable]
        better, worse = int((theirs & ~mine).sum()), int((mine & ~theirs).sum())
        p, gain = paired_p(better, worse, tests=len(others)), (better - worse) / len(mine)
        if gain >= _GAIN and p < _ALPHA and (best is None or gain > best[0]):
            best = gain, p, other
    if best is None:
        return []
    gain, p, winner = best
    before = float(mine.double().mean())
    what = (
        f"With {winner.way.name} instead of its own transform, accuracy is {percent(before + gain)} instead of "
        f"{percent(before)} on the same {len(mine)} images (McNemar's exact test, {below(p)})."
    )
    evidence: Json = {
        "better": winner.way.name,
        "accuracy": before,
        "accuracy_then": before + gain,
        "p": p,
        "alternatives": _figures([own, *others], labels, usable),
    }
    return [Finding(TRANSFORM, "wrong", what, winner.way.repair, evidence)]


def _by_doubt(own: Answers, others: list[Answers], usable: Bool[Tensor, "n"]) -> Outcome:
    mine = own.confidence[usable]
    best: tuple[float, Answers] | None = None
    for other in others:
        theirs = other.confidence[usable]
        surer = int((theirs > mine).sum())
        p = len(others) * binomial_tail(surer, len(mine), 0.5)
        gain, told = float((theirs - mine).mean()), other.information - own.information
        clear = gain >= _SURER and told >= _TELLS_MORE and surer >= _MOST_IMAGES * len(mine) and p < _ALPHA_UNLABELLED
        # Larger features make a network surer without telling more: then it is its temperature that has changed.
        clear = clear and 1 / _LONGER <= other.norm / max(own.norm, 1e-30) <= _LONGER
        if clear and (best is None or told > best[0]):
            best = told, other
    if best is None:
        return []
    told, winner = best
    before, then = float(mine.mean()), float(winner.confidence[usable].mean())
    what = (
        f"With {winner.way.name} instead of its own transform, the model is surer (mean largest probability {then:.2f} "
        f"instead of {before:.2f}) and its answers tell {told:.2f} nats more. Labels would decide it."
    )
    evidence: Json = {
        "better": winner.way.name,
        "confidence": before,
        "confidence_then": then,
        "information_gain": told,
        "alternatives": _figures([own, *others], None, usable),
    }
    return [Finding(TRANSFORM, "suspicious", what, winner.way.repair, evidence)]


def _figures(ways: list[Answers], labels: Int[Tensor, "n"] | None, usable: Bool[Tensor, "n"]) -> Json:
    """By transform: accuracy, mean largest probability, information, mean length of a feature."""
    return {
        answers.way.name: {
            "accuracy": None if labels is None else float((answers.predicted == labels)[usable].double().mean()),
            "confidence": float(answers.confidence[usable].mean()),
            "information": answers.information,
            "feature_norm": answers.norm,
        }
        for answers in ways
    }
