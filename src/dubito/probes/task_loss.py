"""The task loss of every image: what its logits cost, compared with its label or another target.

    cross_entropy   -log softmax(logit)[y]                        y (n) classes
                    -sum_c y_c log softmax(logit)_c               y (n,c) shares
    bce             -mean_c y_c log s_c + (1 - y_c) log(1 - s_c)  y (n,c) in 0..1, s = sigmoid(logit)
    callable        f(logit (n,c), target (n,...)) -> (n)

A row that is mixed from two images (CutMix, MixUp) has the loss w L(y) + (1 - w) L(y').
"""

from typing import Any, get_args

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from dubito.choices import KnownLoss
from dubito.errors import ValueRangeError
from dubito.types import TaskLoss

Mixed = tuple[Shaped[Tensor, "n ..."], Float[Tensor, "n"]]
"""The target of the other image, and the weight of the own one."""


def task_loss(
    loss: KnownLoss | TaskLoss, logit: Float[Tensor, "n c"], target: Shaped[Tensor, "n ..."], mixed: Mixed | None = None
) -> Float[Tensor, "n"]:
    """The loss of every row, by name or by a callable."""
    of = _KNOWN[loss] if isinstance(loss, str) else _checked(loss)
    values = of(logit, target.to(logit.device))
    if mixed is None:
        return values
    other, weight = mixed[0].to(logit.device), mixed[1].to(values)
    return weight * values + (1 - weight) * of(logit, other)


def cross_entropy(logit: Float[Tensor, "n c"], target: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n"]:
    """Of classes (n), or of shares of the classes (n,c)."""
    check_target("cross_entropy", target, logit.shape[1])
    return F.cross_entropy(logit, target.to(logit) if target.dim() > 1 else target.long(), reduction="none")


def bce(logit: Float[Tensor, "n c"], target: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n"]:
    """Binary cross-entropy with logits, averaged over classes: several labels per image."""
    check_target("bce", target, logit.shape[1])
    return F.binary_cross_entropy_with_logits(logit, target.to(logit), reduction="none").mean(1)


_KNOWN: dict[str, TaskLoss] = {"cross_entropy": cross_entropy, "bce": bce}


def check_task_loss(loss: object) -> None:
    """Raise ValueRangeError for anything but a known name or a callable."""
    if loss not in get_args(KnownLoss) if isinstance(loss, str) else not callable(loss):
        raise ValueRangeError(
            f"task_loss must be {' or '.join(map(repr, get_args(KnownLoss)))}, or a callable of logits (n, c) and "
            f"targets (n, ...); got {loss!r}. Choose one."
        )


def check_target(loss: KnownLoss | TaskLoss, target: Shaped[Tensor, "n ..."], classes: int) -> None:
    """Raise ValueRangeError for targets that a known loss cannot be computed with; a callable checks its own."""
    if not isinstance(loss, str):
        return
    shares = target.shape[1:] == (classes,) and bool(((target >= 0) & (target <= 1)).all())  # NaN fails too
    if shares and (loss == "bce" or target.is_floating_point()):
        return
    is_class = target.dim() == 1 and not (target.is_floating_point() or target.dtype == torch.bool)
    if loss == "cross_entropy" and is_class and not bool(((target < 0) | (target >= classes)).any()):
        return
    needs = f"shares in 0..1 of shape (n, {classes})"
    if loss == "cross_entropy":
        needs = f"classes 0..{classes - 1} of shape (n,), or {needs} as floats"
    raise ValueRangeError(
        f"task_loss '{loss}' needs targets that are {needs}; got {_described(target)}. "
        f"Pass them to extract as targets=, one row per image, or choose another task_loss."
    )


def name_of_loss(loss: KnownLoss | TaskLoss, name: str | None = None) -> str:
    """The name under which a cache records a task loss: that of the function, or `name`.

    Two losses of one name count as the same: give another name to a function that you have changed.
    """
    own: Any = loss if isinstance(loss, str) else name or getattr(loss, "__qualname__", None)
    text = str(own).rpartition("<locals>.")[2]
    if own is None or text == "<lambda>":
        raise ValueRangeError(
            f"task_loss: a cache records the task loss by its name, and {loss!r} has none. "
            f"Define it as a function with def, or give a name: Forward(task_loss=..., loss_name='...')."
        )
    return text


def as_classes(label: Shaped[Tensor, "n ..."] | None, count: int) -> Int64[Tensor, "n"] | None:
    """Labels as one class per image, None where targets are of another kind, such as shares of the classes."""
    if label is None or label.dim() != 1 or label.is_floating_point() or label.is_complex():
        return None
    if label.dtype == torch.bool:
        return None
    if bool(((label < 0) | (label >= count)).any()):
        raise ValueRangeError(
            f"labels must be classes of the members, 0 to {count - 1}; got {int(label.min())} to {int(label.max())}. "
            f"Give targets of another kind as floats."
        )
    return label.long()


def _checked(loss: TaskLoss) -> TaskLoss:
    def run(logit: Tensor, target: Tensor) -> Tensor:
        values = loss(logit, target)
        if not isinstance(values, Tensor) or values.shape != (len(logit),) or values.is_complex():
            raise ValueRangeError(
                f"task_loss must return one number per image, a tensor of shape ({len(logit)},); "
                f"got {_described(values)} for logits of shape {tuple(logit.shape)} and targets of shape "
                f"{tuple(target.shape)}. "
                f"Average over everything but images: reduction='none', then .flatten(1).mean(1)."
            )
        return values.float()

    return run


def _described(values: object) -> str:
    if not isinstance(values, Tensor):
        return f"{type(values).__name__} {values!r}"[:80]
    plain = f"{values.dtype} of shape {tuple(values.shape)}"
    real = values.numel() and not values.is_complex()
    return f"{plain} from {values.min().item():g} to {values.max().item():g}" if real else plain
