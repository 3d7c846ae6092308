"""Masks on linear layers, one vector of rows and one of columns per layer and member, and how they are learned.

    y = r_m * (W (c_m * x) + b)        q = sigmoid(theta / tau),   r_m and c_m are parts of q_m

The outer product of rows and columns selects the weights, and a bias goes with its row (Kirsch 2024, section 4.1 and
A.4). How different members are is the mutual information between the mask and the member's index,

    I[mask; M] = sum_j H_b(mean_m q_mj) - mean_m H_b(q_mj)

with H_b the entropy of a coin, in nats: zero where all members keep the same units, log 2 per unit where half of them
keep it and half do not. The paper names this quantity and its weight of 2.0, but not how it is computed: the sum over
independent units is our reading, and so is what it is divided by (`diversity_over`).

Masks are learned by gradient steps on theta; the weights of the model stay:

    loss = mean_m CE_m - weight * I[mask; M]

Each step has rows of its own for every member; what a step sees depends on the seed and its number alone. The paper
gives the weight of diversity and the number of members, 10, and nothing else. The other defaults were chosen on MNIST,
without out-of-distribution images: masks of MLPs 784-512-256-10 and 784-2048-1024-10 were learned from 50,000 training
images and compared on the other 10,000, which the MLPs had seen, but the masks had not. For diverse members that lose
at most one per cent of accuracy, `diversity_over` decides; the other settings hardly matter within factors of three.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Int
from torch import Tensor

from dubito.cache.runner import bar
from dubito.errors import TableError, ValueRangeError
from dubito.heads.stream import generator
from dubito.validate import check_choice, check_number

DiversityOver = Literal["units", "masks", "sum"]
"""How the diversity is normalised: the mean over all units, the mean within each mask, or no mean at all."""
Spans = Mapping[tuple[str, str], int]
"""The parts of the vector q_m in their order: by layer and side ("rows" or "columns"), the number of units."""
_NEAREST = 1e-6
"""Probabilities stay this far from 0 and 1, where the slope of the entropy is infinite."""
_INTERVALS = {
    **dict.fromkeys(("steps", "batch"), "[1, inf)"),
    **dict.fromkeys(("rate", "first_temperature", "last_temperature"), "(0, inf)"),
    **dict.fromkeys(("diversity_weight", "spread"), "[0, inf)"),
    "start": "[-100, 100]",
}


@dataclass(frozen=True)
class MaskRecipe:
    """Settings of `extract_members` and `HeadMasks`; OPEN marks what the paper does not give.

    Attributes:
        diversity_weight: Weight of the diversity, 2.0 in the paper. With 0, members differ only by their random start.
        diversity_over: "units" divides I[mask; M] by the number of units: at most log 2, comparable to a cross-entropy.
            "masks" sums the means within each vector of rows or columns, which is stronger with many layers. "sum"
            divides by nothing; with thousands of units cross-entropy hardly counts any more, and members are very
            different and mostly wrong. OPEN.
        steps: Number of gradient steps. OPEN.
        batch: Rows per step, divided equally among the members.
        rate: Learning rate of theta, by Adam without weight decay.
        first_temperature: tau of q = sigmoid(theta / tau) in the first step. OPEN, whether there is one.
        last_temperature: tau in the last step; in between it falls by a constant factor per step. Low values leave few
            masks undecided, so that binarising changes little.
        start: Initial mean of theta: 0 keeps and drops units equally often, positive values keep more.
        spread: Initial standard deviation of theta; with 0 all members would stay the same.
        binarise: Whether masks are cut at q = 1/2, so that members are smaller; otherwise q scales all weights. OPEN.
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
        for name, interval in _INTERVALS.items():
            hint = f"The default is {getattr(MaskRecipe, name)}."
            whole = name in ("steps", "batch")
            check_number(getattr(self, name), interval, by="MaskRecipe", what=name, whole=whole, hint=hint)

    def temperature(self, step: int) -> float:
        """Tau of a step.

        >>> [round(MaskRecipe(steps=3, last_temperature=0.25).temperature(step), 3) for step in range(3)]
        [1.0, 0.5, 0.25]
        """
        share = step / max(1, self.steps - 1)
        return float(self.first_temperature * (self.last_temperature / self.first_temperature) ** share)


class LayerMasks(NamedTuple):
    """The masks of one layer, one row per member; `rows` is None where all rows stay, as those of classes."""

    rows: Float[Tensor, "m out"] | None
    columns: Float[Tensor, "m in"]


