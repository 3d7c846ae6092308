"""What members of an ensemble know together: how far they disagree, and how unsure each of them is by itself.

    predictive_entropy   H(p̄), p̄ = mean_m p_m                total
    expected_entropy     mean_m H(p_m)                        aleatoric
    mutual_information   I[Y; M] = H(p̄) - mean_m H(p_m)      epistemic
    weighted ...         the same with weights w_m            epistemic
    variation_ratio      the share of members that do not vote for the class with most votes

Kirsch 2024 (arXiv 2409.02628), eqs 2 to 5, and B.1 for the weights; Freeman 1965 for the variation ratio. B.1 weighs
members by the size of their logits, and says in its steps that this is done for each input, in its formula that it is
summed over inputs, and does not say which inputs those are; "logit sum" may be a sum or a log-sum-exp. All four
readings are here, and none is called the paper's own. Pooled weights are learned from a table and then stay.

Members are those of an explicit ensemble (the probe `Members`, or `dubito.ensemble`), tiles of one image (`Tiles`) or
members that masks cut out of one model: `of` says which.
"""

from dataclasses import dataclass
from typing import final, get_args

import torch
from jaxtyping import Float64
from torch import Tensor

from dubito.choices import WeighedBy, WeighedOver
from dubito.errors import TableError, ValueRangeError
from dubito.metrics.information import entropy_of, log_size
from dubito.scores._members import ScoreOfMembers, blocks, members_of
from dubito.table import Table
from dubito.types import finite


def pooled(before: Float64[Tensor, "m"] | None, sizes: Float64[Tensor, "n m"]) -> Float64[Tensor, "m"]:
    """The log of Σ_n exp l_mn over these rows and those before; a softmax over members makes weights of it.

    >>> first = pooled(None, torch.tensor([[2.0, 2.0]], dtype=torch.float64))
    >>> pooled(first, torch.tensor([[2.0, -30.0]], dtype=torch.float64)).exp().tolist()  # e² + e², e² + e⁻³⁰
    [14.778..., 7.389...]
    """
    found = sizes.logsumexp(0)
    return found if before is None else torch.logaddexp(before, found)


@final
@dataclass
class MutualInformation(ScoreOfMembers):
    """How far the members of an ensemble disagree: what they know apart and do not know together.

    Attributes:
        of: The ensemble: "members", "checkpoints", "dropout", "views", "tiles_2" to "tiles_7", "masks", or your own.
    """

    of: str = "members"

    name = "mutual_information"
    kind = "epistemic"
    needs = ("members",)
    field = "epistemic"

    def __post_init__(self) -> None:
        self.needs = (self.of,)


@final
@dataclass
class WeightedMutualInformation(ScoreOfMembers):
    """Mutual information where members with larger logits count more.

    Attributes:
        by: What makes a member count: the "logsumexp" of its logits, or their "sum".
        over: "input": weights of their own for each input. "pooled": one weight a member, learned from a table, whose
            `of_logit` it needs.
        of: The ensemble; see `MutualInformation`.
        weights_: (m) pooled weights, once fitted.
    """

    by: WeighedBy = "logsumexp"
    over: WeighedOver = "input"
    of: str = "members"

    name = "weighted_mutual_information"
    kind = "epistemic"
    needs = ("members",)

    def __post_init__(self) -> None:
        for setting, kinds in (("by", WeighedBy), ("over", WeighedOver)):
            if getattr(self, setting) not in get_args(kinds):
                raise ValueRangeError(
                    f"{self.name}: {setting} must be one of {', '.join(get_args(kinds))}; "
                    f"got '{getattr(self, setting)}'."
                )
        learns = self.over == "pooled"
        self.needs = (self.logits,) if learns else (self.of,)
        self.learns_from = (self.logits,) if learns else ()
        self.learned = ("weights_",) if learns else ()

    @property
    def field(self) -> str:
        """With weights by input."""
        return f"weighted_{self.by}"

    def column_in(self, table: Table) -> str:
        """A summary has no pooled weights."""
        return self.logits if self.over == "pooled" else super().column_in(table)

    def learn(self, table: Table) -> None:
        """Pooled weights: w_m = Σ_n exp l_mn / Σ_kn exp l_kn, with l the size of the logits; one pass."""
        if self.over == "input":
            return
        sizes = None
        for batch in blocks(table, self.logits):
            finite(batch.whole(self.logits), f"{self.name}.fit: column '{self.logits}' of {table.name}")
            members = [log_size(block.double(), self.by) for block in members_of(self, batch, by="fit")]
            sizes = pooled(sizes, torch.cat(members, 1))
        if sizes is None:
            raise TableError(f"{self.name}.fit needs rows; {table.name} has none. Fit on images that the model knows.")
        self.weights_ = sizes.softmax(0)

    def of_logits(self, batch: Table, temperature: float = 1.0) -> Float64[Tensor, "n"]:
        """With pooled weights, if they are asked for; else by input."""
        if self.over == "input":
            return super().of_logits(batch, temperature)
        n, m, c = batch.shape(self.logits)
        if m != len(self.weights_):
            raise TableError(
                f"{self.name}.score: {batch.name} has {m} members in '{self.logits}'; weights were fitted for "
                f"{len(self.weights_)}. Fit on a table of the same ensemble."
            )
        mean, entropy, first = torch.zeros(n, c, dtype=torch.float64), torch.zeros(n, dtype=torch.float64), 0
        for block in members_of(self, batch):
            p = (block.double() / temperature).softmax(-1)
            weights = self.weights_[first : first + p.shape[1]]
            mean += torch.einsum("m,nmc->nc", weights, p)
            entropy += entropy_of(p) @ weights
            first += p.shape[1]
        return (entropy_of(mean) - entropy).clamp_min(0)


@final
@dataclass
class ExpectedEntropy(ScoreOfMembers):
    """How unsure the members are by themselves, on average: what none of them can know.

    Attributes:
        of: The ensemble; see `MutualInformation`.
    """

    of: str = "members"

    name = "expected_entropy"
    kind = "aleatoric"
    needs = ("members",)
    field = "aleatoric"
    disagrees = False

    def __post_init__(self) -> None:
        self.needs = (self.of,)


@final
@dataclass
class VariationRatio(ScoreOfMembers):
    """The share of members that do not vote for the class with most votes.

    Attributes:
        of: The ensemble; see `MutualInformation`.
    """

    of: str = "members"

    name = "variation_ratio"
    kind = "epistemic"
    needs = ("members",)
    field = "variation"

    def __post_init__(self) -> None:
        self.needs = (self.of,)


@final
@dataclass
class PredictiveEntropy(ScoreOfMembers):
    """The entropy of what the members say together.

    Attributes:
        of: The ensemble; see `MutualInformation`.
    """

    of: str = "members"

    name = "predictive_entropy"
    kind = "total"
    needs = ("members",)
    field = "total"
    disagrees = False

    def __post_init__(self) -> None:
        self.needs = (self.of,)
