"""What outputs reveal: no logits at all, NaN, a saturated softmax, dead features, one class, train mode, randomness.

    probabilities      p >= 0,  sum_y p_y = 1
    log-probabilities  log sum_y exp(l_y) = 0

`dubito.wrap` refuses a module whose output is not that of its classifying layer. At the first batch the audit looks at
the output itself, says what it is, and goes on with the module wrapped as it should be.

A dubito classifier always runs its module in eval mode and restores the mode afterwards, so dubito's own numbers do not
suffer from train mode. A user's own loop does: BatchNorm then normalises by the batch, dropout zeroes at random. The
audit measures how much, on a copy; nothing about the user's module changes.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dubito.audit.finding import Finding, NotChecked, Outcome, Severity, counted, listed, percent
from dubito.errors import ModelError, RefusedInputsError
from dubito.models import wrap
from dubito.models.wrap import frozen, kept_buffers, output_of
from dubito.types import Classifier, Json

LOGITS, FINITE = "probabilities in place of logits", "NaN and infinity"
SATURATED, DEAD, ONE_CLASS, READABLE = "saturated softmax", "dead features", "one class for all", "unreadable images"
TRAIN, STEADY = "train mode", "predictions that change by themselves"
Form = Literal["probabilities", "log_probabilities"]
_TOLERANCE, _LISTED = 1e-3, 100
_FEWEST, _FEWEST_ZERO = 20, 200
_TIED, _MANY_LOST, _MANY_BROKEN = 0.01, 0.05, 0.05
_DEAD, _MANY_DEAD = 0.01, 0.5
_FEWEST_OTHERS, _RARE = 7, 0.1
_MOST, _CHANGED = 32, 1e-2
"""Images that are run again; and a change, of the logits' own spread: far above rounding, far below any fault's."""


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


def check_train_mode(model: Classifier, x: Float[Tensor, "n ..."]) -> Outcome:
    """A module in train mode, or with layers that were left in it."""
    if not any(part.training for part in model.module.modules()):
        return []
    layers = [name for name, part in model.module.named_modules() if part.training and _differs(part)]
    x = x[:_MOST]
    changes = _compare(model, x)
    if isinstance(changes, NotChecked):
        return changes
    moved, between, flipped = changes
    if moved < _CHANGED and between < _CHANGED:
        return []
    parts = f"{counted(len(layers), 'layer')} ({listed(layers, 3)})" if layers else "functions"
    what = (
        f"The module is in train mode, with {parts} that behave differently there. Run as it is, its logits differ "
        f"from eval mode by {moved:.2f} of their spread and from pass to pass by {between:.2f}, and {percent(flipped)} "
        f"of {counted(len(x), 'image')} get another class."
    )
    repair = "Call module.eval() before you run it yourself, also after every epoch; dubito does so for each pass."
    evidence: Json = {"layers": len(layers), "names": layers[:20], "change_from_eval": moved}
    evidence |= {"change_between_passes": between, "other_predictions": flipped, "images": len(x)}
    return [Finding(TRAIN, "wrong", what, repair, evidence)]


def check_steady(model: Classifier, x: Float[Tensor, "n ..."]) -> Outcome:
    """In eval mode, the same image must get the same logits: in every pass, and in any batch."""
    x = x[:_MOST]
    if len(x) < 2:
        return NotChecked("needs two images")
    passes = []
    for seed, part in ((1, x), (2, x), (1, x[: len(x) // 2])):
        with forked(model, seed):
            passes.append(model.logits(model.features(part)).double().cpu())
    first, again, half = passes
    random, by_batch = _change(first, again), _change(first[: len(half)], half)
    if max(random, by_batch) <= _CHANGED:
        return []
    what = f"Even in eval mode, logits differ from pass to pass, by {random:.2f} of their spread."
    repair = "Look for dropout that is always on, such as F.dropout(x) without training=self.training."
    if random <= _CHANGED:
        what = f"An image's logits depend on the others in its batch: they change by {by_batch:.2f} of their spread."
        repair = "Give BatchNorm running statistics (track_running_stats=True), or remove it from the forward pass."
    evidence: Json = {"change_between_passes": random, "change_with_the_batch": by_batch, "images": len(x)}
    return [Finding(STEADY, "wrong", what, repair, evidence)]


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


def form_of(logits: Float[Tensor, "n c"]) -> Form | None:
    """What rows that should be logits really are; None for logits."""
    if len(logits) == 0 or logits.shape[1] < 2:
        return None
    rows = logits.double()
    if bool((rows >= 0).all()) and bool((rows.sum(-1) - 1).abs().max() < _TOLERANCE):
        return "probabilities"
    if bool(rows.logsumexp(-1).abs().max() < _TOLERANCE):
        return "log_probabilities"
    return None


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
    repair = f'Wrap it with dubito.wrap(module, ..., output="{form}"), or remove the softmax from the module.'
    return [Finding(LOGITS, "wrong", f"The outputs of {counted(len(rows), 'image')} {seen}. {cost}", repair, evidence)]


def eval_output(module: nn.Module, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n c"]:
    """What the module itself returns in eval mode; it is left unchanged."""
    with frozen(module), kept_buffers(module):
        return _own_output(module, x)


@contextmanager
def forked(model: Classifier, seed: int | None = None) -> Iterator[None]:
    """Restore the random state of the CPU and of the model's devices afterwards; with a seed, start from it.

    Nothing else is seeded: torch.manual_seed would reach all devices of the machine.
    """
    devices = _devices(model)
    indices = (device.index for device in devices if device.type == "cuda")
    cuda = sorted({torch.cuda.current_device() if index is None else index for index in indices})
    mps = any(device.type == "mps" for device in devices)
    kept = torch.mps.get_rng_state() if mps else None
    try:
        with torch.random.fork_rng(cuda):
            if seed is not None:
                for generator in (torch.default_generator, *(torch.cuda.default_generators[one] for one in cuda)):
                    generator.manual_seed(seed)
                if mps:
                    torch.mps.manual_seed(seed)
            yield
    finally:
        if kept is not None:
            torch.mps.set_rng_state(kept)


def _own_output(module: nn.Module, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n c"]:
    """What the module returns in its current mode; ModelError unless that is one row per image."""
    like = next((value for value in module.parameters() if value.is_floating_point()), x)
    return output_of(module(x.to(like.device, like.dtype, copy=True)), len(x), type(module).__name__)


def _compare(model: Classifier, x: Float[Tensor, "n ..."]) -> tuple[float, float, float] | NotChecked:
    """Of a copy in its current mode: change against eval mode, between two passes, and share of other classes."""
    if len(x) < 2:
        return NotChecked("the module is in train mode, but two images are needed to measure the effect")
    passes = []
    try:
        expected = eval_output(model.module, x).double().cpu()
        duplicate = copy.deepcopy(model.module)
        for seed in (1, 2):
            with forked(model, seed), torch.no_grad():
                passes.append(_own_output(duplicate, x).double().cpu())
    except Exception as error:  # a module that cannot be copied, or that trains with other arguments than it is run
        return NotChecked(f"the module is in train mode, but a copy of it cannot be run ({type(error).__name__})")
    first, again = passes
    flipped = float((first.argmax(-1) != expected.argmax(-1)).double().mean())
    return _change(expected, first), _change(first, again), flipped


def _differs(part: nn.Module) -> bool:
    """Whether a layer itself behaves differently in train mode."""
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.p > 0
    if type(part).__name__.startswith("Drop"):  # timm's DropPath and DropBlock2d
        return bool(getattr(part, "drop_prob", 1.0))
    return isinstance(part, nn.modules.batchnorm._BatchNorm | nn.RReLU)


def _change(before: Float[Tensor, "n c"], after: Float[Tensor, "n c"]) -> float:
    """Mean change of a logit, as a share of the logits' standard deviation."""
    spread = float(before.std())
    change = float((after - before).abs().mean())
    return change / spread if spread > 0 else change


def _devices(model: Classifier) -> set[torch.device]:
    return {model.device, *(value.device for value in (*model.module.parameters(), *model.module.buffers()))}
