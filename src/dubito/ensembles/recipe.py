"""How masks are found: every setting that the paper leaves open, what was chosen here, and on what.

The paper gives the weight of diversity, 2.0, and the number of members, 10; nothing else. Defaults were chosen on MNIST
alone: masks of MLPs 784-512-256-10 and 784-2048-1024-10 learned from 50,000 training images, and compared on the other
10,000, which the masks had not seen, but the MLPs had. Wanted was a high diversity with members that lose at most one
per cent of accuracy; `diversity_over` decides that, and the other settings hardly matter within factors of three.
Foreign images had no say.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from dubito.ensembles.masks import DiversityOver
from dubito.errors import ValueRangeError

_POSITIVE = ("rate", "first_temperature", "last_temperature")
_COUNTS = ("steps", "batch")


@dataclass(frozen=True)
class MaskRecipe:
    """Settings of `extract_members` and `HeadMasks`.

    Loss of a step: mean over members of the cross-entropy - diversity_weight * I[mask; M]. Adam, without weight decay.

    Attributes:
        diversity_weight: The paper's 2.0. With 0, members are as alike as their random start lets them be.
        diversity_over: "units" divides I[mask; M] by the number of units, so that it is at most log 2, of the size of a
            cross-entropy. "masks": the mean within each vector of rows or columns, summed; stronger where layers are
            many. "sum": nothing is divided; with thousands of units cross-entropy hardly counts any more, and members
            are very different and mostly wrong. OPEN in the paper.
        steps: Of gradient descent. OPEN in the paper.
        batch: Rows of a step, shared out among the members in equal parts.
        rate: Adam's learning rate of theta.
        first_temperature: tau of q = sigmoid(theta / tau) in the first step. OPEN in the paper, whether there is one.
        last_temperature: tau in the last step; between them it falls by the same factor in every step. Low ones leave
            few masks undecided, so that binarising changes little.
        start: Mean of theta in the beginning: 0 keeps and drops alike, positive values keep more.
        spread: Standard deviation of theta in the beginning; without any, all members would stay the same.
        binarise: Masks of 0 and 1, cut at q = 1/2, so that members are smaller models. Otherwise members keep every
            weight, scaled by q. OPEN in the paper.
    """

    diversity_weight: float = 2.0
    diversity_over: DiversityOver = "units"
    steps: int = 300
    batch: int = 640
    rate: float = 0.1
    first_temperature: float = 1.0
    last_temperature: float = 0.2
    start: float = 0.0
    spread: float = 1.0
    binarise: bool = True

    def __post_init__(self) -> None:
        if self.diversity_over not in get_args(DiversityOver):
            raise ValueRangeError(
                f"diversity_over must be 'units', 'masks' or 'sum'; got '{self.diversity_over}'. Choose one of them."
            )
        for name in (*_POSITIVE, *_COUNTS):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueRangeError(
                    f"{name} must be positive and finite; got {getattr(self, name)}. The default is {_default(name)}."
                )
        if not abs(self.start) < float("inf"):
            raise ValueRangeError(f"start must be finite; got {self.start}. The default is {_default('start')}.")
        if not (0 <= self.diversity_weight < float("inf") and 0 <= self.spread < float("inf")):
            raise ValueRangeError(
                f"diversity_weight and spread must not be negative, nor infinite; {self.diversity_weight} and "
                f"{self.spread} came. The defaults are 2 and 1."
            )

    def temperature(self, step: int) -> float:
        """Tau of a step.

        >>> [round(MaskRecipe(steps=3, last_temperature=0.25).temperature(step), 3) for step in range(3)]
        [1.0, 0.5, 0.25]
        """
        share = step / max(1, self.steps - 1)
        return float(self.first_temperature * (self.last_temperature / self.first_temperature) ** share)

    def to_json(self) -> dict[str, Any]:
        """All settings."""
        return asdict(self)


def _default(name: str) -> Any:
    return next(field.default for field in fields(MaskRecipe) if field.name == name)
