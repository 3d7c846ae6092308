"""Weights as operations read them: a parameter, the same numbers laid out anew, or something computed from parameters.

    G_parameter = (d weight / d parameter)^T G_weight

For a parameter and its views that is a rearrangement, so norms stay. For weights that are computed (standardised,
normalised, picked from a table) it is a product with the Jacobian of that computation, for a few images at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from dubito.gradients.graph import Graph
from dubito.gradients.parts import Part, made_of, squares, totals
from dubito.gradients.rules import SAME

Way = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Weight:
    """A tensor made of parameters alone.

    Attributes:
        source: Where the graph has it: a parameter's name, or the place and the output of an operation.
        shape: Its shape.
        parameters: What it is made of.
        way: The operations from its only parameter to it, where they only lay out numbers anew; None where they do not.
    """

    source: str | tuple[int, int]
    shape: torch.Size
    parameters: tuple[str, ...]
    way: Way | None


def weight_at(graph: Graph, node: Node, output: int, shape: torch.Size) -> Weight:
    """The weight that an edge leads to."""
    if node in graph.leaves:
        return Weight(graph.leaves[node], shape, (graph.leaves[node],), ())
    source = (graph.order[node], output)
    way: list[tuple[str, ...]] = []
    current: Any = node
    while current not in graph.leaves and current.name() in SAME and len(current.next_functions) == 1:
        saved = sorted(name for name in dir(current) if name.startswith("_saved"))
        way.append((current.name(), *(f"{name}={getattr(current, name)}" for name in saved)))
        current = current.next_functions[0][0]
    if current in graph.leaves:
        return Weight(source, shape, (graph.leaves[current],), tuple(way))
    return Weight(source, shape, _behind(graph, node), None)


def alike(weights: Sequence[Weight]) -> bool:
    """Whether several operations read one parameter in one layout, so that gradients can be added as they are."""
    return weights[0].way is not None and all(weight.way == weights[0].way for weight in weights)


def squares_of(parts: Sequence[tuple[Weight, Part]], graph: Graph, leaf: Tensor) -> Float[Tensor, "n"]:
    """||G||_2^2 of one parameter, from every use of it."""
    if alike([weight for weight, _ in parts]):
        return squares([part for _, part in parts])
    return torch.cat([made.reshape(len(made), -1).square().sum(1) for _, made in brought_home(parts, graph, leaf)])


def totals_of(parts: Sequence[tuple[Weight, Part]], graph: Graph, leaf: Tensor) -> Float[Tensor, "n"]:
    """||G||_1 of one parameter, from every use of it."""
    if alike([weight for weight, _ in parts]):
        return totals([part for _, part in parts])
    return torch.cat([made.reshape(len(made), -1).abs().sum(1) for _, made in brought_home(parts, graph, leaf)])


def brought_home(
    parts: Sequence[tuple[Weight, Part]], graph: Graph, leaf: Tensor
) -> Iterator[tuple[slice, Float[Tensor, "n ..."]]]:
    """Gradients of a parameter from those of all weights that are made of it, of a few images at a time."""
    each = 2 * leaf.numel() + sum(weight.shape.numel() for weight, _ in parts)
    blocks = [made_of([part], each=each) for _, part in parts]
    for together in zip(*blocks, strict=True):
        some, total = together[0][0], torch.zeros(())
        for (weight, _), (_, made) in zip(parts, together, strict=True):
            total = total + _home(weight, made.reshape(-1, *weight.shape), graph, leaf)
        yield some, total


def _home(weight: Weight, made: Float[Tensor, "n ..."], graph: Graph, leaf: Tensor) -> Float[Tensor, "n ..."]:
    if isinstance(weight.source, str):
        return made
    place, output = weight.source
    edge = GradientEdge(graph.nodes[place], output)
    gradient: Tensor = torch.autograd.grad(
        [edge], [leaf], [made.to(leaf.dtype)], is_grads_batched=True, retain_graph=True
    )[0]
    return gradient


def _behind(graph: Graph, node: Node) -> tuple[str, ...]:
    """All parameters that a node's result is made of."""
    names: dict[str, None] = {}
    seen: set[Node] = set()
    todo: list[Any] = [node]
    while todo:
        current = todo.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        if current in graph.leaves:
            names[graph.leaves[current]] = None
        else:
            todo += [following for following, _ in current.next_functions]
    return tuple(names)
