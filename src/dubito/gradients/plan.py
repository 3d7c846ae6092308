"""Which operations of a model read which weights, learned once from five images and proved on two of them.

Two passes, of two and of three images, show which tensors grow with the batch: those are about images, all others are
made of weights alone. A weight is read wherever an operation on images meets a tensor of weights. Only one image of
each pass has a gradient, the first of two and the last of three, so what autograd itself gives is that image's own: the
rules are held against it, parameter by parameter, and a parameter for which they are wrong, or for which there are
none, is left to vmap (`sweep.py`).
"""

import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import Node

from dubito.errors import GradientFallbackWarning, ModelError, UnusedLayersWarning
from dubito.gradients.borrowed import Borrowed, layer_of
from dubito.gradients.cotangents import check_logits
from dubito.gradients.graph import Graph, Layout, Signature, Weight, graph_of, layout_of, norms_of, weight_at
from dubito.gradients.parts import Part
from dubito.gradients.rules import RULES, Meeting

_CLOSE = 1e-3
"""How far a squared norm may be from what autograd gives."""
_CLOSE_HALF = 5e-2
"""The same in half precision."""


@dataclass(frozen=True)
class Use:
    """An operation that reads a weight: its place in the graph, which argument it is, how images lie in its result."""

    node: int
    slot: int
    layout: Layout
    weight: Weight

    def part(self, graph: Graph, images: int, g: Float[Tensor, "..."]) -> Part | None:
        """What each image adds to the weight's gradient, from the gradient of the result; None without a rule."""
        node = graph.nodes[self.node]
        rule = RULES.get(node.name())
        return None if rule is None else rule(Meeting(node, self.slot, self.layout, self.weight.shape, images), g)


@dataclass(frozen=True)
class GradientPlan:
    """How to get at the gradients of a model.

    Attributes:
        signature: Of the graph that this is true for.
        layers: Their names in order of depth: first used, first named.
        parameters: Those with rules, with every place where they are read.
        slow: Those without, and why.
        last: Operations behind which nothing is needed any more.
    """

    signature: Signature
    layers: tuple[str, ...]
    parameters: dict[str, tuple[Use, ...]]
    slow: dict[str, str]
    last: tuple[int, ...]


def make_plan(borrowed: Borrowed, x: Float[Tensor, "n ..."]) -> GradientPlan:
    """The plan of a model for inputs like these."""
    some = x[torch.arange(3) % len(x)]
    _check_model(borrowed, some)
    two, three = Seen(borrowed, some[:2], only=0), Seen(borrowed, some, only=2)
    if not two.true:
        raise ModelError(
            f"gradient: the output of {borrowed.name} does not depend on its parameters in a differentiable way. "
            f"Look for detach(), no_grad() or rounding in its forward."
        )
    uses: dict[str, tuple[Use, ...]] = {}
    if two.graph.signature() == three.graph.signature():
        uses, slow = _uses(two, three)
        for seen in (two, three):
            slow = _wrong(seen, uses, borrowed.leaves) | slow
        uses = {name: each for name, each in uses.items() if name not in slow}
    else:
        slow = dict.fromkeys(two.true, "its operations change with the number of images")
    sources = [source for node in two.graph.nodes for source, _ in node.next_functions if source in two.graph.leaves]
    layers = tuple(dict.fromkeys(layer_of(two.graph.leaves[source]) for source in sources if source is not None))
    places = {use.node for each in uses.values() for use in each}
    return GradientPlan(two.graph.signature(), layers, uses, slow, _last(two.graph, places))


class Seen:
    """One small pass forward and back: its graph, every gradient in it, and those of parameters.

    Only one image has a gradient, so that those of parameters are its own.
    """

    def __init__(self, borrowed: Borrowed, x: Float[Tensor, "n ..."], only: int) -> None:
        logits = borrowed.logits(borrowed.inputs(x))
        self.images, self.only = len(x), only
        self.graph = graph_of(logits, borrowed.leaves)
        self.gradients: dict[tuple[int, int], Tensor] = {}
        cotangent = torch.zeros(logits.shape)
        cotangent[only] = torch.randn(logits.shape[1], generator=torch.Generator().manual_seed(0))
        names = list(self.graph.leaves.values())
        leaves = [borrowed.leaves[name] for name in names]
        with ExitStack() as hooks:
            for place, node in enumerate(self.graph.nodes):
                hooks.callback(node.register_prehook(partial(self._keep, place)).remove)
            gradients = torch.autograd.grad(logits, leaves, cotangent.to(logits), retain_graph=True) if leaves else ()
        self.true = dict(zip(names, gradients, strict=True))

    def about_images(self, node: Node, output: int, other: "Seen") -> bool:
        """Whether what a node gives grows with the batch, which another pass with more images shows."""
        key = (self.graph.order.get(node, -1), output)
        return key in self.gradients and self.gradients[key].shape != other.gradients[key].shape

    def _keep(self, place: int, gradients: Sequence[Tensor | None]) -> None:
        self.gradients |= {(place, output): g for output, g in enumerate(gradients) if g is not None}


