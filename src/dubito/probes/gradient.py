"""The gradient probe: how much an image would move each layer if the model learned from its own prediction.

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
below its range and becomes 0.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import final, get_args

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.choices import ClassWeighting, GradientMethod
from dubito.errors import ValueRangeError
from dubito.gradients.parts import Measure
from dubito.gradients.plan import check_logits
from dubito.gradients.sweep import Cotangents, Prepared, Sweep, bound_factor, normals, signs
from dubito.table.columns import families
from dubito.threads import one_at_a_time
from dubito.types import Classifier, Inputs, Json, Targets, depth_weight
from dubito.validate import check_choice, check_number, check_seed

Columns = dict[str, Float64[Tensor, "n l"]]


@final
@dataclass(frozen=True)
class Gradient:
    """Gradient norms of every layer.

    Attributes:
        method: Which classes are differentiated: "exact" takes all, "top" the most likely, "signs" random mixtures of
            all, "combined" the most likely and random mixtures of all others.
        classes: Number of most likely classes; "exact" takes all and "signs" none by itself.
        draws: Number of mixtures, where the method has any. With "top" they only bound what is left out; 0 for no
            bound.
        weightings: Which of the first three columns to write; NAME itself is always written. "root" and "expected_l1"
            have no random estimate and require "exact" or "top".
        uniform: Whether to write NAME_uniform as well: one more backward pass.
        last: Number of last layers to differentiate by; None for all.
        beta: Differentiate only by layers whose weight exp(beta * (depth / L - 1)) is at least `tolerance`.
        tolerance: See beta.
        copies: Number of copies of each image with Gaussian noise; gradients are averaged before norms are taken.
        sigma: Standard deviation of the noise, in units of the finished input, whose own is usually about one.
        seed: Seed of signs and noise; where nothing is drawn, it is not part of the settings.
        name: Name of the column, where a table is to have several.
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
    _models: dict[str, Prepared] = field(default_factory=dict, init=False, repr=False, compare=False)

    price = "1 forward pass, and 4 backward passes by default"
    uses_labels = False

    def __post_init__(self) -> None:
        self._check_classes()
        self._check_layers_and_copies()
        self._check_name()
        check_seed(self.seed, by="gradient")
        chosen = tuple(one for one in get_args(ClassWeighting) if one in ("fisher", *self.weightings))
        object.__setattr__(self, "weightings", chosen)
        each = "one backward pass per class"
        passes = each if self.method == "exact" else f"{self._exact + self.draws} backward passes"
        also = " and one more" if self.uniform else ""
        copies = f", for the image and {self.copies} copies" if self.copies else ""
        object.__setattr__(self, "price", f"1 forward pass, {passes}{also}{copies}")

    def __getstate__(self) -> dict[str, object]:
        """Without what is learned of models: graphs cannot be pickled, and are made again."""
        return {**vars(self), "_models": {}}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)

    def _check_classes(self) -> None:
        check_choice(self.method, get_args(GradientMethod), by="gradient", what="method")
        least = "[1, inf)" if self.method in ("top", "combined") else "[0, inf)"
        none = "For none, use method='signs'."
        check_number(self.classes, least, by="gradient", what="classes", whole=True, hint=none)
        least = "[1, inf)" if self.method in ("signs", "combined") else "[0, inf)"
        check_number(self.draws, least, by="gradient", what="draws", whole=True, hint="For none, use method='top'.")
        if isinstance(self.weightings, str):
            raise ValueRangeError(f"gradient: weightings must be a list; got '{self.weightings}'. Put it in a list.")
        for weighting in self.weightings:
            check_choice(weighting, get_args(ClassWeighting), by="gradient", what="weightings")
            if weighting != "fisher" and self.method not in ("exact", "top"):
                raise ValueRangeError(
                    f"gradient: weighting '{weighting}' is a sum of norms, which random signs do not estimate. "
                    f"Use method='exact', or 'top' for the most likely classes."
                )

    def _check_layers_and_copies(self) -> None:
        if self.last is not None:
            check_number(self.last, "[1, inf)", by="gradient", what="last", whole=True)
        if self.beta is not None:
            check_number(self.beta, "[0, inf)", by="gradient", what="beta")
        if self.last is not None and self.beta is not None:
            raise ValueRangeError(
                f"gradient: pass either last or beta; got last={self.last} and beta={self.beta}. Both choose layers."
            )
        check_number(self.copies, "[0, inf)", by="gradient", what="copies", whole=True)
        check_number(self.tolerance, "(0, 1]", by="gradient", what="tolerance")
        check_number(self.sigma, "(0, inf)", by="gradient", what="sigma")
        for name, other, used in (("sigma", "copies", self.copies > 0), ("tolerance", "beta", self.beta is not None)):
            if not used and (value := getattr(self, name)) != getattr(type(self), name):
                raise ValueRangeError(
                    f"gradient: {name} has no effect without {other}; got {name}={value:g}. "
                    f"Pass {other} as well, or leave {name} out."
                )

    def _check_name(self) -> None:
        others = {key: family for key, family in families().items() if key != "gradient"}
        taken = self.name in others or any(family.match(self.name) is not None for family in others.values())
        if taken or not re.fullmatch("[a-z][a-z_]*", self.name):
            raise ValueRangeError(
                f"gradient: name must be lower-case letters and underscores, and not that of another probe or column; "
                f"got '{self.name}'. Choose another, such as gradient_late."
            )

    def run(self, model: Classifier, x: Inputs, label: Targets | None) -> Mapping[str, Tensor]:  # noqa: ARG002
        """The columns of one batch; labels play no part."""
        if len(x) == 0:
            raise ValueRangeError("gradient: got a batch without images. Pass at least one.")
        with one_at_a_time, torch.inference_mode(False):  # passes forward and back share stand-ins
            prepared = self._models.get("last")
            if prepared is None or not prepared.fits(model, x):
                prepared = self._models["last"] = Prepared(model, x, self._chosen_layers)
            block = -(-len(x) // (1 + self.copies))
            parts = [self._block(prepared, x[start : start + block], start) for start in range(0, len(x), block)]
        return {name: torch.cat([part[name] for part in parts]).float() for name in parts[0]}

    def notes(self) -> Json:
        """Of the model that ran last: the names and depths of the columns' layers, and the number of all layers."""
        prepared = self._models.get("last")
        return {} if prepared is None else prepared.notes

    def settings(self) -> Json:
        """The settings that matter; the kind of probe, where it has a name of its own."""
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
            **({} if self.name == "gradient" else {"probe": "gradient"}),
        }

    @property
    def _exact(self) -> int:
        return 0 if self.method == "signs" else self.classes

    def _chosen_layers(self, layers: Sequence[str]) -> Sequence[str]:
        """The names of the layers to differentiate by, out of all in order of depth."""
        if self.last is not None:
            return layers[-self.last :]
        if self.beta is None:
            return layers
        beta, of = self.beta, len(layers)
        return [name for place, name in enumerate(layers) if depth_weight(place, of, beta) >= self.tolerance]

    def _block(self, prepared: Prepared, x: Inputs, start: int) -> Columns:
        """The columns of consecutive images, the first of which is number `start` of the batch."""
        each = 1 + self.copies
        alone = len(x) * each == 1
        rows = self._with_copies(x.expand(2, *x.shape[1:]) if alone else x)  # some modules treat one row differently
        with Sweep(prepared.plan, rows, len(rows) // each) as sweep:
            check_logits(sweep.logits, prepared.plan.borrowed.name, copies=each, start=start)
            logits = sweep.logits.double().view(-1, each, sweep.logits.shape[1])
            columns = self._columns(sweep, Cotangents(logits, prepared.head), prepared.last)
        return {name: column[: len(x)] for name, column in columns.items()}

    def _with_copies(self, x: Inputs) -> Float[Tensor, "rows ..."]:
        """Every image, followed by its noisy copies; all images share the noise of a copy."""
        if not self.copies:
            return x
        generator = torch.Generator().manual_seed(self.seed)
        noise = self.sigma * torch.randn(self.copies, *x.shape[1:], generator=generator)
        noise = torch.cat([torch.zeros_like(noise[:1]), noise]).to(x)
        return (x[:, None] + noise).flatten(0, 1)

    def _columns(self, sweep: Sweep, cotangents: Cotangents, last: int | None) -> Columns:
        """All columns, from one forward pass."""
        count = cotangents.p.shape[1]
        exact = count if self.method == "exact" else min(self._exact, count)
        columns = self._by_class(sweep, cotangents, exact)
        if exact < count and self.draws:
            draw = normals if self.method == "top" else signs
            beyond = 0 if self.method == "signs" else exact
            directions = draw(self.draws, count, self.seed)
            mixtures = [cotangents.mixture(v.to(cotangents.p.device), beyond) for v in directions]
            total = torch.stack([sweep.norms(mixture)["squares"] for mixture in mixtures]).sum(0)
            if self.method == "top":
                columns[f"{self.name}_bound"] = total * bound_factor(self.draws)
            elif self.method == "signs":
                columns[self.name] = total / self.draws
            else:
                error = columns[self.name] * cotangents.known_error(mixtures, exact)
                if last is not None:  # its norm goes with the length of the cotangent itself
                    direct = cotangents.known_error(mixtures, exact, entering=False)
                    error[:, last] = (columns[self.name] * direct)[:, last]
                columns[self.name] += total / self.draws - error
        elif self.method == "top" and self.draws:
            columns[f"{self.name}_bound"] = torch.zeros_like(columns[self.name])
        if self.uniform:
            columns[f"{self.name}_uniform"] = sweep.norms(cotangents.from_uniform(), ("totals",))["totals"]
        return columns

    def _by_class(self, sweep: Sweep, cotangents: Cotangents, exact: int) -> Columns:
        """What the most likely classes contribute, one backward pass each."""
        measures: tuple[Measure, ...] = ("squares", "totals") if "expected_l1" in self.weightings else ("squares",)
        columns: Columns = {}
        for rank in range(exact):
            norms = sweep.norms(cotangents.towards(cotangents.order[:, rank]), measures)
            p = cotangents.probability(cotangents.order[:, rank]).cpu()
            if rank == 0:
                columns[f"{self.name}_predicted"] = norms["squares"]
            added = {"": p * norms["squares"]}
            if "root" in self.weightings:
                added["_root"] = p.sqrt() * norms["squares"].sqrt()
            if "expected_l1" in self.weightings:
                added["_l1"] = p * norms["totals"]
            for end, more in added.items():
                columns[self.name + end] = columns.get(self.name + end, torch.zeros(())) + more
        return columns
