"""The last layer of a classifier: from the feature to the logits, W z + b.

`Classifier.head` is one linear layer for every kind of head (several heads, convolutions): nothing is to be recovered.
"""

from typing import NamedTuple

from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from dubito.errors import ModelError, ValueRangeError
from dubito.types import Classifier, finite


class Layer(NamedTuple):
    """A last layer: weight (c, d) and bias (c)."""

    weight: Float[Tensor, "c d"]
    bias: Float[Tensor, "c"]

    def logits(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n c"]:
        """W z + b, in float64: regions and fields need the order of nearly equal confidences."""
        if z.shape[1] != self.weight.shape[1]:
            raise ValueRangeError(
                f"Layer.logits: features must be {self.weight.shape[1]} wide; got {z.shape[1]}. "
                f"Give features of the same model, one row each."
            )
        return z.double() @ self.weight.double().T + self.bias.double()


def last_layer(of: Classifier | nn.Linear | Tensor | tuple[Tensor, Tensor | None]) -> tuple[str, Layer]:
    """Its name, and the last layer in float64 on the CPU.

    Args:
        of: A classifier, a linear layer, a weight (c, d), or a weight with its bias; without one it is zero.

    >>> import torch
    >>> name, layer = last_layer(torch.eye(2))
    >>> name, layer.bias.tolist()
    ('weights', [0.0, 0.0])
    """
    weight: Tensor
    bias: Tensor | None
    if isinstance(of, nn.Linear):
        name, weight, bias = "linear layer", of.weight, of.bias
    elif isinstance(of, Tensor):
        name, weight, bias = "weights", of, None
    elif isinstance(of, tuple):
        name, (weight, bias) = "weights", of
    else:
        name, (weight, bias) = of.name, _head(of)
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueRangeError(
            f"last layer of {name}: weight must be (classes, features) and bias (classes); got {tuple(weight.shape)} "
            f"and {None if bias is None else tuple(bias.shape)}. torch.nn.Linear keeps them like that."
        )
    weight = finite(weight.detach().double().cpu(), f"weight of {name}")
    bias = weight.new_zeros(len(weight)) if bias is None else finite(bias.detach().double().cpu(), f"bias of {name}")
    return name, Layer(weight, bias)


def _head(model: Classifier) -> tuple[Tensor, Tensor | None]:
    """The head; a model that has not seen a batch yet is shown a black picture, if it takes pictures."""
    try:
        return model.head()
    except ModelError as unseen:
        try:
            picture = model.transform.prepare(Image.new("RGB", (256, 256)))
        except ModelError:
            raise unseen from None
        model.features(model.transform.finish(picture[None].to(model.device)))
        return model.head()
