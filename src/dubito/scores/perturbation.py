"""How far the answers of a model scatter when a little noise is added to the image.

    perturbation_variance   sum_c Var_m p_mc     over copies m of the image with Gaussian noise

A baseline beside gradients with respect to weights, which needs forward passes only: to first order in the noise it
expects sigma^2 sum_c ||grad_x p_c||_2^2, the gradients with respect to the image. Copies come from the probe
`Noise`, which writes their variance as `NAME_variance`; any other ensemble will do whose members' logits are
kept.
"""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float, Float64
from torch import Tensor

from dubito.errors import TableError
from dubito.metrics.streaming import VarianceStream
from dubito.scores.information import ScoreOfMembers, members_of
from dubito.table import Table


@final
@dataclass
class PerturbationVariance(ScoreOfMembers):
    """How far the answers to noisy copies of an image scatter.

    Attributes:
        of: The ensemble: "noise", or another one whose `NAME_variance` or `NAME_logit` is there.
    """

    of: str = "noise"

    name = "perturbation_variance"
    kind = "epistemic"
    needs = ("noise_variance",)
    field = "variance"
    per_ensemble = False

    def __post_init__(self) -> None:
        self.needs = (f"{self.of}_variance",)

    def columns_in(self, table: Table) -> tuple[str, ...]:
        """The variance, or else the members' logits."""
        return (self.logits,) if self.needs[0] not in table and self.logits in table else self.needs

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """Of one in-memory batch."""
        (column,) = self.columns_in(batch)
        if column == self.logits:
            return self.of_logits(batch)
        variance: Tensor = batch.whole(column)
        if variance.dim() != 1:
            raise TableError(
                f"{self.name}.score: column '{column}' must have one variance per image, (n); got "
                f"{tuple(variance.shape)} in {batch.name}. Give members' logits (n, m, c) as '{self.logits}'."
            )
        return variance.double()

    def of_logits(self, batch: Table, temperature: float = 1.0) -> Float64[Tensor, "n"]:
        """Of one in-memory batch, from logits / temperature."""
        stream = VarianceStream(temperature=temperature)
        for block in members_of(self, batch):
            stream.add(block)
        return stream.variance()
