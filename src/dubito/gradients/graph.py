"""The autograd graph of one forward pass, and where in its tensors each image lies.

The graph is the full record of how parameters were used: whatever a module calls, every use of a parameter is an edge
from the operation to that parameter. Nodes are distinguished by their place in the order in which the forward pass made
them, which a frozen model repeats.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.graph import Node

Signature = tuple[tuple[str, ...], ...]
"""The kind of each operation, and where its arguments come from: names of parameters, places of operations."""


@dataclass(frozen=True)
class Graph:
    """The operations that a result was made by.

    Attributes:
        nodes: In order of the forward pass, without parameters.
        order: The place of each node.
        leaves: The name of each parameter, by its node.
    """

    nodes: tuple[Node, ...]
    order: Mapping[Node, int]
    leaves: Mapping[Node, str]

    def signature(self) -> Signature:
        """Of a model that does the same with the same weights, the same."""
        return tuple((node.name(), *(self._named(source) for source, _ in node.next_functions)) for node in self.nodes)

    def _named(self, node: Node | None) -> str:
        return "" if node is None else self.leaves.get(node) or str(self.order.get(node, ""))


def graph_of(result: Tensor, leaves: Mapping[str, Tensor]) -> Graph:
    """The graph behind a result; parameters are named by `leaves`."""
    names = {id(leaf): name for name, leaf in leaves.items()}
    reached: set[Node] = set()
    known: dict[Node, str] = {}
    todo = [result.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in reached or node in known:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) in names:
                known[node] = names[id(variable)]
            continue
        reached.add(node)
        todo += [following for following, _ in node.next_functions]
    order: dict[Node, int] = {}
    for node in sorted(reached, key=lambda node: node._sequence_nr()):
        # What leads to no parameter is about other tensors that require gradients: a module may hold some.
        if any(source in known or source in order for source, _ in node.next_functions):
            order[node] = len(order)
    return Graph(tuple(order), order, known)


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

        >>> import torch
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
