"""The probe of gradients: how much an image would move each layer, if the model were to learn from its own answer.

    NAME            (n, l)  sum_y p_y ||grad_l log p_y||_2^2 = tr(F J_l J_l^T), layer l's Fisher information   fisher
    NAME_root       (n, l)  sum_y sqrt(p_y) ||grad_l log p_y||_2                                               root
    NAME_l1         (n, l)  sum_y p_y ||grad_l log p_y||_1                                                     ExGrad
    NAME_predicted  (n, l)  ||grad_l log p_y||_2^2 of the predicted class
    NAME_uniform    (n, l)  ||grad_l KL(uniform || p)||_1                                                      GradNorm
    NAME_bound      (n, l)  what the classes left out of NAME add, at most, with a confidence of 95%

Wang & Ji (2024, arXiv 2404.10124), of which we have a summary: REGrad weighs classes by a square root, layers by depth,
and averages gradients over perturbed copies of the input before it takes their norm. The exact class weighting is OPEN;
`fisher` is our default, because it has a theory and can be had from a few passes. A layer is a module with parameters,
weights and bias together; layers are in order of depth. With copies, the image itself is one of what is averaged.
Columns are float32: where a class leads by more than about 44 logits, the squared gradient of the predicted class is
below its range and told as 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import final, get_args

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from dubito.choices import ClassWeighting, GradientMethod
from dubito.errors import ValueRangeError
from dubito.gradients.cotangents import Cotangents, bound_factor, check_logits, normals, signs
from dubito.gradients.prepared import Prepared
from dubito.gradients.sweep import Sweep
from dubito.probes._gradient_settings import check_classes, check_copies, check_layers, check_name
from dubito.types import Classifier, Json, depth_weight

Columns = dict[str, Float64[Tensor, "n l"]]


@final
@dataclass(frozen=True)
class Gradient:
    """Gradient norms of every layer.

    Attributes:
        method: Which classes are differentiated: "exact", all; "top", the most likely; "signs", random mixtures of all;
            "combined", the most likely, and random mixtures of all others.
        classes: How many of the most likely; "exact" takes all and "signs" none by itself.
        draws: How many mixtures, where the method has any. With "top", they only bound what is left out; none, no
            bound.
        weightings: Which of the first three columns to write; NAME itself is always there. "root" and "expected_l1"
            have no random estimate and need "exact" or "top".
        uniform: Also write NAME_uniform: one more backward pass.
        last: Differentiate by the last layers only, so many.
        beta: Differentiate only by layers that count: whose weight exp(beta * (depth / L - 1)) is at least `tolerance`.
        tolerance: See beta.
        copies: Of each image, with Gaussian noise; their gradients are averaged before norms are taken.
        sigma: The noise's standard deviation, in units of the finished input, which mostly has about one itself.
        seed: Of signs and noise; where nothing is drawn, it is not part of the settings.
        name: The column's, where a table is to have several.
    """

    method: GradientMethod = "combined"
    classes: int = 2
    draws: int = 2
    _: KW_ONLY
    weightings: Sequence[ClassWeighting] = ("fisher",)
    uniform: bool = False
    last: int | None = None
    beta: float | None = None
    tolerance: float = 1e-3
    copies: int = 0
    sigma: float = 0.1
    seed: int = 0
    name: str = "gradient"
    _known: dict[str, Prepared] = field(default_factory=dict, init=False, repr=False, compare=False)

    price = "1 forward pass, and 4 backward passes or as many as are asked for"

    def __post_init__(self) -> None:
        check_classes(self.method, self.classes, self.draws, self.weightings)
        check_layers(self.last, self.beta, self.tolerance)
        check_copies(self.copies, self.sigma)
        check_name(self.name)
        chosen = tuple(one for one in get_args(ClassWeighting) if one in ("fisher", *self.weightings))
        object.__setattr__(self, "weightings", chosen)
        passes = (
            "one backward pass a class" if self.method == "exact" else f"{self._exact + self.draws} backward passes"
        )
        also = " and one more" if self.uniform else ""
        copies = f", for the image and {self.copies} copies" if self.copies else ""
        object.__setattr__(self, "price", f"1 forward pass, {passes}{also}{copies}")

    def run(
        self,
        model: Classifier,
        x: Float[Tensor, "n ..."],
        label: Shaped[Tensor, "n ..."] | None,  # noqa: ARG002
    ) -> Mapping[str, Tensor]:
        """The columns of one batch; labels play no part."""
        if len(x) == 0:
            raise ValueRangeError("gradient: a batch without images came. Give at least one.")
        with torch.inference_mode(False):
            prepared = self._prepared(model, x)
            few = -(-len(x) // (1 + self.copies))
            parts = [self._some(prepared, x[start : start + few], start) for start in range(0, len(x), few)]
        return {name: torch.cat([part[name] for part in parts]).float() for name in parts[0]}

    def notes(self) -> Json:
        """Of the model that was met last: names of the columns' layers, their depths, and how many layers there are."""
        known = self._known.get("last")
        return {} if known is None else known.notes()

    def settings(self) -> Json:
        """The settings themselves, those that matter."""
        copies = {"copies": self.copies, "sigma": self.sigma} if self.copies else {"copies": 0}
        kept = {"last": self.last} if self.last else {"beta": self.beta, "tolerance": self.tolerance}
        return {
            "method": self.method,
            **({} if self.method == "exact" else {"classes": self._exact, "draws": self.draws}),
            "weightings": list(self.weightings),
            "uniform": self.uniform,
            **(kept if self.last or self.beta is not None else {}),
            **copies,
            **({"seed": self.seed} if self.copies or (self.method != "exact" and self.draws) else {}),
        }

    @property
    def _exact(self) -> int:
        return 0 if self.method == "signs" else self.classes

    def _prepared(self, model: Classifier, x: Float[Tensor, "n ..."]) -> Prepared:
        """The model made ready, once."""
        known = self._known.get("last")
        if known is None or not known.fits(model, x):
            known = self._known["last"] = Prepared(model, x, self._wanted)
        return known

    def _wanted(self, layers: Sequence[str]) -> Sequence[str]:
        """The names of those layers that count, out of all in order of depth."""
        if self.last is not None:
            return layers[-self.last :]
        if self.beta is None:
            return layers
        beta, of = self.beta, len(layers)
        return [name for place, name in enumerate(layers) if depth_weight(place, of, beta) >= self.tolerance]

    def _some(self, prepared: Prepared, x: Float[Tensor, "n ..."], start: int) -> Columns:
        """The columns of a few images, the first of which is number `start` of the batch."""
        images = len(x)
        alone = images * (1 + self.copies) == 1
        rows = self._with_copies(x.expand(2, *x.shape[1:]) if alone else x)  # one row is another case for some modules
        with prepared.sweep(rows, images := len(rows) // (1 + self.copies)) as sweep:
            check_logits(sweep.logits, prepared.borrowed.name, copies=1 + self.copies, start=start)
            logits = sweep.logits.double().view(images, 1 + self.copies, -1)
            found = self._columns(sweep, Cotangents(logits, prepared.head), prepared.last)
        return {name: column[: len(x)] for name, column in found.items()}

    def _with_copies(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "rows ..."]:
        """Every image, followed by its noisy copies; the noise is that of its copy, the same for all images."""
        if not self.copies:
            return x
        generator = torch.Generator().manual_seed(self.seed)
        noise = self.sigma * torch.randn(self.copies, *x.shape[1:], generator=generator)
        noise = torch.cat([torch.zeros_like(noise[:1]), noise]).to(x)
        return (x[:, None] + noise).flatten(0, 1)

    def _columns(self, sweep: Sweep, said: Cotangents, last: int | None) -> Columns:
        """All columns, from one forward pass."""
        count = said.p.shape[1]
        exact = count if self.method == "exact" else min(self._exact, count)
        found = self._by_class(sweep, said, exact)
        if exact < count and self.draws:
            draw = normals if self.method == "top" else signs
            beyond = 0 if self.method == "signs" else exact
            mixtures = [said.mixture(v.to(said.p.device), beyond) for v in draw(self.draws, count, self.seed)]
            total = torch.stack([sweep.norms(mixture)["squares"] for mixture in mixtures]).sum(0)
            if self.method == "top":
                found[f"{self.name}_bound"] = total * bound_factor(self.draws)
            elif self.method == "signs":
                found[self.name] = total / self.draws
            else:
                error = found[self.name] * said.known_error(mixtures, exact)
                if last is not None:  # its norm goes with the length of the cotangent itself
                    error[:, last] = (found[self.name] * said.known_error(mixtures, exact, entering=False))[:, last]
                found[self.name] += total / self.draws - error
        elif self.method == "top" and self.draws:
            found[f"{self.name}_bound"] = torch.zeros_like(found[self.name])
        if self.uniform:
            found[f"{self.name}_uniform"] = sweep.norms(said.from_uniform(), ("totals",))["totals"]
        return found

    def _by_class(self, sweep: Sweep, said: Cotangents, exact: int) -> Columns:
        """What the most likely classes add, one backward pass each."""
        measures = ("squares", "totals") if "expected_l1" in self.weightings else ("squares",)
        found: Columns = {}
        for rank in range(exact):
            norms = sweep.norms(said.towards(said.order[:, rank]), measures)
            p = said.probability(said.order[:, rank]).cpu()
            if rank == 0:
                found[f"{self.name}_predicted"] = norms["squares"]
            added = {"": p * norms["squares"]}
            if "root" in self.weightings:
                added["_root"] = p.sqrt() * norms["squares"].sqrt()
            if "expected_l1" in self.weightings:
                added["_l1"] = p * norms["totals"]
            for end, more in added.items():
                found[self.name + end] = found.get(self.name + end, torch.zeros(())) + more
        return found
