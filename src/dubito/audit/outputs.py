"""What features and logits themselves reveal: no logits at all, NaN, a saturated softmax, dead features, one class.

`dubito.wrap` refuses a module whose output is not that of its classifying layer. At the first batch the audit looks at
the output itself, says what it is, and goes on with the module wrapped as it should be.
"""

from collections import Counter
from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor, nn

from dubito.audit.finding import Finding, NotChecked, Outcome, Severity, counted, listed, percent
from dubito.errors import ModelError, RefusedInputsError
from dubito.models import wrap
from dubito.models.frozen import frozen
from dubito.models.outputs import output_of
from dubito.table import form_of
from dubito.types import Classifier, Json

LOGITS, FINITE = "probabilities in place of logits", "NaN and infinity"
SATURATED, DEAD, ONE_CLASS, READABLE = "saturated softmax", "dead features", "one class for all", "unreadable images"
_LISTED = 100
_FEWEST, _FEWEST_ZERO = 20, 200
_TIED, _MANY_LOST, _MANY_BROKEN = 0.01, 0.05, 0.05
_DEAD, _MANY_DEAD = 0.01, 0.5
_FEWEST_OTHERS, _RARE = 7, 0.1


def check_readable(broken: list[tuple[int, str]], ids: Sequence[str]) -> Outcome:
    """Images that cannot be decoded, as rows with the reason."""
    if not broken:
        return []
    names, n = [ids[row] for row, _ in broken], len(ids)
    evidence: Json = {"unreadable": len(broken), "images": n, "ids": names[:_LISTED]}
    what = f"{len(broken)} of {counted(n, 'image')} cannot be read, such as {names[0]}: {broken[0][1]}"
    repair = "Replace them, or remove them from the set; dubito leaves them out."
    return [Finding(READABLE, "wrong" if len(broken) >= _MANY_BROKEN * n else "suspicious", what, repair, evidence)]


def check_finite(logit: Float[Tensor, "n c"], feature: Float[Tensor, "n d"], ids: list[str]) -> Outcome:
    """NaN and infinity in the model's outputs."""
    bad_logit, bad_feature = ~logit.isfinite().all(-1), ~feature.isfinite().all(-1)
    bad = [ids[row] for row in (bad_logit | bad_feature).nonzero().flatten().tolist()]
    if not bad:
        return []
    what = f"Logits or features of {len(bad)} of {counted(len(ids), 'image')} contain NaN or infinity: {listed(bad)}."
    repair = "Look at these images; if they are fine, run the model in float32: half precision overflows at 65,504."
    counts = {"logits": int(bad_logit.sum()), "features": int(bad_feature.sum()), "images": len(ids)}
    evidence: Json = {**counts, "ids": bad[:_LISTED]}
    return [Finding(FINITE, "wrong", what, repair, evidence)]


def check_saturation(logit: Float[Tensor, "n c"]) -> Outcome:
    """Largest probabilities that are exactly one and so have lost their order.

    In float32 that takes a logit 17 above the others, which well-trained networks reach: suspicious. In float64 it
    takes 37, which comes from a factor on the logits: wrong.
    """
    if len(logit) == 0 or logit.shape[1] < 2:
        return NotChecked("needs images and more than one class")
    top, exact = logit.float().softmax(-1).amax(-1), logit.double().softmax(-1).amax(-1)
    share, lost = (float((largest == 1).double().mean()) for largest in (top, exact))
    tied = sum(count for count in Counter(top.tolist()).values() if count > 1) / len(top)
    if share < _TIED or int((top == 1).sum()) < 2:
        return []
    largest = float(logit.abs().max())
    what = (
        f"The largest probability is exactly 1 in float32 for {percent(share)} of the images (in float64 for "
        f"{percent(lost)}), and {percent(tied)} share theirs with another image: max-probability cannot rank them "
        f"(logits reach {largest:.3g})."
    )
    repair = (
        "Rank by a score of the logits (dubito.scores.ScaledEntropy, Energy, MaxLogit, Temperature), or compute the "
        "entropy from log_softmax in float64; if logits were multiplied by a factor, remove it."
    )
    evidence: Json = {"exactly_one": share, "exactly_one_in_float64": lost, "tied": tied, "largest_logit": largest}
    evidence["images"] = len(top)
    return [Finding(SATURATED, "wrong" if lost >= _MANY_LOST else "suspicious", what, repair, evidence)]


def check_features(feature: Float[Tensor, "n d"]) -> Outcome:
    """Columns that are the same for every image; with few images, a feature that is zero may merely be rare."""
    n, d = feature.shape
    if n < _FEWEST:
        return NotChecked(f"needs {_FEWEST} images; got {n}")
    constant = feature.amax(0) == feature.amin(0)
    zero = constant & (feature[0] == 0)
    columns, zeros = constant.nonzero().flatten().tolist(), int(zero.sum())
    if len(columns) < _DEAD * d:
        return []
    what = (
        f"{len(columns)} of {d} features ({percent(len(columns) / d)}) are the same for all {n} images, "
        f"{zeros} of them zero: columns {listed(columns)}."
    )
    alarming = len(columns)
    if n < _FEWEST_ZERO and zeros:
        alarming -= zeros
        what += f" Those that are zero may be rarely active rather than dead; {_FEWEST_ZERO} images would show which."
    repair = (
        "Check that all weights were loaded (a missing or renamed layer leaves such columns), and that no layer before "
        "the head zeroes them; for a density, such a column varies by its regularisation alone."
    )
    severity: Severity = "note"
    if alarming >= _DEAD * d:
        severity = "wrong" if alarming >= _MANY_DEAD * d else "suspicious"
    evidence: Json = {"constant": len(columns), "zero": zeros, "features": d, "share": len(columns) / d}
    return [Finding(DEAD, severity, what, repair, evidence | {"columns": columns[:_LISTED]})]


