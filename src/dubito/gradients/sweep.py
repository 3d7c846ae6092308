"""One forward pass of a batch, and as many backward passes as there are cotangents: norms of every image and layer.

    ||J_l^T c||_2^2  and  ||J_l^T c||_1,    J_l = d logits / d theta_l for one image, c a cotangent of its logits

The gradient of an operation's result is met on its way back, turned into norms for all images at once, and let go: the
gradients of an image are never held together, and those of all images for one layer only in parts of 32 MB. Where an
image comes in several copies, the gradients of its copies are averaged before the norm.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.func import grad, vmap

from dubito.errors import ModelError
from dubito.gradients.parts import BYTES, Measure, Part, measured
from dubito.gradients.plan import Borrowed, GradientPlan, Graph, Use, Weight, layer_of, norms_of, warn_slow, warn_unused
from dubito.models.wrap import eager
from dubito.types import Classifier, Json

Chooser = Callable[[Sequence[str]], Sequence[str]]
"""From the names of all layers, in order of depth, those to differentiate by."""


@final
class Prepared:
    """What is learned of a model from a first batch, and stays true while it and the shape of its inputs do.

    Args:
        model: The classifier.
        x: Some inputs.
        choose: Which layers to differentiate by; the graph of the others is not even built.

    Attributes:
        plan: How to get at the gradients of these layers.
        all: The names of all layers.
        layers: Those to differentiate by.
        head: The last layer's weight, where it is known.
        last: Its place among these layers, where it is a linear layer of its own.
    """

    def __init__(self, model: Classifier, x: Float[Tensor, "n ..."], choose: Chooser) -> None:
        self._of = _identity(model, x)
        self.plan = GradientPlan(Borrowed(model), x)
        self.all = self.plan.layers
        warn_unused(self.plan)
        chosen = set(choose(self.all))
        if chosen != set(self.all):
            self.plan = GradientPlan(Borrowed(model, chosen), x)
        self.layers = self.plan.layers
        self.head = _head(model, x)
        head = torch.empty(0, 0, 0) if self.head is None else self.head  # equal to no parameter
        leaves = self.plan.borrowed.leaves.items()
        of_head = [layer_of(name) for name, leaf in leaves if torch.equal(leaf, head.to(leaf))]
        self.last = next((self.layers.index(layer) for layer in of_head if layer in self.layers), None)
        warn_slow(self.plan)

    def fits(self, model: Classifier, x: Float[Tensor, "n ..."]) -> bool:
        """Whether it is about this model, with these parameters, and about inputs of this shape."""
        return self._of == _identity(model, x)

    def notes(self) -> Json:
        """Names of layers, their places among all, and how many there are."""
        depth = {name: place for place, name in enumerate(self.all)}
        return {"layers": list(self.layers), "depth": [depth[name] for name in self.layers], "of": len(self.all)}


@final
class Sweep:
    """A forward pass that gradients can be taken of, to be used in a `with` block.

    Args:
        plan: Of the model.
        x: Inputs, all copies of an image side by side.
        images: How many images there are: len(x) unless they come in copies.

    Attributes:
        logits: The module's output for every input.
    """

    def __init__(self, plan: GradientPlan, x: Float[Tensor, "rows ..."], images: int) -> None:
        self._plan, self._images = plan, images
        self._borrowed = borrowed = plan.borrowed
        borrowed.refresh()
        self._x = borrowed.inputs(x)
        logits = borrowed.logits(self._x)
        self._graph = Graph(logits, borrowed.leaves)
        unplanned = set(self._graph.leaves.values()) - {*plan.parameters, *plan.slow}
        if unplanned or (plan.parameters and self._graph.signature() != plan.signature):
            raise ModelError(
                f"gradient: {borrowed.name} computes differently for these {len(x)} images than for the first three of "
                f"its input, so its gradients cannot be separated by image and layer. If that depends on their number, "
                f"extract with another batch_size; a model that chooses its layers by image has no columns."
            )
        self._attached = logits
        self.logits = logits.detach()
        self._uses: dict[int, list[tuple[str, Use]]] = defaultdict(list)
        for name, uses in plan.parameters.items():
            for use in uses:
                self._uses[use.node].append((name, use))
        self._layer = {name: plan.layers.index(layer_of(name)) for name in (*plan.parameters, *plan.slow)}
        self._norms: dict[Measure, Float64[Tensor, "n l"]] = {}
        self._waiting: dict[str, list[tuple[Weight, Part | None]]] = defaultdict(list)
        self._hooks = ExitStack()  # a hook that is left on a node holds the graph, and the graph the hook
        for place in self._uses.keys() - set(plan.last):
            hook = self._graph.nodes[place].register_prehook(lambda gradients, p=place: self._meet(p, gradients[0]))
            self._hooks.callback(hook.remove)

    def __enter__(self) -> "Sweep":
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()
        self._graph = self._attached = None  # type: ignore[assignment]

    def norms(
        self, cotangent: Float[Tensor, "rows c"], measures: Sequence[Measure] = ("squares",)
    ) -> dict[Measure, Float64[Tensor, "n l"]]:
        """Of J^T c for every image and layer, by one backward pass.

        Args:
            cotangent: One row per input.
            measures: What to measure of gradients.
        """
        # Gradients grow with the cotangent: of length one, they neither underflow nor overflow.
        size = cotangent.abs().reshape(self._images, -1).amax(1)
        unit = torch.where(size > 0, size, 1.0).repeat_interleave(len(cotangent) // self._images)
        cotangent = (cotangent / unit[:, None]).to(self._attached)
        shape = (self._images, len(self._plan.layers))
        self._norms = {measure: torch.zeros(shape, dtype=torch.float64) for measure in measures}
        self._waiting.clear()
        edges = [GradientEdge(self._graph.nodes[place], 0) for place in self._plan.last]
        if edges:
            with torch.inference_mode(False):
                gradients = torch.autograd.grad(self._attached, edges, cotangent, retain_graph=True, allow_unused=True)
            for place, g in zip(self._plan.last, gradients, strict=True):
                self._meet(place, g)
        for name in list(self._waiting):
            self._measure(name)  # those of which some use had no gradient
        self._fall_back(cotangent)
        scale = size.double().cpu()[:, None] / (len(cotangent) // self._images)
        return {m: self._norms[m] * (scale**2 if m == "squares" else scale) for m in measures}

    def _meet(self, place: int, g: Tensor | None) -> None:
        """The gradient of an operation's result is there: add its part for each weight that the operation read."""
        with torch.no_grad():
            for name, use in self._uses[place]:
                part = None if g is None else use.part(self._graph, self._images, g)
                if part is None and g is not None:
                    raise AssertionError("a plan has no use without a rule")
                self._waiting[name].append((use.weight, part))
                if len(self._waiting[name]) == len(self._plan.parameters[name]):
                    self._measure(name)

    def _measure(self, name: str) -> None:
        """Add the norms of a parameter's gradient, of which all parts are there."""
        parts = [(weight, part) for weight, part in self._waiting.pop(name) if part is not None]
        for measure, norms in self._norms.items() if parts else ():
            norm = norms_of(parts, self._graph, self._borrowed.leaves[name], measure)
            norms[:, self._layer[name]] += norm.double().cpu()

    def _fall_back(self, cotangent: Float[Tensor, "rows c"]) -> None:
        """Add the norms of parameters without rules, for a few images at a time; gradients of copies are added up."""
        if not self._plan.slow:
            return
        x, cotangent = (rows.view(self._images, -1, *rows.shape[1:]) for rows in (self._x, cotangent))
        leaves = {name: self._borrowed.leaves[name].detach() for name in self._plan.slow}
        step = max(1, BYTES // (4 * sum(leaf.numel() for leaf in leaves.values())))
        for start in range(0, self._images, step):
            some = slice(start, start + step)
            for name, made in _vmapped(self._borrowed, leaves, x[some], cotangent[some]).items():
                for measure, norms in self._norms.items():
                    norms[some, self._layer[name]] += measured(made.double(), measure).cpu()


def _vmapped(
    borrowed: Borrowed, leaves: dict[str, Tensor], x: Float[Tensor, "n r ..."], cotangent: Float[Tensor, "n r c"]
) -> dict[str, Float[Tensor, "n ..."]]:
    """The gradients of each image, those of its copies added up."""

    def weighted_logits(chosen: dict[str, Tensor], one: Tensor, c: Tensor) -> Tensor:
        return (borrowed.logits(one, chosen) * c).sum()

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*performance drop")  # the user has been warned that it is slow
            gradients: dict[str, Tensor] = vmap(grad(weighted_logits), in_dims=(None, 0, 0))(leaves, x, cotangent)
        return gradients
    except (RuntimeError, ValueError):  # control flow that depends on data, operations without a batching rule
        own = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
        by, rows = list(own.values()), []
        for one, c in zip(x, cotangent, strict=True):
            logits = borrowed.logits(one.clone(), own)
            rows.append(torch.autograd.grad(logits, by, c, allow_unused=True, materialize_grads=True))
        return {name: torch.stack(of_images) for name, of_images in zip(own, zip(*rows, strict=True), strict=True)}


def _head(model: Classifier, x: Float[Tensor, "n ..."]) -> Float[Tensor, "c d"] | None:
    try:
        classes = model.logits(model.features(x[:1])).shape[1]
        weight = model.head()[0]
    except ModelError:
        return None
    return weight if len(weight) == classes else None


def _identity(model: Classifier, x: Float[Tensor, "n ..."]) -> tuple[object, ...]:
    """What must stay: the memory of parameters and buffers, in order, parameters as they are, and the look of inputs.

    A plan is proved with the parameters of its time: where a gradient was zero then, there was nothing to prove.
    """
    module = eager(model.module)
    tensors = (*module.named_parameters(), *module.named_buffers())
    memory = tuple((name, tensor.data_ptr(), tensor.dtype, tensor.shape) for name, tensor in tensors)
    written = tuple(0 if tensor.is_inference() else tensor._version for tensor in module.parameters())
    return (id(model.module), memory, written, tuple(x.shape[1:]), x.dtype)
