"""The probe that every extraction runs: one forward pass gives feature, logit and, with labels, the task loss.

feature z (n,d)    logit W z + b (n,c)    loss = L(logit, label) (n), by default -log softmax(logit)[label]
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from dubito.choices import KnownLoss
from dubito.errors import ImagesError, ValueRangeError
from dubito.probes.task_loss import Mixed, check_target, check_task_loss, name_of_loss, task_loss
from dubito.table import Provenance
from dubito.types import Classifier, Json, TaskLoss


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
    feature_dtype: Literal["float16", "float32"] = "float16"
    task_loss: KnownLoss | TaskLoss = "cross_entropy"
    loss_name: str | None = None

    def __post_init__(self) -> None:
        if self.feature_dtype not in ("float16", "float32"):
            raise ValueRangeError(f"feature_dtype must be float16 or float32; got '{self.feature_dtype}'.")
        check_task_loss(self.task_loss)
        name_of_loss(self.task_loss, self.loss_name)

    name = "forward"
    price = "1 forward pass"

    def run(
        self,
        model: Classifier,
        x: Float[Tensor, "n ..."],
        label: Shaped[Tensor, "n ..."] | None,
        *,
        mixed: Mixed | None = None,
        feature: Float[Tensor, "n d"] | None = None,
    ) -> Mapping[str, Tensor]:
        """feature, logit (if stored), and loss if there is something to compare the logits with.

        With the feature from another probe's pass, no further pass is made.
        """
        z = model.features(x) if feature is None else feature
        logit = model.logits(z).float()
        columns = {"feature": self._stored(z)}
        if self.store_logit:
            columns["logit"] = logit
        if label is not None:
            columns["loss"] = task_loss(self.task_loss, logit, label, mixed)
        return columns

    def settings(self) -> Json:
        """The settings themselves; the task loss only where it is not the default."""
        settings: Json = {"store_logit": self.store_logit, "feature_dtype": self.feature_dtype}
        if self.task_loss != "cross_entropy":
            settings["task_loss"] = self.recorded_loss
        return settings

    @property
    def recorded_loss(self) -> str:
        """The name under which a cache records the task loss."""
        return name_of_loss(self.task_loss, self.loss_name)

    @property
    def keeps_head(self) -> bool:
        """Logits that are not stored are rebuilt from the features and the model's last layer."""
        return not self.store_logit

    def check_targets(self, targets: Shaped[Tensor, "n ..."] | None, classes: int | None) -> None:
        """Raise an error where the task loss cannot be computed: no targets for one that was chosen, or unfit ones."""
        if targets is None and self.task_loss != "cross_entropy":
            raise ImagesError(
                f"Forward(task_loss={self.recorded_loss!r}) needs something to compare the logits with; the images "
                f"have no labels of the model's classes and there are no targets. "
                f"Pass targets=..., one row per image."
            )
        if targets is not None and classes is not None:
            check_target(self.task_loss, targets, classes)

    def in_memory(self) -> "Forward":
        """The same probe for a table in memory: logits are there, features in full precision until `as_stored`."""
        return replace(self, store_logit=True, feature_dtype="float32")

    def as_stored(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Features as a cache of this probe gives them back; those beyond float16's range stay as they are."""
        if self.feature_dtype == "float32":
            return z
        return torch.where(z.abs() <= torch.finfo(torch.float16).max, z.half().float(), z)

    def _stored(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        dtype = torch.float16 if self.feature_dtype == "float16" else torch.float32
        limit = torch.finfo(dtype).max
        if bool(z.isfinite().all()) and bool((z.abs() > limit).any()):
            raise ValueRangeError(
                f"features reach {float(z.abs().max()):.3g}, beyond float16's {limit:.0f}. "
                f"Extract with probes=[Forward(feature_dtype='float32')]."
            )
        return z.to(dtype)


def base_probe(provenance: Provenance | None = None) -> Forward:
    """The probe that every extraction runs; features as precise as in the cache that a provenance describes."""
    recorded = provenance.probes.get(Forward.name, {}) if provenance is not None else {}
    return Forward(feature_dtype=recorded.get("settings", {}).get("feature_dtype", "float16"))