@torch.no_grad()
def _uses(two: Seen, three: Seen) -> tuple[dict[str, tuple[Use, ...]], dict[str, str]]:
    """Every use of every parameter; and the parameters with a use for which there is no rule."""
    uses: dict[str, list[Use]] = defaultdict(list)
    slow: dict[str, str] = {}
    for place, node in enumerate(two.graph.nodes):
        if not two.about_images(node, 0, three):
            continue
        for slot, (source, output) in enumerate(node.next_functions):
            weights = source in two.graph.order or source in two.graph.leaves
            if source is None or not weights or two.about_images(source, output, three):
                continue
            g, operation = two.gradients[place, 0], node.name().removesuffix("Backward0")
            parameter = two.graph.leaves.get(source)
            values = two.true[parameter] if parameter else two.gradients[two.graph.order[source], output]
            weight = weight_at(two.graph, source, output, values.shape)
            layout = layout_of(g, three.gradients[place, 0])
            use = None if layout is None else Use(place, slot, layout, weight)
            for name in weight.parameters:
                if use is None:
                    slow[name] = f"images cannot be separated in what {operation} gives"
                elif use.part(two.graph, two.images, g) is None:
                    slow[name] = f"there is no rule for {operation}"
                else:
                    uses[name].append(use)
    return {name: tuple(each) for name, each in uses.items() if name not in slow}, slow


@torch.no_grad()
def _wrong(seen: Seen, uses: Mapping[str, Sequence[Use]], leaves: Mapping[str, Tensor]) -> dict[str, str]:
    """The parameters for which the rules do not give what autograd gives for one image, and 0 for the others."""
    truth = {name: float(g.double().square().sum()) for name, g in seen.true.items()}
    least = 1e-12 * sum(truth.values())
    wrong = {name: "no use of it was found" for name in truth if name not in uses}
    for name, each in uses.items():
        close = _CLOSE_HALF if leaves[name].dtype in (torch.float16, torch.bfloat16) else _CLOSE
        pairs = [(use.weight, use.part(seen.graph, seen.images, seen.gradients[use.node, 0])) for use in each]
        parts = [(weight, part) for weight, part in pairs if part is not None]
        try:
            ours = norms_of(parts, seen.graph, leaves[name], "squares").double()
        except RuntimeError as error:  # an operation on weights that cannot be done for several gradients at once
            wrong[name] = str(error).partition("\n")[0]
            continue
        expected = torch.zeros_like(ours)
        expected[seen.only] = truth[name]
        if not torch.allclose(ours, expected, rtol=close, atol=least):
            wrong[name] = "it is used in an unknown way"
    return wrong


def _check_model(borrowed: Borrowed, some: Float[Tensor, "n ..."]) -> None:
    """The logits of an image must have a gradient, and must not depend on the others of its batch."""
    logits = borrowed.logits(borrowed.inputs(some)).detach()
    check_logits(logits, borrowed.name)
    changed = torch.cat([some[:1], torch.zeros_like(some[1:])])
    before, after = logits[0], borrowed.logits(borrowed.inputs(changed))[0].detach()
    if not torch.allclose(before, after, rtol=1e-2, atol=1e-2 * float(before.abs().max())):
        raise ModelError(
            f"gradient: what {borrowed.name} predicts for an image depends on the other images of the batch, so "
            f"an image has no gradient of its own. Look for a BatchNorm without running statistics."
        )


def _last(graph: Graph, places: Collection[int]) -> tuple[int, ...]:
    """The operations among these with none of the others behind them: there a backward pass may end."""
    behind: set[int] = set()
    for place, node in enumerate(graph.nodes):
        following = {graph.order[source] for source, _ in node.next_functions if source and source in graph.order}
        if any(other in behind or other in places for other in following):
            behind.add(place)
    return tuple(sorted(set(places) - behind))


def warn_slow(borrowed: Borrowed, plan: GradientPlan) -> None:
    """Warn of what falls back."""
    by_reason: dict[str, dict[str, None]] = defaultdict(dict)
    for name, why in plan.slow.items():
        by_reason[why][layer_of(name)] = None
    for why, names in by_reason.items():
        warnings.warn(
            f"gradient: {_some(list(names))} of {borrowed.name} (of {len(plan.layers)} layers) cannot be "
            f"differentiated for a whole batch at once: {why}. torch.func does it image by image, which is "
            f"right but slow.",
            GradientFallbackWarning,
            stacklevel=2,
        )


def warn_unused(borrowed: Borrowed, plan: GradientPlan) -> None:
    """Warn of layers that are never used: they have no gradient, and no column."""
    chosen = dict.fromkeys(layer_of(name) for name, leaf in borrowed.leaves.items() if leaf.requires_grad)
    unused = [layer for layer in chosen if layer not in plan.layers]
    if unused:
        warnings.warn(
            f"gradient: what {borrowed.name} predicts for these images does not depend on {_some(unused)}, which get "
            f"no gradient and no column.",
            UnusedLayersWarning,
            stacklevel=2,
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
