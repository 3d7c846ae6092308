"""Which operations of a model read which weights, learned once from five images and proved on two of them.

The autograd graph is the full record of how parameters were used: whatever a module calls, every use of a parameter is
an edge from the operation to that parameter. Nodes are distinguished by their place in the order in which the forward
pass made them, which a frozen model repeats. Two passes, of two and of three images, show which tensors grow with the
batch: those are about images. All others are weights: parameters, their numbers laid out anew, or computed from them.

    G_parameter = (d weight / d parameter)^T G_weight

For a parameter and its views that is a rearrangement, so norms stay. For weights that are computed (standardised,
normalised, picked from a table) it is a product with the Jacobian of that computation, for a few images at a time.

Only one image of each pass has a gradient, the first of two and the last of three, so what autograd itself gives is
that image's own: the rules are held against it, parameter by parameter, and a parameter for which they are wrong, or
for which there are none, is left to vmap (`sweep.py`).
"""

import copy
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.func import functional_call

from dubito.data.image_set import some
from dubito.errors import GradientFallbackWarning, ModelError, UnusedLayersWarning, ValueRangeError, first_words
from dubito.gradients.parts import Measure, Part, measured, norms
from dubito.gradients.rules import RULES, Layout, WeightUse, layout_of
from dubito.models.frozen import frozen
from dubito.models.outputs import output_of
from dubito.models.wrap import eager, sample_of
from dubito.types import Classifier

