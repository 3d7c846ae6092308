"""Train mode and the like: outputs that are random, or depend on the other images of a batch.

A dubito classifier always runs its module in eval mode and restores the mode afterwards, so dubito's own numbers do not
suffer from train mode. A user's own loop does: BatchNorm then normalises by the batch, dropout zeroes at random. The
audit measures how much, on a copy; nothing about the user's module changes.
"""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dubito.audit.finding import Finding, NotChecked, Outcome, counted, listed, percent
from dubito.audit.outputs import eval_output, own_output
from dubito.cache.probe_runner import is_random, logit_change
from dubito.threads import seeded
from dubito.types import Classifier, Json

TRAIN, STEADY = "train mode", "predictions that change by themselves"
_MOST = 32
_CHANGED = 1e-2
"""Of the logits' own spread, by train mode or by the batch: kernels for other batches may round differently, too."""


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
    repair = (
        "Call module.eval() before you run it yourself, and again after every epoch of training; dubito does so for "
        "each pass, so its own numbers are correct."
    )
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
        with seeded(seed, _devices(model)):
            passes.append(model.logits(model.features(part)).cpu())
    first, again, half = passes
    change, random = logit_change(first, again), is_random(first, again)
    by_batch = logit_change(first[: len(half)], half)
    if not random and by_batch <= _CHANGED:
        return []
    what = f"Even in eval mode, logits differ from pass to pass, by {percent(change)} of their spread."
    repair = "Look for dropout that is always on, such as F.dropout(x) without training=self.training."
    if not random:
        what = f"An image's logits depend on the others in its batch: they change by {by_batch:.2f} of their spread."
        repair = "Give BatchNorm running statistics (track_running_stats=True), or remove it from the forward pass."
    evidence: Json = {"change_between_passes": change, "change_with_the_batch": by_batch, "images": len(x)}
    return [Finding(STEADY, "wrong", what, repair, evidence)]


def _compare(model: Classifier, x: Float[Tensor, "n ..."]) -> tuple[float, float, float] | NotChecked:
    """Of a copy in its current mode: change against eval mode, between two passes, and share of other classes."""
    if len(x) < 2:
        return NotChecked("the module is in train mode, but two images are needed to measure the effect")
    passes = []
    try:
        expected = eval_output(model.module, x).double().cpu()
        duplicate = copy.deepcopy(model.module)
        for seed in (1, 2):
            with seeded(seed, _devices(model)), torch.no_grad():
                passes.append(own_output(duplicate, x).double().cpu())
    except Exception as error:  # a module that cannot be copied, or that trains with other arguments than it is run
        return NotChecked(f"the module is in train mode, but a copy of it cannot be run ({type(error).__name__})")
    first, again = passes
    flipped = float((first.argmax(-1) != expected.argmax(-1)).double().mean())
    return logit_change(expected, first), logit_change(first, again), flipped


def _differs(part: nn.Module) -> bool:
    """Whether a layer itself behaves differently in train mode."""
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.p > 0
    if type(part).__name__.startswith("Drop"):  # timm's DropPath and DropBlock2d
        return bool(getattr(part, "drop_prob", 1.0))
    return isinstance(part, nn.modules.batchnorm._BatchNorm | nn.RReLU)


def _devices(model: Classifier) -> set[torch.device]:
    return {model.device, *(value.device for value in (*model.module.parameters(), *model.module.buffers()))}
