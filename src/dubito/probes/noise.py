"""Members by noise: one model, several copies of the image with Gaussian noise.

    p_m = softmax(f(x + sigma e_m)),   e_m ~ N(0, I)

The noise is added to the finished input, on its device, so sigma is in the units that the transform leaves: where
inputs have a standard deviation of one, 0.05 is a twentieth of it. e_m depends on the seed, the number of the copy and
the shape of an input, and on nothing else: all images get the same noise. So predictions depend neither on the batch
nor on the order of images, and images are compared under equal conditions. The image itself is not a member. The amount
and the number of copies are ours.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.probes.dropout import pass_seed
from dubito.probes.members import EnsembleProbe
from dubito.types import Classifier
from dubito.validate import check_number


def noise(shape: Sequence[int], seed: int, copy: int) -> Float32[Tensor, "..."]:
    """The noise of one copy, for inputs of this shape, of standard deviation 1; on the CPU, the same everywhere."""
    generator = torch.Generator().manual_seed(pass_seed(seed, copy, "noise"))
    return torch.randn(*shape, generator=generator, dtype=torch.float32)


@final
@dataclass(frozen=True)
class Noise(EnsembleProbe):
    """The extracted model on several copies of each image with Gaussian noise, the same for all images.

    Attributes:
        copies: Number of members; the image itself is not one of them.
        sigma: Standard deviation of the noise, in the units of finished inputs.
        seed: Seed of the noise.
    """

    copies: int = 8
    sigma: float = 0.05
    seed: int = 0
    variance: bool = field(default=True, kw_only=True)

    name = "noise"

    def __post_init__(self) -> None:
        alone = "One copy has none to differ from."
        check_number(self.copies, "[2, inf)", by="noise", what="copies", whole=True, hint=alone)
        check_number(self.sigma, "(0, inf)", by="noise", what="sigma", hint="0.05 is usual.")
        super().__post_init__()

    def __len__(self) -> int:
        return self.copies

    def check(self, model: Classifier, x: Float[Tensor, "n ..."]) -> None:
        """Noise must change the inputs: half precision may round it away."""
        first = x[:1]
        if len(first) and torch.equal(self._copy(first, 0), first):
            raise ValueRangeError(
                f"noise: sigma={self.sigma:g} changes nothing of the inputs of {model.name}, which are {x.dtype} and "
                f"as large as {float(first.abs().max()):g}. Give a larger sigma."
            )

    def logits(self, model: Classifier, x: Float[Tensor, "n ..."]) -> Iterator[Float[Tensor, "n c"]]:
        """Of each copy."""
        for copy in range(self.copies):
            yield model.logits(model.features(self._copy(x, copy))).to(x.device).float()

    def _copy(self, x: Float[Tensor, "n ..."], copy: int) -> Float[Tensor, "n ..."]:
        return x + (self.sigma * noise(x.shape[1:], self.seed, copy)).to(x)