Signature = tuple[tuple[str, ...], ...]
"""The kind of each operation, and where its arguments come from: names of parameters, places of operations."""
_SAME = {
    *("TBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "PermuteBackward0"),
    *("TransposeBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
    *("AliasBackward0", "CloneBackward0", "ToCopyBackward0"),
}
"""Operations that only lay out the numbers of a weight anew: norms stay what they are."""
_CLOSE = 1e-3
"""How far a squared norm may be from what autograd gives."""
_CLOSE_HALF = 5e-2
"""The same in half precision."""
_TINY = 1e-38
"""A probability of zero has no logarithm."""


class Borrowed:
    """A classifier's module with stand-ins for its parameters: it can be differentiated, and nothing of it changes.

    The stand-ins share the parameters' memory, require gradients whatever the parameters say, and never get a `.grad`.
    They are put into a copy of everything else about the module, so that what a forward pass writes down (counters,
    tables that are computed once) is written there. A module that cannot be copied is lent them for each pass.

    Args:
        model: The classifier.
        layers: Whose parameters to differentiate by, named as `layer_of` does; None: all.

    Attributes:
        leaves: The stand-ins by name; shared parameters have one.
    """

    def __init__(self, model: Classifier, layers: Collection[str] | None = None) -> None:
        own = eager(model.module)
        self.name = model.name
        self.leaves: dict[str, Tensor] = {}
        memo: dict[int, Any] = {}
        for name, parameter in own.named_parameters():
            values = (parameter.clone() if parameter.is_inference() else parameter).detach()
            trained = values.is_floating_point() and (layers is None or layer_of(name) in layers)
            memo[id(parameter)] = stand_in = nn.Parameter(values, requires_grad=trained)
            if values.is_floating_point():
                self.leaves[name] = stand_in
        if not self.leaves:
            raise ModelError(
                f"gradient: {model.name} has no parameters to differentiate by. Use a score of logits or features."
            )
        self._own = self.module = own
        with suppress(Exception):  # whatever a module holds that has no copy: locks, files, tensors with a graph
            copied = copy.deepcopy(own, dict(memo))
            if {id(parameter) for parameter in copied.parameters()} <= {id(stand_in) for stand_in in memo.values()}:
                self.module = copied
        self._copied = self.module is not own
        self._output, self._key = getattr(model, "output", "logits"), getattr(model, "output_key", None)

    def refresh(self) -> None:
        """Take over what may have changed since: parameters share their memory, buffers of a copy do not."""
        theirs = dict(self._own.named_buffers())
        with torch.no_grad():
            for name, buffer in self.module.named_buffers() if self._copied else ():
                if name in theirs:  # a forward pass may have made further ones
                    buffer.copy_(theirs[name])

    def inputs(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Where the module is, in its precision, and not the user's own: a module may write into it."""
        like = sample_of(self.module)
        with torch.inference_mode(False):
            return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype, copy=True).detach()

    def logits(self, x: Float[Tensor, "n ..."], instead: Mapping[str, Tensor] | None = None) -> Float[Tensor, "n c"]:
        """The logits of inputs, with their graph; of probabilities, their logarithm.

        With other stand-ins for some parameters, only those are differentiated by.
        """
        leaves = self.leaves if instead is None else {name: leaf.detach() for name, leaf in self.leaves.items()}
        if self._copied:
            self.module.train().eval()  # what a module has computed once and kept, it forgets when it is trained
        with frozen(self.module), torch.enable_grad():
            out = functional_call(self.module, {**leaves, **(instead or {})}, (x,))
            output = output_of(out, len(x), self.name, self._key)
            return output.clamp_min(_TINY).log() if self._output == "probabilities" else output


def layer_of(parameter: str) -> str:
    """The layer that a parameter belongs to: the module that holds it, or itself where the whole model does.

    >>> layer_of("layer1.0.conv1.weight"), layer_of("cls_token"), layer_of("fc.parametrizations.weight.original0")
    ('layer1.0.conv1', 'cls_token', 'fc')
    """
    owner, parametrized, _ = parameter.partition(".parametrizations.")
    return owner if parametrized else parameter.rpartition(".")[0] or parameter


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
        ids: Mapping[Any, str] = {node: str(place) for node, place in self.order.items()} | self.leaves
        return tuple((node.name(), *(ids.get(source, "") for source, _ in node.next_functions)) for node in self.nodes)


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
        return None if rule is None else rule(WeightUse(node, self.slot, self.layout, self.weight.shape, images), g)


class GradientPlan:
    """How to get at the gradients of a model, for inputs of one shape.

    Args:
        borrowed: The model's module.
        x: Some inputs.

    Attributes:
        signature: Of the graph that this is true for.
        layers: Their names in order of depth: first used, first named.
        parameters: Those with rules, with every place where they are read.
        slow: Those without, and why.
        last: Operations behind which nothing is needed any more.
    """

    def __init__(self, borrowed: Borrowed, x: Float[Tensor, "n ..."]) -> None:
        self.borrowed = borrowed
        images = x[torch.arange(3) % len(x)]
        _check_model(borrowed, images)
        two, three = Seen(borrowed, images[:2], only=0), Seen(borrowed, images, only=2)
        if not two.true:
            raise ModelError(
                f"gradient: the output of {borrowed.name} does not depend on its parameters in a differentiable way. "
                f"Look for detach(), no_grad() or rounding in its forward."
            )
        graph = two.graph
        self.signature = graph.signature()
        self.parameters: dict[str, tuple[Use, ...]] = {}
        self.slow = dict.fromkeys(two.true, "its operations change with the number of images")
        if self.signature == three.graph.signature():
            uses, self.slow = _uses(two, three)
            for seen in (two, three):
                self.slow = _wrong(seen, uses, borrowed.leaves) | self.slow
            self.parameters = {name: each for name, each in uses.items() if name not in self.slow}
        sources = [source for node in graph.nodes for source, _ in node.next_functions if source in graph.leaves]
        self.layers = tuple(dict.fromkeys(layer_of(graph.leaves[source]) for source in sources if source is not None))
        self.last = _last(graph, {use.node for each in self.parameters.values() for use in each})


class Seen:
    """One small pass forward and back: its graph, every gradient in it, and those of parameters.

    Only one image has a gradient, so that those of parameters are its own.
    """

    def __init__(self, borrowed: Borrowed, x: Float[Tensor, "n ..."], only: int) -> None:
        logits = borrowed.logits(borrowed.inputs(x))
        self.images, self.only = len(x), only
        self.graph = Graph(logits, borrowed.leaves)
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
        """Whether a node's output grows with the batch, which another pass with more images shows."""
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
            wrong[name] = first_words(error)
            continue
        expected = torch.zeros_like(ours)
        expected[seen.only] = truth[name]
        if not torch.allclose(ours, expected, rtol=close, atol=least):
            wrong[name] = "it is used in an unknown way"
    return wrong


def _check_model(borrowed: Borrowed, x: Float[Tensor, "n ..."]) -> None:
    """The logits of an image must have a gradient, and must not depend on the others of its batch."""
    logits = borrowed.logits(borrowed.inputs(x)).detach()
    check_logits(logits, borrowed.name)
    changed = torch.cat([x[:1], torch.zeros_like(x[1:])])
    before, after = logits[0], borrowed.logits(borrowed.inputs(changed))[0].detach()
    if not torch.allclose(before, after, rtol=1e-2, atol=1e-2 * float(before.abs().max())):
        raise ModelError(
            f"gradient: what {borrowed.name} predicts for an image depends on the other images of the batch, so "
            f"an image has no gradient of its own. Look for a BatchNorm without running statistics."
        )


def check_logits(logits: Float[Tensor, "rows c"], model: str, *, copies: int = 1, start: int = 0) -> None:
    """Raise where there is nothing to choose from, or no number to differentiate."""
    if logits.shape[1] < 2:
        raise ModelError(
            f"gradient: {model} has one class, which is always certain: its gradients are zero. "
            f"Give a yes-or-no model a second logit of zero."
        )
    bad = ~logits.isfinite().all(1)
    if bad.any():
        row = start + int(bad.nonzero()[0, 0]) // copies
        raise ValueRangeError(
            f"gradient: {model} gives NaN or infinite logits for image {row} of the batch, which have no gradient. "
            f"Look at its weights, at the transform and at that image."
        )


def _last(graph: Graph, places: Collection[int]) -> tuple[int, ...]:
    """The operations among these with none of the others behind them: there a backward pass may end."""
    behind: set[int] = set()
    for place, node in enumerate(graph.nodes):
        following = {graph.order[source] for source, _ in node.next_functions if source and source in graph.order}
        if any(other in behind or other in places for other in following):
            behind.add(place)
    return tuple(sorted(set(places) - behind))


def warn_slow(plan: GradientPlan) -> None:
    """Warn of what falls back."""
    by_reason: dict[str, dict[str, None]] = defaultdict(dict)
    for name, why in plan.slow.items():
        by_reason[why][layer_of(name)] = None
    for why, names in by_reason.items():
        warnings.warn(
            f"gradient: {some(list(names), 5)} of {plan.borrowed.name} (of {len(plan.layers)} layers) cannot be "
            f"differentiated for a whole batch at once: {why}. torch.func does it image by image, which is "
            f"right but slow.",
            GradientFallbackWarning,
            stacklevel=2,
        )


def warn_unused(plan: GradientPlan) -> None:
    """Warn of layers that are never used: they have no gradient, and no column."""
    chosen = dict.fromkeys(layer_of(name) for name, leaf in plan.borrowed.leaves.items() if leaf.requires_grad)
    unused = [layer for layer in chosen if layer not in plan.layers]
    if unused:
        warnings.warn(
            f"gradient: what {plan.borrowed.name} predicts for these images does not depend on {some(unused, 5)}, "
            f"which get no gradient and no column.",
            UnusedLayersWarning,
            stacklevel=2,
        )
