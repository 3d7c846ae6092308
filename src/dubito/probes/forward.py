"""The probe that every extraction runs: one forward pass gives feature, logit and, with labels, the task loss.

feature z (n,d)    logit W z + b (n,c)    loss = L(logit, target) (n)

    cross_entropy   -log softmax(logit)[y]                        y (n) classes
                    -sum_c y_c log softmax(logit)_c               y (n,c) shares
    bce             -mean_c y_c log s_c + (1 - y_c) log(1 - s_c)  y (n,c) in 0..1, s = sigmoid(logit)
    callable        f(logit (n,c), target (n,...)) -> (n)

A row that is mixed from two images (CutMix, MixUp) has the loss w L(y) + (1 - w) L(y').
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final, get_args

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Int64
from torch import Tensor

from dubito.choices import KnownLoss, Precision
from dubito.errors import ImagesError, ValueRangeError, first_words
from dubito.table import Provenance
from dubito.types import Classifier, Inputs, Json, Mixed, Targets, TaskLoss, has_logits
from dubito.validate import check_choice, check_classes


@final
@dataclass(frozen=True)
class Forward:
    """Features and logits.

    Attributes:
        store_logit: False saves their space: they are rebuilt from the stored feature and the head when they are
            needed, to the precision of the stored feature.
        feature_dtype: Precision on disk. float16 keeps three digits and values up to 65,504.
        task_loss: "cross_entropy", "bce" for several labels per image, or any callable of logits (n, c) and targets
            (n, ...) that returns one number per image; see `task_loss`.
        loss_name: Name under which the cache records a callable task loss; by default the function's own.
    """

    store_logit: bool = True
    feature_dtype: Precision = "float16"
    task_loss: KnownLoss | TaskLoss = "cross_entropy"
    loss_name: str | None = None

    name = "forward"
    price = "1 forward pass"

    def __post_init__(self) -> None:
        check_choice(self.feature_dtype, get_args(Precision), by="Forward", what="feature_dtype")
        known = get_args(KnownLoss)
        if self.task_loss not in known if isinstance(self.task_loss, str) else not callable(self.task_loss):
            raise ValueRangeError(
                f"task_loss must be {' or '.join(map(repr, known))}, or a callable of logits (n, c) and targets "
                f"(n, ...); got {self.task_loss!r}. Choose one."
            )
        _ = self.recorded_loss  # which a callable without a name does not have

    def run(
        self,
        model: Classifier,
        x: Inputs,
        label: Targets | None,
        *,
        mixed: Mixed | None = None,
        feature: Float[Tensor, "n d"] | None = None,
    ) -> Mapping[str, Tensor]:
        """feature, logit (if stored), and loss if there is something to compare the logits with.

        With the feature from another probe's pass, no further pass is made. A backbone without a classifying layer has
        features alone.
        """
        z = model.features(x) if feature is None else feature
        columns = {"feature": stored(z, self.feature_dtype, "features", "Forward(feature_dtype='float32')")}
        if not has_logits(model) and self.store_logit and label is None:
            return columns
        logit = model.logits(z).float()
        if self.store_logit:
            columns["logit"] = logit
        if label is not None:
            columns["loss"] = self.loss(logit, label, mixed)
        return columns

    def loss(self, logit: Float[Tensor, "n c"], target: Targets, mixed: Mixed | None = None) -> Float[Tensor, "n"]:
        """The task loss of every row, from logits alone."""
        return task_loss(self.task_loss, logit, target, mixed)

    def settings(self) -> Json:
        """The settings themselves; the task loss only where it is not the default."""
        settings: Json = {"store_logit": self.store_logit, "feature_dtype": self.feature_dtype}
        if self.task_loss != "cross_entropy":
            settings["task_loss"] = self.recorded_loss
        return settings

    @property
    def recorded_loss(self) -> str:
        """The name under which a cache records the task loss: that of the function, or `loss_name`.

        Two losses of one name count as the same: give another name to a function that you have changed.
        """
        loss = self.task_loss
        own: Any = loss if isinstance(loss, str) else self.loss_name or getattr(loss, "__qualname__", None)
        text = str(own).rpartition("<locals>.")[2]
        if own is None or text == "<lambda>":
            raise ValueRangeError(
                f"task_loss: a cache records the task loss by its name, and {loss!r} has none. "
                f"Define it as a function with def, or pass a name: Forward(task_loss=..., loss_name='...')."
            )
        return text

    @property
    def keeps_head(self) -> bool:
        """Logits that are not stored are rebuilt from the features and the model's last layer."""
        return not self.store_logit

    def check_targets(self, targets: Targets | None, classes: int | None) -> None:
        """Raise an error where the task loss cannot be computed: no targets for one that was chosen, or unfit ones."""
        if targets is None and self.task_loss != "cross_entropy":
            raise ImagesError(
                f"Forward(task_loss={self.recorded_loss!r}) needs something to compare the logits with; the images "
                f"have no labels of the model's classes and there are no targets. Pass targets=..., one row per image."
            )
        if targets is not None and classes is not None:
            check_target(self.task_loss, targets, classes)

    def as_stored(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Features as a cache of this probe gives them back; those beyond float16's range stay as they are."""
        if self.feature_dtype == "float32":
            return z
        return torch.where(z.abs() <= torch.finfo(torch.float16).max, z.half().float(), z)


def base_probe(provenance: Provenance | None = None) -> Forward:
    """The probe that every extraction runs; features as precise as in the cache that a provenance describes."""
    recorded = provenance.probes.get(Forward.name, {}) if provenance is not None else {}
    return Forward(feature_dtype=recorded.get("settings", {}).get("feature_dtype", "float16"))


def stored(values: Float[Tensor, "..."], dtype: Precision, what: str, probe: str) -> Float[Tensor, "..."]:
    """Values in the precision of a cache; ValueRangeError where they are beyond its range.

    Args:
        values: Of a column. NaN and infinity are left to the loop over images, which names the image.
        dtype: The precision.
        what: How the error calls the values.
        probe: How to configure the probe instead.
    """
    limit = torch.finfo(getattr(torch, dtype)).max
    if bool(values.isfinite().all()) and bool((values.abs() > limit).any()):
        raise ValueRangeError(
            f"{what} reach {float(values.abs().max()):.3g}, beyond {dtype}'s {limit:.6g}. "
            f"Extract with probes=[{probe}]."
        )
    return values.to(getattr(torch, dtype))


def task_loss(
    loss: KnownLoss | TaskLoss, logit: Float[Tensor, "n c"], target: Targets, mixed: Mixed | None = None
) -> Float[Tensor, "n"]:
    """The loss of every row, by name or by a callable."""
    if mixed is not None:
        values, weight = task_loss(loss, logit, target), mixed[1].to(logit)
        return weight * values + (1 - weight) * task_loss(loss, logit, mixed[0])
    target = target.to(logit.device)
    check_target(loss, target, logit.shape[1])
    if loss == "cross_entropy":
        return F.cross_entropy(logit, target.to(logit) if target.dim() > 1 else target.long(), reduction="none")
    if isinstance(loss, str):
        return F.binary_cross_entropy_with_logits(logit, target.to(logit), reduction="none").mean(1)
    values = loss(logit, target)
    if not isinstance(values, Tensor) or values.shape != (len(logit),) or values.is_complex():
        raise ValueRangeError(
            f"task_loss must return one number per image, a tensor of shape ({len(logit)},); got {_described(values)} "
            f"for logits of shape {tuple(logit.shape)} and targets of shape {tuple(target.shape)}. "
            f"Average over everything but images: reduction='none', then .flatten(1).mean(1)."
        )
    return values.float()


def check_target(loss: KnownLoss | TaskLoss, target: Targets, classes: int) -> None:
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


def as_classes(label: Targets | None, count: int) -> Int64[Tensor, "n"] | None:
    """Labels as one class per image, None where targets are of another kind, such as shares of the classes."""
    if label is None or label.ndim != 1 or label.is_floating_point() or label.is_complex() or label.dtype == torch.bool:
        return None
    check_classes(label, count, by="an ensemble's loss")
    return label.long()


def _described(values: object) -> str:
    if not isinstance(values, Tensor):
        return first_words(f"{type(values).__name__} {values!r}", 80)
    plain = f"{values.dtype} of shape {tuple(values.shape)}"
    real = values.numel() and not values.is_complex()
    return f"{plain} from {values.min().item():g} to {values.max().item():g}" if real else plain
