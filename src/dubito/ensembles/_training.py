"""The masks of all members at once, by gradient steps on their relaxation; the weights of the model stay.

    loss = mean_m CE_m - weight * I[mask; M]

Each step has rows of its own for every member. What a step sees depends on the seed and its number alone.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Int
from torch import Tensor

from dubito.cache.progress import bar
from dubito.ensembles.masks import LayerMasks, Span, binarised, by_layer, diversity
from dubito.ensembles.recipe import MaskRecipe
from dubito.errors import TableError, ValueRangeError
from dubito.heads.stream import generator

Run = Callable[[dict[str, LayerMasks], Tensor], Tensor]
"""The model with masks: rows of a batch in m equal parts to logits (r, c)."""


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
    """All masks of a member in one line, between 0 and 1, or of 0 and 1 if they are binarised."""
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
            told = diversity(q, spans, recipe.diversity_over)
            (theta.grad,) = torch.autograd.grad(entropy - recipe.diversity_weight * told, [theta])
            optimizer.step()
            advance(1, f"cross-entropy {entropy.item():.3f}, diversity {told.item():.3f}")
    if theta is None:
        raise AssertionError("a recipe has one step at least")
    if not bool(theta.isfinite().all()):
        raise ValueRangeError(
            "masks became NaN: the model's logits or their gradients are not finite. Look for NaN in the inputs, or "
            "lower the rate of the recipe."
        )
    q = torch.sigmoid(theta.detach() / recipe.temperature(recipe.steps - 1))
    return binarised(q, spans) if recipe.binarise else q


def rows_each(rows: int, members: int, recipe: MaskRecipe) -> int:
    """How many rows of a step each member has; a step has no more rows than there are."""
    if members < 1:
        raise ValueRangeError(f"members must be 1 at least; got {members}. The paper extracts 10.")
    if rows < members:
        raise TableError(
            f"masks of {members} members need {members} labelled rows at least; got {rows}. Give more images."
        )
    return max(1, min(recipe.batch, rows) // members)


def shuffled(rows: int, size: int, steps: int, seed: int) -> Iterable[Int[Tensor, "r"]]:
    """Indices of `size` rows for each step, from one order of all after the other; what is left over waits."""
    done, turn = 0, 0
    while done < steps:
        order = torch.randperm(rows, generator=generator("rows", seed, turn))
        for chosen in torch.split(order[: rows // size * size], size)[: steps - done]:
            yield chosen
            done += 1
        turn += 1


def checked_labels(y: Int[Tensor, "n"], classes: int, where: str) -> None:
    """Raise unless every label is one of the model's classes."""
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise TableError(
            f"{where}: labels must be classes of the model, from 0 to {classes - 1}; {int(y.min())} to {int(y.max())} "
            f"came. Give the labels that the model was trained with."
        )


def random_masks(spans: Sequence[Span], device: torch.device) -> dict[str, LayerMasks]:
    """Two members with any masks, always the same."""
    drawn = torch.rand(2, sum(span.width for span in spans), generator=generator("check"))
    return by_layer(drawn.to(device), spans)
