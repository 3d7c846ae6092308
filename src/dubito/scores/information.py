"""What members of an ensemble know together: how far they disagree, and how unsure each of them is by itself.

    predictive_entropy   H(p̄), p̄ = mean_m p_m                total
    expected_entropy     mean_m H(p_m)                        aleatoric
    mutual_information   I[Y; M] = H(p̄) - mean_m H(p_m)      epistemic
    weighted ...         the same with weights w_m            epistemic
    variation_ratio      the share of members that do not vote for the class with most votes
    perturbation_variance   sum_c Var_m p_mc                  epistemic, over copies m of the image with Gaussian noise

Kirsch 2024 (arXiv 2409.02628), eqs 2 to 5, and B.1 for the weights, in the four readings that `metrics.information`
explains; Freeman 1965 for the variation ratio. Pooled weights are learned from a table and then stay.

Members are those of an explicit ensemble (the probe `Members`, or `dubito.ensemble`), tiles of one image (`Tiles`) or
members that masks cut out of one model: `of` says which. A summary column (n, s) suffices for what it holds. Other
temperatures and pooled weights need the logits (n, m, c), read a few rows and members at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final, get_args

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.choices import WeighedBy, WeighedOver
from dubito.errors import TableError
from dubito.metrics.information import entropy_of, log_size
from dubito.metrics.streaming import SUMMARY, MemberStream, VarianceStream
from dubito.scores.softmax import check_two_classes
from dubito.table import Table
from dubito.types import Score, finite_batches
from dubito.validate import check_choice

_BYTES = 1 << 26
"""Of logits and sums at once: 64 MB."""
_ROWS = 2048


@dataclass
class ScoreOfMembers(Score):
    """An uncertainty of one ensemble of a table.

    Attributes:
        of: The ensemble's name: the summary column `of`, or the members' logits in `of_logit`.
        disagrees: Whether it measures how members differ, which takes two of them.
    """

    of: str = "members"

    needs = ("members",)
    disagrees: ClassVar[bool] = True
    field = "epistemic"
    """Which of SUMMARY it is."""
    per_ensemble = True
    own_probe = True

    def __post_init__(self) -> None:
        self.needs = (self.of,)

    @property
    def family(self) -> str:
        """The ensemble."""
        return self.of

    @property
    def logits(self) -> str:
        """The column of the members' logits."""
        return f"{self.of}_logit"

    def batches(self, table: Table) -> Iterator[Table]:
        """Rows of the summary where it is there, else of the members' logits."""
        return member_batches(table, *self.columns_in(table), by=f"{self.name}.score")

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """Of one in-memory batch, from what its probe summarised or from the members' logits."""
        (column,) = self.columns_in(batch)
        return self.of_logits(batch) if column == self.logits else self.of_summary(column, batch)

    def of_summary(self, column: str, batch: Table) -> Float[Tensor, "n"]:
        """The score's own field of the summary column."""
        summary: Tensor = batch.whole(column)
        if summary.dim() != 2 or summary.shape[1] != len(SUMMARY):
            raise TableError(
                f"{self.name}.score: column '{column}' must be the summary of an ensemble, (n, {len(SUMMARY)}); "
                f"got {tuple(summary.shape)} in {batch.name}. Pass members' logits (n, m, c) as '{self.logits}'."
            )
        if len(summary):
            self.check_members(int(summary[:, SUMMARY.index("members")].min()), batch)
        return summary[:, SUMMARY.index(self.field)]

    def of_logits(self, batch: Table, temperature: float = 1.0) -> Float64[Tensor, "n"]:
        """Of one in-memory batch, from logits / temperature."""
        stream = MemberStream(temperature=temperature)
        for block in members_of(self, batch):
            stream.add(block)
        return stream.field(self.field)

    def columns_in(self, table: Table) -> tuple[str, ...]:
        """What the ensemble's probe summarised, or else the members' logits."""
        return (self.logits,) if self.needs[0] not in table and self.logits in table else self.needs

    def check_members(self, count: int, table: Table) -> None:
        """Raise TableError where one member is to differ from itself."""
        if self.disagrees and count < 2:
            raise TableError(
                f"{self.name}.score: the ensemble '{self.of}' of {table.name} has one member, which always agrees with "
                f"itself: the score would be 0 for every image. Pass at least two members."
            )


@final
@dataclass
class MutualInformation(ScoreOfMembers):
    """How far the members of an ensemble disagree: what they know apart and do not know together.

    Attributes:
        of: The ensemble: "members", "checkpoints", "dropout", "views", "tiles_2" to "tiles_7", "masks", or your own.
    """

    name = "mutual_information"
    kind = "epistemic"