def check_one_class(logit: Float[Tensor, "n c"], labels: Int[Tensor, "n"] | None) -> Outcome:
    """All images in one class, although their labels differ or are not known.

    Good models miss rare classes. Of images outside the most common label, a model that gets half of them right misses
    six at once in one case of 64: so few are ignored. Up to a tenth of all images are suspicious, more are wrong. Which
    class is predicted does not matter here: whether it is the right one is for other checks.
    """
    n, c = logit.shape
    if n < _FEWEST or c < 2:
        return NotChecked(f"needs {_FEWEST} images and more than one class; got {n} images and {c} classes")
    predicted = set(logit.argmax(-1).tolist())
    if len(predicted) > 1:
        return []
    [only] = predicted
    what = f"All {n} images are classified as class {only}."
    repair = "Check that the weights were loaded, that the inputs are scaled correctly, and that the head was trained."
    evidence: Json = {"class": only, "images": n}
    if labels is None:
        return [Finding(ONE_CLASS, "suspicious", what, repair, evidence)]
    others = n - max(Counter(labels.tolist()).values())
    if others == 0:
        return []
    if others < _FEWEST_OTHERS:
        return NotChecked(f"too few images have another label than the most common one: {others} of {n}")
    rare = others <= _RARE * n
    what = f"{what[:-1]}, although {others} have another label than the most common one."
    if rare:
        repair = f"If these classes are rare in the training data too, audit more images of them. Otherwise: {repair}"
    evidence["other_labels"] = others
    return [Finding(ONE_CLASS, "suspicious" if rare else "wrong", what, repair, evidence)]


def understand(model: Classifier, x: Float[Tensor, "n ..."]) -> tuple[Classifier | None, list[Finding]]:
    """Compute the first features; where the model refuses, look at what its module returns.

    Returns the classifier to go on with, None if there is none, and what was wrong with the original one.
    """
    try:
        model.features(x)
    except RefusedInputsError:  # then it returns nothing
        raise
    except ModelError as error:
        refusal = error
    else:
        return model, []
    try:
        output = eval_output(model.module, x)
    except ModelError:
        raise refusal from None
    finite = output.isfinite().all(-1)
    if not bool(finite.any()):
        bad = [name for name, value in model.module.named_parameters() if not bool(value.isfinite().all())]
        where = f"They are already in {counted(len(bad), 'weight tensor')}: {listed(bad)}."
        where = where if bad else "The weights are finite."
        what = f"All outputs of the first {counted(len(output), 'image')} contain NaN or infinity. {where}"
        repair = "Load the weights again, or check the scale of the inputs and half precision."
        return None, [Finding(FINITE, "wrong", what, repair, {"rows": len(output), "weights": bad})]
    form, usable = form_of(output[finite]), x[finite.to(x.device)]
    if form is None:
        if bool(finite.all()):
            raise refusal
        model.features(usable)
        return model, []
    findings = check_form(output[finite])
    repaired = wrap(model.module, transform=model.transform, classes=model.classes, output=form, name=model.name)
    try:
        repaired.features(usable)
    except ModelError:
        return None, findings
    return repaired, findings


def check_form(rows: Float[Tensor, "n c"]) -> list[Finding]:
    """Logits that have been through a softmax already."""
    form, values = form_of(rows), rows.double()
    if form is None:
        return []
    low, high = float(values.min()), float(values.max())
    if form == "probabilities":
        total = values.sum(-1)
        seen = f"lie in {low:.3g}..{high:.3g} and sum to one: they are probabilities"
        cost = "A softmax of probabilities is nearly flat, so every score sees nearly the same uncertainty everywhere."
    else:
        total = values.exp().sum(-1)
        seen = f"reach up to {high:.3g} and their exponentials sum to one: they are log-probabilities"
        cost = "Their energy is zero for every image, and the largest of them is not a logit."
    evidence: Json = {"form": form, "rows": len(rows), "lowest": low, "highest": high,
                      "sums": [float(total.min()), float(total.max())]}  # fmt: skip
    repair = (
        f'Wrap the module with dubito.wrap(module, ..., output="{form}"), which takes the logits before the softmax; '
        f"or remove the softmax from the module."
    )
    return [Finding(LOGITS, "wrong", f"The outputs of {counted(len(rows), 'image')} {seen}. {cost}", repair, evidence)]


def eval_output(module: nn.Module, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n c"]:
    """What the module itself returns in eval mode; it is left unchanged."""
    with frozen(module):
        return own_output(module, x)


def own_output(module: nn.Module, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n c"]:
    """What the module returns in its current mode; ModelError unless that is one row per image."""
    like = next((value for value in module.parameters() if value.is_floating_point()), x)
    return output_of(module(x.to(like.device, like.dtype, copy=True)), len(x), type(module).__name__)
