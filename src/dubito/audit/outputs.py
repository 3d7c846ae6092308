"""What features and logits themselves give away: NaN, a saturated softmax, dead features, one answer for everything."""

from collections import Counter

from jaxtyping import Float, Int
from torch import Tensor

from dubito.audit.finding import Finding, NotChecked, Outcome, Severity, counted, listed, percent
from dubito.audit.understand import FINITE, form_finding, form_of
from dubito.types import Json

SATURATED, DEAD, ONE_ANSWER, READABLE = "saturated softmax", "dead features", "one answer for all", "unreadable images"
_LISTED = 100
_FEWEST, _FEWEST_ZERO = 20, 200
_TIED, _MANY_LOST = 0.01, 0.05
_DEAD, _MANY_DEAD = 0.01, 0.5
_MANY_BROKEN = 0.05
_FEWEST_OTHERS, _RARE = 7, 0.1


def check_readable(broken: list[tuple[str, str]], n: int) -> Outcome:
    """Images that cannot be decoded."""
    if not broken:
        return []
    severity: Severity = "wrong" if len(broken) >= _MANY_BROKEN * n else "suspicious"
    evidence: Json = {"unreadable": len(broken), "images": n, "ids": [name for name, _ in broken[:_LISTED]]}
    what = f"{len(broken)} of {counted(n, 'image')} cannot be read, such as {broken[0][0]}: {broken[0][1]}"
    repair = "Replace them, or take them out of the set; dubito leaves them out."
    return [Finding(READABLE, severity, what, repair, evidence)]


def check_finite(logit: Float[Tensor, "n c"], feature: Float[Tensor, "n d"], ids: list[str]) -> Outcome:
    """NaN and infinity in what the model says."""
    bad_logit, bad_feature = ~logit.isfinite().all(-1), ~feature.isfinite().all(-1)
    bad = [ids[row] for row in (bad_logit | bad_feature).nonzero().flatten().tolist()]
    if not bad:
        return []
    what = f"Logits or features of {len(bad)} of {counted(len(ids), 'image')} hold NaN or infinity: {listed(bad)}."
    repair = "Look at these images; if they are fine, run the model in float32: half precision overflows at 65,504."
    evidence: Json = {
        "logits": int(bad_logit.sum()),
        "features": int(bad_feature.sum()),
        "images": len(ids),
        "ids": bad[:_LISTED],
    }
    return [Finding(FINITE, "wrong", what, repair, evidence)]


def check_logits(logit: Float[Tensor, "n c"]) -> Outcome:
    """Logits that have been through a softmax already."""
    form = form_of(logit)
    return [] if form is None else [form_finding(form, logit)]


def check_saturation(logit: Float[Tensor, "n c"]) -> Outcome:
    """Largest probabilities that are exactly one, and so have lost their order.

    In float32 that takes a logit 17 above the others, which well-trained networks reach: suspicious. In float64 it
    takes 37, which comes of a factor on the logits: wrong.
    """
    if len(logit) == 0 or logit.shape[1] < 2:
        return NotChecked("it takes images, and more than one class")
    top, exact = logit.float().softmax(-1).amax(-1), logit.double().softmax(-1).amax(-1)
    share, lost = (float((largest == 1).double().mean()) for largest in (top, exact))
    counts = Counter(top.tolist())
    tied = sum(count for count in counts.values() if count > 1) / len(top)
    if share < _TIED or int((top == 1).sum()) < 2:
        return []
    largest = float(logit.abs().max())
    what = (
        f"The largest probability is exactly 1 in float32 for {percent(share)} of the images (in float64 for "
        f"{percent(lost)}), and {percent(tied)} share theirs with another image: max-probability cannot rank them "
        f"(logits reach {largest:.3g})."
    )
    repair = (
        "Rank by dubito.ScaledEntropy, Energy, MaxLogit or Temperature(...), which work on logits, or take log_softmax in "
        "float64 for the entropy; if logits were multiplied by a factor, leave it out."
    )
    severity: Severity = "wrong" if lost >= _MANY_LOST else "suspicious"
    evidence: Json = {
        "exactly_one": share,
        "exactly_one_in_float64": lost,
        "tied": tied,
        "largest_logit": largest,
        "images": len(top),
    }
    return [Finding(SATURATED, severity, what, repair, evidence)]


def check_features(feature: Float[Tensor, "n d"]) -> Outcome:
    """Columns that are the same for every image; with few images, a feature that is zero may merely be rare."""
    n, d = feature.shape
    if n < _FEWEST:
        return NotChecked(f"it takes {_FEWEST} images; got {n}")
    constant = feature.amax(0) == feature.amin(0)
    zero = constant & (feature[0] == 0)
    columns = constant.nonzero().flatten().tolist()
    if len(columns) < _DEAD * d:
        return []
    what = (
        f"{len(columns)} of {d} features ({percent(len(columns) / d)}) are the same for all {n} images, "
        f"{int(zero.sum())} of them zero: columns {listed(columns)}."
    )
    alarming = len(columns)
    if n < _FEWEST_ZERO and bool(zero.any()):
        alarming -= int(zero.sum())
        what += f" Those that are zero are rarely active or dead; it takes {_FEWEST_ZERO} images to tell."
    repair = (
        "Check that all weights were loaded (a missing or renamed layer leaves such columns), and that no layer before "
        "the head zeroes them; for a density, such a column varies by its regularisation alone."
    )
    severity: Severity = "note"
    if alarming >= _DEAD * d:
        severity = "wrong" if alarming >= _MANY_DEAD * d else "suspicious"
    evidence: Json = {
        "constant": len(columns),
        "zero": int(zero.sum()),
        "features": d,
        "share": len(columns) / d,
        "columns": columns[:_LISTED],
    }
    return [Finding(DEAD, severity, what, repair, evidence)]


def check_answers(logit: Float[Tensor, "n c"], labels: Int[Tensor, "n"] | None) -> Outcome:
    """All images in one class, though their labels say otherwise or nobody says anything.

    Good models miss rare classes. Of images outside the most common label, a model that gets half of them right misses
    six at once in one case of 64: so few are passed over. Up to a tenth of all images are suspicious, more are wrong.
    Which class is answered does not matter here: whether it is the right one is for other checks.
    """
    n, c = logit.shape
    if n < _FEWEST or c < 2:
        return NotChecked(f"it takes {_FEWEST} images and more than one class; got {n} images and {c} classes")
    answers = set(logit.argmax(-1).tolist())
    if len(answers) > 1:
        return []
    [answer] = answers
    what = f"All {n} images are put into class {answer}."
    repair = "Check that the weights were loaded, the scale of the inputs, and that the head was trained."
    evidence: Json = {"class": answer, "images": n}
    if labels is None:
        return [Finding(ONE_ANSWER, "suspicious", what, repair, evidence)]
    others = n - max(Counter(labels.tolist()).values())
    if others == 0:
        return []
    if others < _FEWEST_OTHERS:
        return NotChecked(f"too few images have another label than the most common one, {others} of {n}")
    rare = others <= _RARE * n
    what = f"{what[:-1]}, though {others} have another label than the most common one."
    if rare:
        repair = f"If these classes are rare in the training too, give more images of them to tell. Otherwise: {repair}"
    severity: Severity = "suspicious" if rare else "wrong"
    return [Finding(ONE_ANSWER, severity, what, repair, {**evidence, "other_labels": others})]
