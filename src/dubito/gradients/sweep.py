"""One forward pass of a batch, and as many backward passes as there are cotangents: norms of every image and layer.

    ||J_l^T c||_2^2  and  ||J_l^T c||_1,    J_l = d logits / d theta_l for one image, c a cotangent of its logits

The gradient of an operation's result is met on its way back, turned into norms for all images at once, and let go: the
gradients of an image are never held together, and those of all images for one layer only in parts of 32 MB. Where an
image comes in several copies, the gradients of its copies are averaged before the norm.

Cotangents are directions in the space of logits, whose gradients together give the Fisher trace:

    grad log p_y = J^T (e_y - p)
    tr(F J J^T)  = sum_y p_y ||J^T (e_y - p)||^2,   F = diag(p) - p p^T

    exact       e_y - p for every class y: c backward passes
    top         the same for the k most likely classes of each image
    signs       c = sum_y v_y sqrt(p_y) (e_y - p), v_y = +-1 at random: E ||J^T c||^2 is the trace, for any J
    combined    the k most likely classes T exactly, and signs over all others, less the error that is known of them

What signs get wrong is mostly the length of the gradient where it enters the network: ||W^T c||^2, W the last layer, of
which the right mean is known. How a layer's norm goes with that length is seen from the exact classes:

    rest_l = mean_s ||J_l^T c_s||^2 - b_l (||W^T c_s||^2 - sum_{y not in T} p_y ||W^T (e_y - p)||^2)
    b_l    = sum_{y in T} p_y ||J_l^T (e_y - p)||^2 / sum_{y in T} p_y ||W^T (e_y - p)||^2

For the last layer itself, W is the identity, and the estimate exact. No sign enters b, so the mean stays right. It is
ours, and halves the error or better. An estimate may be below zero where the rest is next to nothing.

Signs depend on seed, draw and class alone, not on the image: a row does not change with its batch, and images are
compared under the same signs. What the classes outside of `top` add has no bound that fewer passes than classes could
prove, so theirs is a bound of confidence: with Gaussian v, sum_s ||J^T c_s||^2 / trace is a mixture of chi-squares
whose lower tail is never heavier than that of one with as many degrees of freedom as draws (Roosta-Khorasani & Ascher
2015, arXiv 1308.2475), so that the trace is below  sum_s ||J^T c_s||^2 / q  with q a small quantile of that one.

With copies r of an image, p_y is that of the image itself, and log p_y is differentiated at every copy: e_y - p_r.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import final

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.func import grad, vmap

from dubito.errors import ModelError
from dubito.gradients.parts import BYTES, Measure, Part, measured
from dubito.gradients.plan import Borrowed, GradientPlan, Graph, Use, Weight, layer_of, norms_of, warn_slow, warn_unused
from dubito.models.frozen import signature
from dubito.models.wrap import eager
from dubito.threads import quiet
from dubito.types import Classifier

LEVEL = 0.95
"""How sure a bound on the rest is, for each image and layer."""
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
        layers: Names of the layers to differentiate by.
        notes: These names, their places among all layers, and how many there are.
        head: The last layer's weight, where it is known.
        last: Its place among these layers, where it is a linear layer of its own.
    """

    def __init__(self, model: Classifier, x: Float[Tensor, "n ..."], choose: Chooser) -> None:
        self._of = _identity(model, x)
        self.plan = GradientPlan(Borrowed(model), x)
        depth = {name: place for place, name in enumerate(self.plan.layers)}
        warn_unused(self.plan)
        chosen = set(choose(self.plan.layers))
        if chosen != set(depth):
            self.plan = GradientPlan(Borrowed(model, chosen), x)
        self.layers = self.plan.layers
        self.notes = {"layers": [*self.layers], "depth": [depth[name] for name in self.layers], "of": len(depth)}
        self.head = None
        with suppress(ModelError):
            classes, weight = model.logits(model.features(x[:1])).shape[1], model.head()[0]
            self.head = weight if len(weight) == classes else None
        head = torch.empty(0, 0, 0) if self.head is None else self.head  # equal to no parameter
        leaves = self.plan.borrowed.leaves.items()
        of_head = [layer_of(name) for name, leaf in leaves if torch.equal(leaf, head.to(leaf))]
        self.last = next((self.layers.index(layer) for layer in of_head if layer in self.layers), None)
        warn_slow(self.plan)

    def fits(self, model: Classifier, x: Float[Tensor, "n ..."]) -> bool:
        """Whether it is about this model, with these parameters, and about inputs of this shape."""
        return self._of == _identity(model, x)


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
        with quiet(message=".*performance drop"):  # the user has been warned that it is slow
            gradients: dict[str, Tensor] = vmap(grad(weighted_logits), in_dims=(None, 0, 0))(leaves, x, cotangent)
        return gradients
    except (RuntimeError, ValueError):  # control flow that depends on data, operations without a batching rule
        own = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
        by, rows = list(own.values()), []
        for one, c in zip(x, cotangent, strict=True):
            logits = borrowed.logits(one.clone(), own)
            rows.append(torch.autograd.grad(logits, by, c, allow_unused=True, materialize_grads=True))
        return {name: torch.stack(of_images) for name, of_images in zip(own, zip(*rows, strict=True), strict=True)}


