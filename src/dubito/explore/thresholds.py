"""What a threshold on a score costs, on the labelled images of the table: coverage, selective risk and its bound.

    accepted   images with u <= t                judged   those of them that have a label
    errors     judged ones that are wrong        risk     errors / judged
    bound      the largest error rate that this does not rule out (Clopper & Pearson, one-sided)

The bound is about one threshold that was fixed before. `risk_target` instead finds a threshold that keeps a risk with
a guarantee although it is chosen on these images, by the tests of `dubito.guard.thresholds`.
"""

import math

import numpy as np
from jaxtyping import Bool, Float32

from dubito.errors import GuardError
from dubito.guard.guarantee import Guarantee
from dubito.metrics import proportion_bound
from dubito.types import Json

CONFIDENCE = 0.95
_STEPS = 1000


def threshold_curve(
    u: Float32[np.ndarray, "n"],
    wrong: Bool[np.ndarray, "n"],
    labelled: Bool[np.ndarray, "n"],
    *,
    at: float = math.nan,
    confidence: float = CONFIDENCE,
) -> Json:
    """At most 1,000 thresholds from strict to lax, and what each accepts.

    Args:
        u: The score of every image of the table; infinite ones are never accepted.
        wrong: Which predictions are wrong, where that is known.
        labelled: Where it is known.
        at: A threshold that must be among them: the largest score up to it.
        confidence: Confidence of the bound.
    """
    order = np.argsort(u, kind="stable")[: np.isfinite(u).sum()]
    ordered = u[order]
    last = np.append(np.nonzero(np.diff(ordered))[0], len(ordered) - 1)[: len(ordered)]  # of equal scores
    steps = last[np.unique(np.linspace(0, len(last) - 1, min(len(last), _STEPS)).astype(int))] if len(last) else last
    asked = int(np.searchsorted(ordered, np.float32(at), side="right")) - 1 if not math.isnan(at) else -1
    if asked >= 0:
        steps = np.unique(np.append(steps, asked))
    curve: Json = {
        "thresholds": ordered[steps].astype(float).tolist(),
        "accepted": (steps + 1).tolist(),
        "errors": None,
        "judged": None,
        "bound": None,
        "rows": len(u),
        "labelled": int(labelled.sum()),
        "confidence": confidence,
        "words": "Without labels of the model's classes, nobody knows which predictions are wrong.",
    }
    if labelled.any():
        errors, judged = (np.cumsum(flags[order])[steps].tolist() for flags in (wrong & labelled, labelled))
        bound = [proportion_bound(e, k, confidence) if k else 1.0 for e, k in zip(errors, judged, strict=True)]
        curve |= {"errors": errors, "judged": judged, "bound": bound, "words": _words(confidence)}
    return curve


def risk_target(
    u: Float32[np.ndarray, "n"],
    wrong: Bool[np.ndarray, "n"],
    labelled: Bool[np.ndarray, "n"],
    *,
    risk: float,
    confidence: float = CONFIDENCE,
) -> Json:
    """The threshold that keeps a risk, tested on the labelled images; GuardError says what is feasible instead."""
    guarantee = Guarantee("risk", risk, confidence)
    outcomes = u[labelled].astype(np.float64), wrong[labelled]
    if not labelled.any():
        raise GuardError("a risk needs labels of the model's classes, and these images have none. Add labels first.")
    try:
        threshold = guarantee.threshold(outcomes)
    except GuardError as error:
        raise GuardError(f"{error} {guarantee.feasible(outcomes, len(u))}".strip()) from error
    # The largest score that is accepted: in float32, the threshold itself might accept the next one, too.
    accepted = u[u.astype(np.float64) <= threshold.value]
    words = (
        f"{guarantee.sentence(threshold.of)} This holds if you chose this score before you looked at these images: to "
        f"choose among scores as well, fit a guard."
    )
    return {"threshold": float(accepted.max()), "accepted": len(accepted), "errors": threshold.errors, "words": words}


def _words(confidence: float) -> str:
    return (
        f"With confidence {100 * confidence:g} %, the error rate is below the bound, for one threshold that was fixed "
        f"before. A risk target finds a threshold whose guarantee holds although it is chosen here."
    )
