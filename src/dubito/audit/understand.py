"""Can the model's answers be taken as logits at all? Asked at the first batch, before anything else is.

    probabilities      p >= 0,  sum_y p_y = 1
    log-probabilities  log sum_y exp(l_y) = 0

`dubito.wrap` refuses a module whose output is not that of its classifying layer. The audit looks at the output itself,
says what it is, and goes on with the module wrapped as it should be.
"""

from dataclasses import dataclass
from typing import Any, Literal, final

from jaxtyping import Float
from torch import Tensor, nn

from dubito.audit.finding import Finding, counted, listed
from dubito.errors import ModelError, RefusedInputsError
from dubito.models import wrap
from dubito.models.frozen import KeptBuffers, frozen
from dubito.types import Classifier, Json

LOGITS, FINITE = "probabilities in place of logits", "NaN and infinity"
Form = Literal["probabilities", "log_probabilities"]
_TOLERANCE = 1e-3


@final
@dataclass(frozen=True)
class Understood:
    """The classifier to go on with, None if there is none, and what was wrong with the one that came."""

    model: Classifier | None
    findings: tuple[Finding, ...] = ()


def understood(model: Classifier, x: Float[Tensor, "n ..."]) -> Understood:
    """Ask for the first features; where the model refuses, look at what its module returns."""
    try:
        model.features(x)
    except RefusedInputsError:  # there is nothing that it returns
        raise
    except ModelError as error:
        refusal = error
    else:
        return Understood(model)
    try:
        answer = eval_output(model.module, x)
    except ModelError:
        raise refusal from None
    finite = answer.isfinite().all(-1)
    if not bool(finite.any()):
        return Understood(None, (_all_broken(model.module, len(answer)),))
    form = form_of(answer[finite])
    if form is None and bool(finite.all()):
        raise refusal
    repaired = model if form is None else _repaired(model, form)
    findings = () if form is None else (form_finding(form, answer[finite]),)
    try:
        repaired.features(x[finite.to(x.device)])
    except ModelError:
        if form is None:
            raise
        return Understood(None, findings)
    return Understood(repaired, findings)


def form_of(logits: Float[Tensor, "n c"]) -> Form | None:
    """What rows are that should be logits; None for logits."""
    if len(logits) == 0 or logits.shape[1] < 2:
        return None
    rows = logits.double()
    if bool((rows >= 0).all()) and bool((rows.sum(-1) - 1).abs().max() < _TOLERANCE):
        return "probabilities"
    if bool(rows.logsumexp(-1).abs().max() < _TOLERANCE):
        return "log_probabilities"
    return None


def form_finding(form: Form, rows: Float[Tensor, "n c"]) -> Finding:
    """The finding for rows that are no logits."""
    values = rows.double()
    low, high = float(values.min()), float(values.max())
    if form == "probabilities":
        total = values.sum(-1)
        seen = f"lie in {low:.3g}..{high:.3g} and sum to one: they are probabilities"
        cost = "A softmax of probabilities is nearly flat, so every score sees the same faint doubt everywhere."
    else:
        total = values.exp().sum(-1)
        seen = f"reach up to {high:.3g} and their exponentials sum to one: they are log-probabilities"
        cost = "Their energy is zero for every image, and the largest of them is no logit."
    evidence: Json = {"form": form, "rows": len(rows), "lowest": low, "highest": high,
                      "sums": [float(total.min()), float(total.max())]}  # fmt: skip
    repair = (
        f'Wrap the module with dubito.wrap(module, ..., output="{form}"), which takes the logits before the softmax; '
        f"or leave the softmax out of the module."
    )
    return Finding(LOGITS, "wrong", f"The outputs of {counted(len(rows), 'image')} {seen}. {cost}", repair, evidence)


def eval_output(module: nn.Module, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n c"]:
    """What the module itself returns in eval mode; it is left as it was."""
    with frozen(module):
        buffers = KeptBuffers(module)
        try:
            return output_of(module, x)
        finally:
            buffers.restore()


def output_of(module: nn.Module, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n c"]:
    """What the module returns in the mode that it is in; ModelError unless that is one row per image."""
    like = next((value for value in module.parameters() if value.is_floating_point()), x)
    out: Any = module(x.to(like.device, like.dtype, copy=True))
    answer = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if not isinstance(answer, Tensor) or answer.dim() != 2:
        raise ModelError(
            f"{type(module).__name__} must return (n, classes). Wrap a module that returns the logits alone."
        )
    return answer


def _repaired(model: Classifier, form: Form) -> Classifier:
    return wrap(model.module, transform=model.transform, classes=model.classes, output=form, name=model.name)


def _all_broken(module: nn.Module, n: int) -> Finding:
    bad = [name for name, value in module.named_parameters() if not bool(value.isfinite().all())]
    where = (
        f" It is in {counted(len(bad), 'weight tensor')} already: {listed(bad)}." if bad else " The weights are finite."
    )
    return Finding(
        FINITE,
        "wrong",
        f"All outputs of the first {counted(n, 'image')} hold NaN or infinity.{where}",
        "Load the weights again, or look at the scale of the inputs and at half precision.",
        {"rows": n, "weights": bad},
    )