def _identity(model: Classifier, x: Float[Tensor, "n ..."]) -> tuple[object, ...]:
    """What must stay: layers, parameters as they are, the memory of buffers, and the look of inputs.

    A plan is proved with the parameters of its time: where a gradient was zero then, there was nothing to prove. The
    numbers of buffers may change: each sweep takes them over.
    """
    return (id(model.module), signature(eager(model.module), statistics=False), tuple(x.shape[1:]), x.dtype)


class Cotangents:
    """What a model predicts for images and their copies, in float64.

    Args:
        logits: Of an image and its copies, the image first.
        head: The last layer's weight, or any matrix with one row per class; None: the identity.

    Attributes:
        p: Probabilities of every class for each image.
        order: Classes, the most likely first.
    """

    def __init__(self, logits: Float64[Tensor, "n r c"], head: Float[Tensor, "c d"] | None = None) -> None:
        self._rows = logits.softmax(2)
        self._head = None if head is None else head.to(self._rows)
        self.p = self._rows[:, 0]
        self.order: Int[Tensor, "n c"] = logits[:, 0].argsort(dim=1, descending=True, stable=True)

    def towards(self, classes: Int[Tensor, "n"]) -> Float64[Tensor, "rows c"]:
        """e_y - p for one class per image, at every copy."""
        where = classes[:, None, None].expand(-1, self._rows.shape[1], 1)
        others = self._rows.scatter(2, where, 0.0).sum(2, keepdim=True)  # 1 - p_y has no digits where p_y is 1
        return (-self._rows).scatter(2, where, others).flatten(0, 1)

    def probability(self, classes: Int[Tensor, "n"]) -> Float64[Tensor, "n 1"]:
        """p_y for one class per image."""
        return self.p.gather(1, classes[:, None])

    def mixture(self, v: Float64[Tensor, "c"], beyond: int = 0) -> Float64[Tensor, "rows c"]:
        """sum_y v_y sqrt(p_y) (e_y - p) over the classes beyond the most likely ones, at every copy."""
        weights = (v * self.p.sqrt()).scatter(1, self.order[:, :beyond], 0.0)[:, None].expand_as(self._rows)
        mixed = weights - self._rows * weights.sum(2, keepdim=True)
        # Of the likeliest class y, w_y (1 - p_y) - p_y sum of the other w: else there are no digits where p_y is 1.
        first = self._rows.argmax(2, keepdim=True)
        own, p = weights.gather(2, first), self._rows.gather(2, first)
        other_p, other_w = (all_of.scatter(2, first, 0.0).sum(2, keepdim=True) for all_of in (self._rows, weights))
        return mixed.scatter(2, first, own * other_p - p * other_w).flatten(0, 1)

    def known_error(
        self, mixtures: Sequence[Float64[Tensor, "rows c"]], exact: int, *, entering: bool = True
    ) -> Float64[Tensor, "n 1"]:
        """By how much mixtures of the classes beyond are too long on average, as a share of the exact classes' length.

        Args:
            mixtures: Of `mixture`.
            exact: How many classes are not in them.
            entering: Measured where they enter the network, W^T c; False: c itself.
        """
        head = self._head if entering else None
        likely = [self.order[:, rank] for rank in range(exact)]
        known = torch.stack([self.probability(y) * self._length(self.towards(y), head) for y in likely]).sum(0)
        observed = torch.stack([self._length(mixture, head) for mixture in mixtures]).mean(0)
        return torch.where(known > 0, (observed - self._mean_length(exact, head)) / known, 0.0).cpu()

    def _length(self, cotangent: Float64[Tensor, "rows c"], head: Tensor | None) -> Float64[Tensor, "n 1"]:
        """||W^T c||^2, averaged over copies before the norm, as gradients are."""
        mean = cotangent.view_as(self._rows).mean(1)
        return (mean if head is None else mean @ head).square().sum(1, keepdim=True)

    def _mean_length(self, beyond: int, head: Tensor | None) -> Float64[Tensor, "n 1"]:
        """What the lengths of mixtures are on average: sum of p_y ||W^T (e_y - p)||^2 over the classes beyond."""
        p = self._rows.mean(1)
        if head is None:
            each = (1 - p).square() + p.square().sum(1, keepdim=True) - p.square()
        else:
            centre = p @ head
            each = head.square().sum(1) - 2 * centre @ head.T + centre.square().sum(1, keepdim=True)
        return (self.p * each).scatter(1, self.order[:, :beyond], 0.0).sum(1, keepdim=True)

    def from_uniform(self) -> Float64[Tensor, "rows c"]:
        """P - 1/c: the gradient of KL(uniform || p) by logits, at every copy."""
        return (self._rows - 1 / self._rows.shape[2]).flatten(0, 1)


def signs(draws: int, classes: int, seed: int) -> Float64[Tensor, "s c"]:
    """+1 or -1 at random."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (draws, classes), generator=generator).double() * 2 - 1


def normals(draws: int, classes: int, seed: int) -> Float64[Tensor, "s c"]:
    """Of a standard normal distribution."""
    return torch.randn(draws, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bound_factor(draws: int, level: float = LEVEL) -> float:
    """What the sum over draws is multiplied by to be a bound: 1 / quantile of a chi-square."""
    from scipy.special import chdtri  # noqa: PLC0415 (slow to import, rarely needed)

    return 1 / float(chdtri(draws, level))  # without scipy.stats, which takes seconds to import
