"""The autograd graph of one forward pass: where in its tensors each image lies, and which weights operations read.

The graph is the full record of how parameters were used: whatever a module calls, every use of a parameter is an edge
from the operation to that parameter. Nodes are distinguished by their place in the order in which the forward pass made
them, which a frozen model repeats.

A weight is a parameter, the same numbers laid out anew, or something computed from parameters:

    G_parameter = (d weight / d parameter)^T G_weight

For a parameter and its views that is a rearrangement, so norms stay. For weights that are computed (standardised,
normalised, picked from a table) it is a product with the Jacobian of that computation, for a few images at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from dubito.gradients.parts import Measure, Part, measured, norms

Signature = tuple[tuple[str, ...], ...]
"""The kind of each operation, and where its arguments come from: names of parameters, places of operations."""
_SAME = {
    *("TBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "PermuteBackward0"),
    *("TransposeBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
    *("AliasBackward0", "CloneBackward0", "ToCopyBackward0"),
}
"""Operations that only lay out the numbers of a weight anew: norms stay what they are."""


class Graph:
    """The operations that a result was made by.

    Args:
        result: The result.
        leaves: The parameters by name.

    Attributes:
        nodes: In order of the forward pass, without parameters.
        order: The place of each node.
        leaves: The name of each parameter, by its node.
    """

    def __init__(self, result: Tensor, leaves: Mapping[str, Tensor]) -> None:
        names = {id(leaf): name for name, leaf in leaves.items()}
        variables = {node: getattr(node, "variable", None) for node in _behind(result.grad_fn)}
        self.leaves = {node: names[id(variable)] for node, variable in variables.items() if id(variable) in names}
        self.order: dict[Node, int] = {}
        operations = [node for node, variable in variables.items() if variable is None]
        for node in sorted(operations, key=lambda node: node._sequence_nr()):
            # What leads to no parameter is about other tensors that require gradients: a module may hold some.
            if any(source in self.leaves or source in self.order for source, _ in node.next_functions):
                self.order[node] = len(self.order)
        self.nodes = tuple(self.order)

    def signature(self) -> Signature:
        """Of a model that does the same with the same weights, the same."""
        names: dict[Node | None, str] = {node: str(place) for node, place in self.order.items()}
        names.update(self.leaves.items())
        return tuple(
            (node.name(), *(names.get(source, "") for source, _ in node.next_functions)) for node in self.nodes
        )


@dataclass(frozen=True)
class Layout:
    """Where in a tensor the images of a batch lie: along one axis, perhaps with tokens or windows beside them.

    Attributes:
        axis: Whose length is images * each.
        each: Rows of the axis that belong to one image.
        last: Images change fastest along the axis (token 0 of all images first), as where tokens come before images.
    """

    axis: int
    each: int = 1
    last: bool = False

    def rows(self, values: Shaped[Tensor, "..."], images: int) -> Shaped[Tensor, "n t ..."]:
        """The tensor by image; what an image has several of, also copies of itself, lies along the second axis.

        >>> tokens_first = torch.arange(6).view(6, 1)  # two tokens of three images
        >>> Layout(0, each=2, last=True).rows(tokens_first, 3).flatten(1).tolist()
        [[0, 3], [1, 4], [2, 5]]
        """
        values = values.movedim(self.axis, 0)
        rest = values.shape[1:]
        copies = len(values) // (images * self.each)
        if not self.last or self.each == 1:
            return values.reshape(images, copies * self.each, *rest)
        by_token = values.reshape(self.each, images, copies, *rest)
        return by_token.transpose(0, 1).reshape(images, self.each * copies, *rest)


def layout_of(two: Shaped[Tensor, "..."], three: Shaped[Tensor, "..."]) -> Layout | None:
    """How images lie in a tensor.

    One image's numbers would not do: those of a single token, such as a class token, fit both orders. The first of two
    images and the last of three together do not, whichever tokens have numbers.

    Args:
        two: The tensor for two images, of which only the first has numbers that are not zero.
        three: The tensor for three images, of which only the last has.

    Returns:
        None where not just one axis grows with the images, or images lie along it in another way; also where an image
        has several rows and no numbers at all, which fits every order.
    """
    grown = [axis for axis, (a, b) in enumerate(zip(two.shape, three.shape, strict=True)) if a != b]
    if len(grown) != 1 or two.shape[grown[0]] * 3 != three.shape[grown[0]] * 2:
        return None
    axis, each = grown[0], two.shape[grown[0]] // 2
    if each > 1 and not (two.any() and three.any()):
        return None
    for layout in [Layout(axis, each)] if each == 1 else [Layout(axis, each), Layout(axis, each, last=True)]:
        if not layout.rows(two, 2)[1:].any() and not layout.rows(three, 3)[:2].any():
            return layout
    return None


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
    way: Signature | None


def weight_at(graph: Graph, node: Node, output: int, shape: torch.Size) -> Weight:
    """The weight that an edge leads to."""
    if node in graph.leaves:
        return Weight(graph.leaves[node], shape, (graph.leaves[node],), ())
    source = (graph.order[node], output)
    way: list[tuple[str, ...]] = []
    current: Any = node
    while current not in graph.leaves and current.name() in _SAME and len(current.next_functions) == 1:
        saved = sorted(name for name in dir(current) if name.startswith("_saved"))
        way.append((current.name(), *(f"{name}={getattr(current, name)}" for name in saved)))
        current = current.next_functions[0][0]
    if current in graph.leaves:
        return Weight(source, shape, (graph.leaves[current],), tuple(way))
    return Weight(source, shape, tuple(graph.leaves[each] for each in _behind(node) if each in graph.leaves), None)


def norms_of(parts: Sequence[tuple[Weight, Part]], graph: Graph, leaf: Tensor, measure: Measure) -> Float[Tensor, "n"]:
    """||G||_2^2 or ||G||_1 of one parameter, from every use of it; added as they are if all read it in one layout."""
    way = parts[0][0].way
    if way is not None and all(weight.way == way for weight, _ in parts):
        return norms([part for _, part in parts], measure)
    return torch.cat([measured(made, measure) for made in brought_home(parts, graph, leaf)])


def brought_home(parts: Sequence[tuple[Weight, Part]], graph: Graph, leaf: Tensor) -> Iterator[Float[Tensor, "n ..."]]:
    """Gradients of a parameter from those of all weights that are made of it, of a few images at a time."""
    each = 2 * leaf.numel() + sum(weight.shape.numel() for weight, _ in parts)
    for together in zip(*(part.blocks(each) for _, part in parts), strict=True):
        total = torch.zeros(())
        for (weight, _), part in zip(parts, together, strict=True):
            gradients = part.made().reshape(-1, *weight.shape)
            if not isinstance(weight.source, str):
                edge = GradientEdge(graph.nodes[weight.source[0]], weight.source[1])
                cotangents = [gradients.to(leaf.dtype)]
                gradients = torch.autograd.grad([edge], [leaf], cotangents, is_grads_batched=True, retain_graph=True)[0]
            total = total + gradients
        yield total


def _behind(node: Node | None) -> list[Node]:
    """A node and all that its result is made of."""
    reached: dict[Node, None] = {}
    todo = [node]
    while todo:
        current = todo.pop()
        if current is not None and current not in reached:
            reached[current] = None
            todo += [source for source, _ in current.next_functions]
    return list(reached)