def mask_diversity(q: Float[Tensor, "m j"]) -> Float[Tensor, "j"]:
    """H_b(mean_m q_mj) - mean_m H_b(q_mj) of every unit: its information about the member, from 0 to log 2.

    >>> per_unit = mask_diversity(torch.tensor([[1.0, 1.0, 0.5], [0.0, 1.0, 0.5]]))
    >>> [round(float(unit), 3) for unit in per_unit]
    [0.693, 0.0, 0.0]
    """
    q = q.clamp(_NEAREST, 1 - _NEAREST)
    return _coin_entropy(q.mean(0)) - _coin_entropy(q).mean(0)


def diversity(q: Float[Tensor, "m j"], spans: Spans, over: DiversityOver) -> Float[Tensor, ""]:
    """I[mask; M] of masks with one row per member, normalised as `MaskRecipe.diversity_over` describes."""
    each = mask_diversity(q)
    if over == "masks":
        return torch.stack([part.mean() for part in torch.split(each, [*spans.values()])]).sum()
    return each.mean() if over == "units" else each.sum()


def by_layer(q: Float[Tensor, "m j"], spans: Spans) -> dict[str, LayerMasks]:
    """The masks of all members by layer."""
    parts = dict(zip(spans, torch.split(q, [*spans.values()], dim=1), strict=True))
    return {layer: LayerMasks(parts.get((layer, "rows")), parts[layer, "columns"]) for layer, _ in spans}


def binarised(q: Float[Tensor, "m j"], spans: Spans) -> Float[Tensor, "m j"]:
    """1 where q is above one half, otherwise 0; a mask that would keep nothing keeps its most likely unit."""
    parts = []
    for part in torch.split(q, [*spans.values()], dim=1):
        kept = part > 0.5
        best = F.one_hot(part.argmax(1), part.shape[1]).bool()
        parts.append(kept | (best & ~kept.any(1, keepdim=True)))
    return torch.cat(parts, dim=1).to(q.dtype)


def of_member(masks: Mapping[str, LayerMasks], member: int) -> dict[str, LayerMasks]:
    """The masks of one member, as those of an ensemble of one."""
    one = slice(member, member + 1)
    return {
        name: LayerMasks(None if mask.rows is None else mask.rows[one], mask.columns[one])
        for name, mask in masks.items()
    }


def trained_masks(
    run: Callable[[dict[str, LayerMasks], Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Int[Tensor, "r"]]],
    spans: Spans,
    *,
    members: int,
    recipe: MaskRecipe,
    seed: int,
    progress: bool,
    device: torch.device | None = None,
) -> Float[Tensor, "m j"]:
    """The masks of all members, one row per member: 0 and 1 if they are binarised, otherwise between them.

    `run` is the model with masks: it maps the rows of a batch, in m equal parts, to logits (r, c).
    """
    drawn = torch.randn(members, sum(spans.values()), generator=generator("masks", seed))
    theta = (recipe.start + recipe.spread * drawn).to(device).requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=recipe.rate)
    with bar("masks", recipe.steps, unit="steps", show=progress) as advance:
        for step, (x, y) in enumerate(batches):
            q = torch.sigmoid(theta / recipe.temperature(step))
            entropy = F.cross_entropy(run(by_layer(q, spans), x).float(), y)
            information = diversity(q, spans, recipe.diversity_over)
            (theta.grad,) = torch.autograd.grad(entropy - recipe.diversity_weight * information, [theta])
            optimizer.step()
            advance(1, f"cross-entropy {entropy.item():.3f}, diversity {information.item():.3f}")
    if not bool(theta.isfinite().all()):
        raise ValueRangeError(
            "masks became NaN: the model's logits or their gradients are not finite. Look for NaN in the inputs, or "
            "lower the rate of the recipe."
        )
    q = torch.sigmoid(theta.detach() / recipe.temperature(recipe.steps - 1))
    return binarised(q, spans) if recipe.binarise else q


def rows_each(rows: int, members: int, recipe: MaskRecipe) -> int:
    """How many rows of a step each member gets; a step has no more rows than there are."""
    check_number(members, "[1, inf)", by="masks", what="members", whole=True, hint="The paper extracts 10.")
    if rows < members:
        raise TableError(
            f"masks of {members} members need at least {members} labelled rows; got {rows}. Pass more images."
        )
    return max(1, min(recipe.batch, rows) // members)


def _coin_entropy(q: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return -(q * q.log() + (1 - q) * (-q).log1p())
