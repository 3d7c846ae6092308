"""One forward pass of a batch, and as many backward passes as there are cotangents: norms of every image and layer.

    ||J_l^T c||_2^2  and  ||J_l^T c||_1,    J_l = d logits / d theta_l for one image, c a cotangent of its logits

The gradient of an operation's result is met on its way back, turned into norms for all images at once, and let go: the
gradients of an image are never held together, and those of all images for one layer only in parts of 32 MB. Where an
image comes in several copies, the gradients of its copies are averaged before the norm.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.func import grad, vmap

from dubito.errors import ModelError
from dubito.gradients.borrowed import Borrowed, layer_of
from dubito.gradients.graph import graph_of
from dubito.gradients.parts import BYTES, Part
from dubito.gradients.plan import GradientPlan, Use
from dubito.gradients.rules import Meeting, part_of
from dubito.gradients.weights import Weight, squares_of, totals_of

MEASURES = {"squares": squares_of, "totals": totals_of}
"""What is measured of a gradient: its squared L2 norm, its L1 norm."""


@final
class Sweep:
    """A forward pass that gradients can be taken of, to be used in a `with` block.

    Args:
        borrowed: The module.
        plan: Its plan.
        x: Inputs, all copies of an image side by side.
        images: How many images there are: len(x) unless they come in copies.

    Attributes:
        logits: The module's output for every input.
    """

    def __init__(self, borrowed: Borrowed, plan: GradientPlan, x: Float[Tensor, "rows ..."], images: int) -> None:
        self._borrowed, self._plan, self._images = borrowed, plan, images
        self._x = borrowed.inputs(x)
        logits = borrowed.logits(self._x)
        self._graph = graph_of(logits, borrowed.leaves)
        strange = set(self._graph.leaves.values()) - {*plan.parameters, *plan.slow}
        if strange or (plan.parameters and self._graph.signature() != plan.signature):
            raise ModelError(
                f"gradient: {borrowed.name} computes otherwise for these {len(x)} images than for the first three that "
                f"its input has, so its gradients cannot be separated by image and layer. If that depends on their "
                f"number, extract with another batch_size; a model that chooses its layers by image has no columns."
            )
        self._attached = logits
        self.logits = logits.detach()
        self._uses: dict[int, list[tuple[str, Use]]] = defaultdict(list)
        for name, uses in plan.parameters.items():
            for use in uses:
                self._uses[use.node].append((name, use))
        self._layer = {name: plan.layers.index(layer_of(name)) for name in (*plan.parameters, *plan.slow)}
        self._run: _Run | None = None
        last = set(plan.last)
        self._handles = [
            self._graph.nodes[place].register_prehook(self._meeter(place)) for place in self._uses if place not in last
        ]

    def __enter__(self) -> "Sweep":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A hook that is left on a node holds the graph, and the graph the hook.
        for handle in self._handles:
            handle.remove()
        self._graph = self._attached = None  # type: ignore[assignment]

    def norms(
        self, cotangent: Float[Tensor, "rows c"], measures: Sequence[str] = ("squares",)
    ) -> dict[str, Float64[Tensor, "n l"]]:
        """Of J^T c for every image and layer, by one backward pass.

        Args:
            cotangent: One row per input.
            measures: Of MEASURES.
        """
        # Gradients grow with the cotangent: of length one, they neither underflow nor overflow.
        size = cotangent.abs().reshape(self._images, -1).amax(1)
        unit = torch.where(size > 0, size, 1.0).repeat_interleave(len(cotangent) // self._images)
        cotangent = (cotangent / unit[:, None]).to(self._attached)
        run = self._run = _Run(measures, self._images, len(self._plan.layers))
        places = self._plan.last
        if places:
            edges = [GradientEdge(self._graph.nodes[place], 0) for place in places]
            with torch.inference_mode(False):
                gradients = torch.autograd.grad(
                    self._attached,
                    edges,
                    cotangent,
                    retain_graph=True,
                    allow_unused=True,
                )
            for place, g in zip(places, gradients, strict=True):
                self._meet(place, g)
        for name, left in run.waiting.items():
            self._measure(name, left)  # those of which some use had no gradient
        run.waiting.clear()
        self._fall_back(run, cotangent)
        copies = len(cotangent) // self._images
        power = {"squares": 2, "totals": 1}
        return {m: run.norms[m] * (size.double().cpu()[:, None] / copies) ** power[m] for m in measures}

    def _meeter(self, place: int) -> Callable[[Sequence[Tensor | None]], None]:
        return lambda gradients: self._meet(place, gradients[0])

    def _meet(self, place: int, g: Tensor | None) -> None:
        """The gradient of an operation's result is there: add its part for each weight that the operation read."""
        run = self._run
        if run is None:
            return
        with torch.no_grad():
            for name, use in self._uses[place]:
                if g is not None:
                    run.waiting[name].append((use.weight, self._part(use, g)))
                run.met[name] += 1
                if run.met[name] == len(self._plan.parameters[name]):
                    self._measure(name, run.waiting.pop(name, []))

    def _part(self, use: Use, g: Tensor) -> Part:
        node = self._graph.nodes[use.node]
        part = part_of(Meeting(node, use.slot, use.layout, use.weight.shape, self._images), g)
        if part is None:
            raise AssertionError("a plan has no use without a rule")
        return part

    def _measure(self, name: str, parts: Sequence[tuple[Weight, Part]]) -> None:
        if not parts or self._run is None:
            return
        for measure, norms in self._run.norms.items():
            norm = MEASURES[measure](parts, self._graph, self._borrowed.leaves[name])
            norms[:, self._layer[name]] += norm.double().cpu()

    def _fall_back(self, run: "_Run", cotangent: Tensor) -> None:
        if not self._plan.slow:
            return
        for some, gradients in one_by_one(self._borrowed, list(self._plan.slow), self._x, cotangent, self._images):
            for name, made in gradients.items():
                flat = made.reshape(len(made), -1).double()
                compute = {
                    "squares": lambda flat=flat: flat.square().sum(1),
                    "totals": lambda flat=flat: flat.abs().sum(1),
                }
                for measure, norms in run.norms.items():
                    norms[some, self._layer[name]] += compute[measure]().cpu()


