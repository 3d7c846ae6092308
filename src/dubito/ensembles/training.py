"""How masks are learned: every setting that the paper leaves open, and the gradient steps on the masks' relaxation.

    loss = mean_m CE_m - weight * I[mask; M]

The weights of the model stay. Each step has rows of its own for every member; what a step sees depends on the seed and
its number alone.

The paper gives the weight of diversity, 2.0, and the number of members, 10, and nothing else. The defaults were chosen
on MNIST alone: masks of MLPs 784-512-256-10 and 784-2048-1024-10 were learned from 50,000 training images and compared
on the other 10,000, which the MLPs had seen, but the masks had not. The goal was high diversity of members that lose at
most one per cent of accuracy: `diversity_over` decides that, and the other settings hardly matter within factors of
three. No out-of-distribution images were used.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Int
from torch import Tensor

from dubito.cache.runner import bar
from dubito.ensembles.masks import DiversityOver, LayerMasks, Span, binarised, by_layer, diversity
from dubito.errors import TableError, ValueRangeError
from dubito.heads.stream import generator
from dubito.validate import check_choice

Run = Callable[[dict[str, LayerMasks], Tensor], Tensor]
"""The model with masks: rows of a batch in m equal parts to logits (r, c)."""


@dataclass(frozen=True)
class MaskRecipe:
    """Settings of `extract_members` and `HeadMasks`.

    Loss of a step: mean over members of the cross-entropy - diversity_weight * I[mask; M]. Adam, without weight decay.

    Attributes:
        diversity_weight: Weight of the diversity, 2.0 in the paper. With 0, members differ only by their random start.
        diversity_over: "units" divides I[mask; M] by the number of units, so that it is at most log 2, comparable to a
            cross-entropy. "masks" takes the mean within each vector of rows or columns and sums these; it is stronger
            with many layers. "sum" divides by nothing; with thousands of units cross-entropy hardly counts any more,
            and members are very different and mostly wrong. OPEN in the paper.
        steps: Number of gradient steps. OPEN in the paper.
        batch: Rows per step, divided equally among the members.
        rate: Adam's learning rate of theta.
        first_temperature: tau of q = sigmoid(theta / tau) in the first step. OPEN in the paper, whether there is one.
        last_temperature: tau in the last step; in between it falls by a constant factor per step. Low values leave few
            masks undecided, so that binarising changes little.
        start: Initial mean of theta: 0 keeps and drops units equally often, positive values keep more.
        spread: Initial standard deviation of theta; with 0 all members would stay the same.
        binarise: Whether masks become 0 and 1, cut at q = 1/2, so that members are smaller models. Otherwise members
            keep every weight, scaled by q. OPEN in the paper.
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
        check_choice(self.diversity_over, get_args(DiversityOver), by="MaskRecipe", what="diversity_over")
        positive = ("rate", "first_temperature", "last_temperature", "steps", "batch")
        not_negative = ("diversity_weight", "spread")
        rules = [
            *((name, 0 < getattr(self, name) < math.inf, "positive and finite") for name in positive),
            *((name, 0 <= getattr(self, name) < math.inf, "finite and not negative") for name in not_negative),
            ("start", abs(self.start) < math.inf, "finite"),
        ]
        for name, valid, expected in rules:
            if not valid:
                raise ValueRangeError(
                    f"MaskRecipe: {name} must be {expected}; got {getattr(self, name)}. The default is "
                    f"{getattr(MaskRecipe, name)}."
                )

    def temperature(self, step: int) -> float:
        """Tau of a step.

        >>> [round(MaskRecipe(steps=3, last_temperature=0.25).temperature(step), 3) for step in range(3)]
        [1.0, 0.5, 0.25]
        """
        share = step / max(1, self.steps - 1)
        return float(self.first_temperature * (self.last_temperature / self.first_temperature) ** share)

    def to_json(self) -> dict[str, Any]:
        """All settings as plain values."""
        return asdict(self)


def trained_masks(
    run: Run,
    batches: Iterable[tuple[Tensor, Int[Tensor, "r"]]],
    spans: Sequence[Span],
    *,
    members: int,
    recipe: MaskRecipe,
    seed: int,
    progress: bool,
) -> Float[Tensor, "m j"]:
    """The masks of all members, one row per member: 0 and 1 if they are binarised, otherwise between them."""
    width = sum(span.width for span in spans)
    drawn = torch.randn(members, width, generator=generator("masks", seed))
    theta: Tensor | None = None
    with bar("masks", recipe.steps, unit="steps", show=progress) as advance:
        for step, (x, y) in enumerate(batches):
            if theta is None:  # on the device of the batches
                theta = (recipe.start + recipe.spread * drawn).to(x.device).requires_grad_()
                optimizer = torch.optim.Adam([theta], lr=recipe.rate)
            q = torch.sigmoid(theta / recipe.temperature(step))
            entropy = F.cross_entropy(run(by_layer(q, spans), x).float(), y)
            information = diversity(q, spans, recipe.diversity_over)
            (theta.grad,) = torch.autograd.grad(entropy - recipe.diversity_weight * information, [theta])
            optimizer.step()
            advance(1, f"cross-entropy {entropy.item():.3f}, diversity {information.item():.3f}")
    if theta is None:
        raise AssertionError("a recipe has at least one step")
    if not bool(theta.isfinite().all()):
        raise ValueRangeError(
            "masks became NaN: the model's logits or their gradients are not finite. Look for NaN in the inputs, or "
            "lower the rate of the recipe."
        )
    q = torch.sigmoid(theta.detach() / recipe.temperature(recipe.steps - 1))
    return binarised(q, spans) if recipe.binarise else q


def rows_per_member(rows: int, members: int, recipe: MaskRecipe) -> int:
    """How many rows of a step each member gets; a step has no more rows than there are."""
    if members < 1:
        raise ValueRangeError(f"members must be at least 1; got {members}. The paper extracts 10.")
    if rows < members:
        raise TableError(
            f"masks of {members} members need at least {members} labelled rows; got {rows}. Give more images."
        )
    return max(1, min(recipe.batch, rows) // members)


def shuffled(rows: int, size: int, steps: int, seed: int) -> Iterable[Int[Tensor, "r"]]:
    """Indices of `size` rows for each step, from one random order of all rows after the other, leaving out the rest."""
    done, turn = 0, 0
    while done < steps:
        order = torch.randperm(rows, generator=generator("rows", seed, turn))
        for chosen in torch.split(order[: rows // size * size], size)[: steps - done]:
            yield chosen
            done += 1
        turn += 1


def check_labels(y: Int[Tensor, "n"], classes: int, by: str) -> None:
    """Raise TableError unless every label is one of the model's classes."""
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise TableError(
            f"{by}: labels must be classes of the model, from 0 to {classes - 1}; got {int(y.min())} to "
            f"{int(y.max())}. Give the labels that the model was trained with."
        )


def random_masks(spans: Sequence[Span], device: torch.device) -> dict[str, LayerMasks]:
    """Arbitrary masks of two members, always the same."""
    drawn = torch.rand(2, sum(span.width for span in spans), generator=generator("check"))
    return by_layer(drawn.to(device), spans)
