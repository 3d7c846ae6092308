"""The probe that every extraction runs: one forward pass gives feature, logit and, with labels, the task loss.

feature z (n,d)    logit W z + b (n,c)    loss = -log softmax(logit)[label] (n)
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, final

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Int
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.types import Classifier, Json


@final
@dataclass(frozen=True)
class Forward:
    """Features and logits.

    Attributes:
        store_logit: False saves their space: they are rebuilt from the stored feature and the head when asked for,
            to the precision of the stored feature.
        feature_dtype: On disk. float16 keeps three digits and values up to 65,504.
    """

    store_logit: bool = True
    feature_dtype: Literal["float16", "float32"] = "float16"

    def __post_init__(self) -> None:
        if self.feature_dtype not in ("float16", "float32"):
            raise ValueRangeError(f"feature_dtype must be float16 or float32; '{self.feature_dtype}' came.")

    name = "forward"
    price = "1 forward pass"

    def run(self, model: Classifier, x: Float[Tensor, "n ..."], label: Int[Tensor, "n"] | None) -> Mapping[str, Tensor]:
        """feature, logit (if stored), and loss if the labels are the model's."""
        z = model.features(x)
        logit = model.logits(z).float()
        columns = {"feature": self._stored(z)}
        if self.store_logit:
            columns["logit"] = logit
        if label is not None:
            columns["loss"] = F.cross_entropy(logit, label.to(logit.device), reduction="none")
        return columns

    def settings(self) -> Json:
        """The settings themselves."""
        return asdict(self)

    def _stored(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        dtype = torch.float16 if self.feature_dtype == "float16" else torch.float32
        limit = torch.finfo(dtype).max
        if bool(z.isfinite().all()) and bool((z.abs() > limit).any()):
            raise ValueRangeError(
                f"features reach {float(z.abs().max()):.3g}, beyond float16's {limit:.0f}. "
                f"Extract with probes=[Forward(feature_dtype='float32')]."
            )
        return z.to(dtype)
