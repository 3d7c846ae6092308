"""The uncertainty head: a small network from a frozen model's feature to one positive number.

    u(z) = softplus(W_k a(... a(W_1 z + b_1) ...) + b_k) + 1e-6,   a = LeakyReLU(0.01)

Kirchhof et al., Pretrained Visual Uncertainties (2024), appendix A: two hidden layers of width 512. The 1e-6 is in the
authors' code, not in their text: it keeps u positive where softplus underflows.
"""

from itertools import pairwise
from typing import final, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dubito.choices import Init
from dubito.errors import TableError, ValueRangeError

SMALLEST = 1e-6
SLOPE = 0.01


@final
class HeadModule(nn.Module):
    """The network alone; `dubito.UncertaintyHead` is the score around it.

    Args:
        features: Width d of the features that it reads.
        width: Of every hidden layer.
        depth: Number of hidden layers; 0 is a linear head.
        init: "default" is torch's own; "zero" sets every weight and bias to zero, which cannot learn (Table 3);
            "classes" is "default" until `class_start.start_at_classes` has seen a table.
        seed: Of the initial weights.

    >>> head = HeadModule(8, width=4, depth=1, seed=1)
    >>> bool((head(torch.zeros(3, 8)) > 0).all())
    True
    """

    def __init__(
        self, features: int, *, width: int = 512, depth: int = 2, init: Init = "default", seed: int = 0
    ) -> None:
        super().__init__()
        if features < 1 or width < 1 or depth < 0:
            raise ValueRangeError(
                f"head: features and width must be at least 1 and depth at least 0; got {features}, {width}, {depth}."
            )
        if init not in get_args(Init):
            raise ValueRangeError(f"head: init must be one of {', '.join(get_args(Init))}; got '{init}'.")
        self.features, self.width, self.depth = features, width, depth
        sizes = [features, *[width] * depth, 1]
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # not CUDA's, which a fork without devices would not restore
            for before, after in pairwise(sizes):
                layers += [nn.Linear(before, after), nn.LeakyReLU(SLOPE)]
        self.layers = nn.Sequential(*layers[:-1], nn.Softplus())
        if init == "zero":
            for parameter in self.parameters():
                nn.init.zeros_(parameter)

    def forward(self, z: Float[Tensor, "*n d"]) -> Float[Tensor, "*n"]:
        """One positive number a row."""
        if z.shape[-1] != self.features:
            raise TableError(
                f"head: features must be {self.features} wide, as those that the head was trained on; {z.shape[-1]} "
                f"came. Use the head of this model, or train one on its features."
            )
        u: Tensor = self.layers(z)[..., 0] + SMALLEST
        return u