class _Run:
    """One backward pass: norms so far, and the parts of gradients whose other parts are still to come."""

    def __init__(self, measures: Sequence[str], images: int, layers: int) -> None:
        self.norms = {measure: torch.zeros(images, layers, dtype=torch.float64) for measure in measures}
        self.waiting: dict[str, list[tuple[Weight, Part]]] = defaultdict(list)
        self.met: dict[str, int] = defaultdict(int)


def one_by_one(
    borrowed: Borrowed,
    names: Sequence[str],
    x: Float[Tensor, "rows ..."],
    cotangent: Float[Tensor, "rows c"],
    images: int,
) -> Iterator[tuple[slice, dict[str, Float[Tensor, "n ..."]]]]:
    """The gradients of named parameters for each image, those of its copies added up; of a few images at a time."""
    x, cotangent = (rows.view(images, -1, *rows.shape[1:]) for rows in (x, cotangent))
    leaves = {name: borrowed.leaves[name].detach() for name in names}
    step = max(1, BYTES // (4 * sum(leaf.numel() for leaf in leaves.values())))
    for start in range(0, images, step):
        some = slice(start, start + step)
        yield some, _vmapped(borrowed, leaves, x[some], cotangent[some])


def _vmapped(
    borrowed: Borrowed, leaves: dict[str, Tensor], x: Float[Tensor, "n r ..."], cotangent: Float[Tensor, "n r c"]
) -> dict[str, Float[Tensor, "n ..."]]:
    def weighted_logits(chosen: dict[str, Tensor], one: Tensor, c: Tensor) -> Tensor:
        return (borrowed.logits(one, chosen) * c).sum()

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*performance drop")  # the user has been warned that it is slow
            gradients: dict[str, Tensor] = vmap(grad(weighted_logits), in_dims=(None, 0, 0))(leaves, x, cotangent)
        return gradients
    except (RuntimeError, ValueError):  # control flow that depends on data, operations without a batching rule
        rows = [_alone(borrowed, leaves, one, c) for one, c in zip(x, cotangent, strict=True)]
        return {name: torch.stack([row[name] for row in rows]) for name in leaves}


def _alone(borrowed: Borrowed, leaves: dict[str, Tensor], one: Tensor, c: Tensor) -> dict[str, Tensor]:
    own = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    logits = borrowed.logits(one.clone(), own)
    gradients = torch.autograd.grad(logits, list(own.values()), c, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(own.items(), gradients, strict=True)
    }