@final
@dataclass
class WeightedMutualInformation(ScoreOfMembers):
    """Mutual information where members with larger logits count more.

    Attributes:
        of: The ensemble; see `MutualInformation`.
        by: What makes a member count: the "logsumexp" of its logits, or their "sum".
        over: "input": weights of their own for each input. "pooled": one per member, learned from column `of_logit`.
        weights_: (m) pooled weights, once fitted.
    """

    by: WeighedBy = "logsumexp"
    over: WeighedOver = "input"

    name = "weighted_mutual_information"
    kind = "epistemic"

    def __post_init__(self) -> None:
        for setting, kinds in (("by", WeighedBy), ("over", WeighedOver)):
            check_choice(getattr(self, setting), get_args(kinds), by=self.name, what=setting)
        self.field, learns = f"weighted_{self.by}", self.over == "pooled"
        self.needs = (self.logits,) if learns else (self.of,)
        self.learns_from = (self.logits,) if learns else ()
        self.learned = ("weights_",) if learns else ()

    def learn(self, table: Table) -> None:
        """Pooled weights, if `over` says so."""
        if self.over == "pooled":
            self.weights_ = self.pooled_weights(table)

    def pooled_weights(self, table: Table, temperature: float = 1.0) -> Float64[Tensor, "m"]:
        """w_m = Σ_n exp l_mn / Σ_kn exp l_kn, with l the size of the logits / temperature, in logarithms; one pass."""
        sizes = []
        for batch in member_batches(table, self.logits, by=f"{self.name}.fit"):
            members = members_of(self, batch, by="fit")
            of_rows = torch.cat([log_size(block.double() / temperature, self.by) for block in members], 1)
            sizes.append(of_rows.logsumexp(0))
        if not sizes:
            raise TableError(f"{self.name}.fit needs rows; {table.name} has none. Fit on in-distribution images.")
        return torch.stack(sizes).logsumexp(0).softmax(0)

    def of_logits(self, batch: Table, temperature: float = 1.0) -> Float64[Tensor, "n"]:
        """With pooled weights, if `over` says so; else by input."""
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

    name = "expected_entropy"
    kind = "aleatoric"
    field = "aleatoric"
    disagrees = False


@final
@dataclass
class VariationRatio(ScoreOfMembers):
    """The share of members that do not vote for the class with most votes.

    Attributes:
        of: The ensemble; see `MutualInformation`.
    """

    name = "variation_ratio"
    kind = "epistemic"
    field = "variation"


@final
@dataclass
class PredictiveEntropy(ScoreOfMembers):
    """The entropy of the members' mean prediction.

    Attributes:
        of: The ensemble; see `MutualInformation`.
    """

    name = "predictive_entropy"
    kind = "total"
    field = "total"
    disagrees = False


@final
@dataclass
class PerturbationVariance(ScoreOfMembers):
    """How far the predictions for noisy copies of an image scatter.

    A baseline beside gradients with respect to weights, which needs forward passes only: to first order in the noise it
    expects sigma^2 sum_c ||grad_x p_c||_2^2, the gradients with respect to the image. The probe `Noise` writes
    the variance as `NAME_variance`; any other ensemble will do whose members' logits are kept.

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

    def of_summary(self, column: str, batch: Table) -> Float[Tensor, "n"]:
        """The variances as they are."""
        variance: Tensor = batch.whole(column)
        if variance.dim() != 1:
            raise TableError(
                f"{self.name}.score: column '{column}' must have one variance per image, (n); got "
                f"{tuple(variance.shape)} in {batch.name}. Pass members' logits (n, m, c) as '{self.logits}'."
            )
        return variance

    def of_logits(self, batch: Table, temperature: float = 1.0) -> Float64[Tensor, "n"]:
        """Of one in-memory batch, from logits / temperature."""
        stream = VarianceStream(temperature=temperature)
        for block in members_of(self, batch):
            stream.add(block)
        return stream.variance()


def member_batches(table: Table, column: str, *more: str, by: str) -> Iterator[Table]:
    """Rows of a column of members, checked, and of others, as many at once as their members allow."""
    _, *tail = table.shape(column)
    m, c = tail if len(tail) == 2 else (1, 1)
    # Four bytes per logit; for every class, the sums that a stream keeps and what it needs to add to them.
    size = _BYTES // (c * (4 * m + 64)) if m * c else _ROWS
    yield from finite_batches(table.batches(column, *more, size=max(1, min(_ROWS, size))), table.name, by=by)


def members_of(score: ScoreOfMembers, batch: Table, by: str = "score") -> Iterator[Float[Tensor, "n b c"]]:
    """The logits of a batch, a few members at a time, checked."""
    logits = batch.whole(score.logits)
    if logits.dim() != 3 or not logits.is_floating_point() or 0 in logits.shape[1:]:
        raise TableError(
            f"{score.name}.{by}: column '{score.logits}' must be the logits of members, (n, m, c); got "
            f"{logits.dtype} of shape {tuple(logits.shape)} in {batch.name}."
        )
    check_two_classes(logits, f"{score.name}.{by}")
    score.check_members(logits.shape[1], batch)
    step = max(1, _BYTES // (32 * max(1, len(logits)) * logits.shape[2]))
    for start in range(0, logits.shape[1], step):
        yield logits[:, start : start + step]
