"""DEUP: the expected loss of an image, learned from losses on held-out images, less what is aleatoric in it.

    u(x) = e(phi(x)) - a(x),   e trained so that e(phi(x_i)) predicts the task loss L_i of held-out images

Lahlou et al. 2023 (arXiv 2102.08501). The error predictor e is an `UncertaintyHead` with a direct loss. As in the
paper, its inputs phi are the features and two numbers that keep their meaning for images unlike those of fit (the
paper's "stationarizing features"), each as a logarithm, all standardised:

    density    the squared Mahalanobis distance to the nearest class mean        (the paper: a density of the inputs)
    variance   the mutual information of label and last layer by `Laplace`       (the paper: a model's variance)

a(x) is nothing, where labels are taken to be free of noise; or "entropy", the loss that the prediction itself expects,
H(softmax(logits)), which only makes sense for a calibrated model and an e that predicts the mean loss. With nothing
subtracted, u is the whole expected loss, which among ambiguous images is not epistemic.

The losses of `fit` must come from images that the model was not trained on. A model's losses on its own training images
are far below those that it makes elsewhere, and e would learn that nothing ever goes wrong. The paper also learns from
out-of-distribution images where there are some: add them to the table, with their losses (`dubito.concat`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final, get_args

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from dubito.choices import Aleatoric, DeupInput
from dubito.errors import ValueRangeError
from dubito.heads.losses import DIRECT_LOSSES
from dubito.heads.recipe import NEEDS, Recipe, as_recipe
from dubito.heads.score import UncertaintyHead
from dubito.scores._features import ScoreOfFeatures
from dubito.scores.gaussians import squared_distances
from dubito.scores.laplace import Laplace
from dubito.scores.mahalanobis import Mahalanobis
from dubito.scores.softmax import entropy
from dubito.table import Table
from dubito.table.table import Exact, take
from dubito.table.views import Computed
from dubito.types import finite_batches
from dubito.validate import check_choice, check_rows, check_seed

_TINY = 1e-12
_CONSTANT = 1e-7
"""Inputs with a smaller deviation, as a share of their mean, do not vary."""
_BATCH = 256
_PASSES, _FEWEST_PASSES, _ROWS = 10, 7, 2_000_000
_MEANS = ("l2", "variance_nll")
"""Losses whose minimum is the mean."""


@final
@dataclass
class DEUP(ScoreOfFeatures):
    """The loss that a network predicts for an image, less what is aleatoric in it.

    Attributes:
        inputs: What the error predictor reads: "feature", "density" and "variance", or some of them.
        aleatoric: What is subtracted: "none" or "entropy", of the prediction.
        width: Width of the hidden layers.
        depth: Number of hidden layers.
        seed: Seed of the initial weights and of the order of rows.
        recipe: Settings of the training, with a direct loss. The default "log_l2" predicts the mean of log L, which
            suits losses that span decades; "l2" and "variance_nll" predict the mean. Unless it sets `rows`, the
            training makes 10 passes, of more than 200,000 rows fewer, but at least 7; unless it sets `batch`, that is
            256, or an eighth of a small table.
        features_: Width of the features.
        weights_: (p), all weights of the error predictor.
        trained_: How it was trained, as JSON.
        shift_: (k) means of its inputs.
        scale_: (k) their standard deviations.
        means_: (c, d) and `factor_`: those of the Mahalanobis distance; empty without "density".
        basis_: (e, e), `outputs_`, `curvature_` and `precision_`: those of Laplace; empty without "variance".
    """

    inputs: Sequence[DeupInput] = ("feature", "density", "variance")
    aleatoric: Aleatoric = "none"
    width: int = 128
    depth: int = 2
    seed: int = 1
    recipe: Recipe = field(default_factory=lambda: Recipe(loss="log_l2", episodes=100, warmup=10))

    name = "deup"
    kind = "epistemic"
    needs: tuple[str, ...] = field(default=("feature", "logit"), init=False, repr=False, compare=False)
    learns_from: tuple[str, ...] = field(default=("feature", "logit"), init=False, repr=False, compare=False)
    learned = (
        "features_",
        "weights_",
        "trained_",
        "shift_",
        "scale_",
        "means_",
        "factor_",
        "basis_",
        "outputs_",
        "curvature_",
        "precision_",
    )

    named_only = "it learns from losses of images that the model was not trained on: name it, and fit it on such images"

    def __post_init__(self) -> None:
        check_seed(self.seed, by=self.name)
        check_choice(self.aleatoric, get_args(Aleatoric), by=self.name, what="aleatoric")
        self.inputs, self.recipe = tuple(self.inputs), as_recipe(self.recipe)
        for one in self.inputs:
            check_choice(one, get_args(DeupInput), by=self.name, what="inputs")
        if not self.inputs or len(set(self.inputs)) < len(self.inputs):
            raise ValueRangeError(f"deup: inputs must be different names, at least one; got {self.inputs}.")
        check_choice(self.recipe.loss, DIRECT_LOSSES, by=self.name, what="the recipe's loss")
        if self.aleatoric == "entropy" and self.recipe.loss not in _MEANS:
            raise ValueRangeError(
                f"deup: with aleatoric='entropy', the predicted loss must be a mean, of which the entropy can be "
                f"subtracted; got a recipe with loss '{self.recipe.loss}'. Use recipe=Recipe(loss='l2')."
            )
        logit = ("logit",) if "variance" in self.inputs or self.aleatoric == "entropy" else ()
        label = ("label",) if "density" in self.inputs else ()
        self.needs = ("feature", *logit)
        self.learns_from = tuple(dict.fromkeys((*self.needs, *label, *NEEDS[self.recipe.target])))
        self._parts: tuple[UncertaintyHead, Laplace] | None = None

    def learn(self, table: Table) -> None:
        """The density and the posterior first, then the error predictor on standardised inputs."""
        self._parts = None
        check_rows(table, by="deup.fit", least=2)
        for _ in finite_batches(table.batches(*self.learns_from), table.name, by="deup.fit"):
            pass  # every row is checked before the first step
        none = torch.empty(0, 0, dtype=torch.float64)
        posterior = Laplace()
        self.means_ = self.factor_ = self.basis_ = self.outputs_ = self.curvature_ = none
        self.precision_, self.features_ = 0.0, table.shape("feature")[1]
        if "density" in self.inputs:
            distance = Mahalanobis().fit(table)
            self.means_, self.factor_ = distance.means_, distance.factor_
        if "variance" in self.inputs:
            posterior.fit(table)
            self.basis_, self.outputs_ = posterior.basis_, posterior.outputs_
            self.curvature_, self.precision_ = posterior.curvature_, posterior.precision_
        numbers = [self._numbers(*self._read(batch), posterior) for batch in table.batches(*self.needs)]
        inputs = self._standardised(table, torch.cat(numbers))
        n, recipe = len(table), self.recipe
        rows = recipe.rows or max(_FEWEST_PASSES * n, min(_PASSES * n, _ROWS))
        recipe = replace(recipe, rows=rows, batch=recipe.batch or min(_BATCH, max(2, n // 8)))
        head = UncertaintyHead(self.width, self.depth, self.seed, recipe)
        head.fit(table.select(*head.learns_from).extended(feature=inputs))
        self.weights_, self.trained_ = head.weights_, head.trained_

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The predicted loss, less the aleatoric part."""
        self.check_width(batch, self.features_)
        if "variance" in self.inputs:
            self._restored()[1].check_shapes(batch)
        return self.excess(*self._read(batch), self.predictor)

    def excess(
        self, feature: Float[Tensor, "n d"], logits: Float[Tensor, "n c"], predictor: nn.Module
    ) -> Float64[Tensor, "n"]:
        """The same from features and logits, unchecked, by the error predictor or a copy of it."""
        numbers = self._numbers(feature, logits, self._restored()[1])
        parts = [feature.double(), numbers] if "feature" in self.inputs else [numbers]
        u: Tensor = predictor(((torch.cat(parts, dim=1) - self.shift_) / self.scale_).float()).double()
        return u - entropy(logits) if self.aleatoric == "entropy" else u

    @property
    def predictor(self) -> nn.Module:
        """The error predictor, a network."""
        return self._restored()[0].module

    def _restored(self) -> tuple[UncertaintyHead, Laplace]:
        """The error predictor and the posterior, as they were fitted."""
        if self._parts is None:
            head = UncertaintyHead(self.width, self.depth, self.seed, self.recipe)
            head.features_, head.weights_, head.trained_ = len(self.shift_), self.weights_, self.trained_
            posterior = Laplace()
            posterior.basis_, posterior.outputs_ = self.basis_, self.outputs_
            posterior.curvature_, posterior.precision_ = self.curvature_, self.precision_
            self._parts = head, posterior
        return self._parts

    def _read(self, batch: Table) -> tuple[Tensor, Tensor]:
        """Features and logits; the latter are empty where nothing reads them."""
        feature = batch.feature
        return feature, batch.logit if "logit" in self.needs else feature[:, :0]

    def _numbers(
        self, feature: Float[Tensor, "n d"], logits: Float[Tensor, "n c"], posterior: Laplace
    ) -> Float64[Tensor, "n k"]:
        """The logarithms of distance and variance, as far as they are inputs."""
        columns = []
        if "density" in self.inputs:
            columns.append(squared_distances(feature.double(), self.means_, self.factor_).amin(1))
        if "variance" in self.inputs:
            columns.append(posterior.information(feature, logits))
        numbers = torch.stack(columns, dim=1) if columns else feature[:, :0].double()
        return numbers.clamp_min(_TINY).log()

    def _standardised(self, table: Table, numbers: Float64[Tensor, "n k"]) -> Computed:
        """The inputs as a column that is computed as it is read; sets `shift_` and `scale_`."""
        with_feature = "feature" in self.inputs
        first, second = [numbers.sum(0)], [numbers.square().sum(0)]
        if with_feature:
            z, squares = torch.zeros(self.features_).double(), torch.zeros(self.features_).double()
            for batch in table.batches("feature"):
                z += batch.feature.double().sum(0)
                squares += batch.feature.double().square().sum(0)
            first, second = [z, *first], [squares, *second]
        self.shift_ = torch.cat(first) / len(table)
        deviation = (torch.cat(second) / len(table) - self.shift_.square()).clamp_(min=0).sqrt_()
        constant = deviation <= _CONSTANT * self.shift_.abs()
        self.scale_ = deviation.masked_fill_(constant, 1.0)
        column = table.column("feature")

        def read(rows: Exact) -> Float[Tensor, "b k"]:
            parts = [take(column, rows).double(), numbers[rows]] if with_feature else [numbers[rows]]
            return ((torch.cat(parts, dim=1) - self.shift_) / self.scale_).float()

        return Computed((len(table), len(self.shift_)), read)
