"""DEUP: the expected loss of an image, learned from losses on held-out images, less what is aleatoric in it.

    u(x) = e(phi(x)) - a(x),   e trained so that e(phi(x_i)) predicts the task loss L_i of held-out images

Lahlou et al. 2023 (arXiv 2102.08501). The error predictor e is an `UncertaintyHead` with a direct loss. As in the
paper, its inputs phi are the features and two numbers that keep their meaning for images unlike those of fit (the
paper's "stationarizing features"), each as a logarithm, all standardised:

    density    the squared Mahalanobis distance to the nearest class mean        (the paper: a density of the inputs)
    variance   the mutual information of label and last layer by `Laplace`       (the paper: a model's variance)

a(x) is nothing, where labels are taken to be free of noise; or "entropy", the loss that the prediction itself expects,
H(softmax(logits)), which only makes sense for a calibrated model and an e that predicts the mean loss. With nothing
subtracted, u is the whole expected loss: its kind is total, and epistemic only where the entropy is subtracted.

Rows are nearer to Gaussians that were fitted on them than new rows are: with half as many features as rows, by many
standard deviations of log density, so that e would be asked about values that it has never seen. So e learns from
numbers out of fold (ours): those of each fifth of the images are by density and posterior of the other four. Scores use
the density and posterior that were fitted without the first fifth. Their numbers for a new row of the same
distribution are then distributed as those that e has learned from, whatever the number of features. A fit on all rows
would have nearer Gaussians again: by three standard deviations in that case.

The losses of `fit` must come from images that the model was not trained on. A model's losses on its own training images
are far below those that it makes elsewhere, and e would learn that nothing ever goes wrong. The paper also learns from
out-of-distribution images where there are some: add them to the table, with their losses (`dubito.concat`). Where a
table has no losses but logits and labels of the model's classes, they are cross-entropies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final, get_args

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from dubito.choices import Aleatoric, DeupInput, Kind
from dubito.errors import ValueRangeError
from dubito.heads.losses import DIRECT_LOSSES
from dubito.heads.recipe import NEEDS, Recipe, as_recipe
from dubito.heads.score import UncertaintyHead
from dubito.metrics import nll_per_row
from dubito.scores._features import ScoreOfFeatures, fifths
from dubito.scores.gaussians import squared_distances
from dubito.scores.laplace import Laplace
from dubito.scores.mahalanobis import Mahalanobis
from dubito.scores.softmax import entropy
from dubito.table import Table, check_table
from dubito.table.table import Exact, take
from dubito.table.views import Computed, chosen_rows
from dubito.types import finite_batches
from dubito.validate import check_choice, check_seed, has_model_labels

_TINY = 1e-12
_CONSTANT = 1e-7
"""Inputs with a smaller deviation, as a share of their mean, do not vary."""
_BATCH = 256
_PASSES, _FEWEST_PASSES, _ROWS = 10, 7, 140_000
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
        seed: Seed of the folds, of the initial weights and of the order of rows.
        recipe: Settings of the training, with a direct loss. The default "log_l2" predicts the mean of log L, which
            suits losses that span decades; "l2" and "variance_nll" predict the mean. Unless it sets `rows`, the
            training makes 10 passes, of more than 14,000 rows fewer, but at least 7; unless it sets `batch`, that is
            256, or an eighth of a small table.
        features_: Width of the features.
        weights_: (p), all weights of the error predictor.
        trained_: How it was trained, as JSON.
        shift_: (k) means of its inputs.
        scale_: (k) their standard deviations.
        kind: "total"; with the entropy subtracted, "epistemic".
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
    kind: Kind = field(default="total", init=False, repr=False, compare=False)
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
        self.kind = "total" if self.aleatoric == "none" else "epistemic"
        logit = ("logit",) if "variance" in self.inputs or self.aleatoric == "entropy" else ()
        label = ("label",) if "density" in self.inputs else ()
        self.needs = ("feature", *logit)
        self.learns_from = tuple(dict.fromkeys((*self.needs, *label, *NEEDS[self.recipe.target])))
        self._parts: tuple[UncertaintyHead, Laplace] | None = None

    def fit(self, table: Table) -> "DEUP":
        """Learn from labelled images that the model was not trained on."""
        check_table(table, by="deup.fit")
        return super().fit(_with_losses(table))

    def learn(self, table: Table) -> None:
        """Density and posterior out of fold first, then the error predictor on standardised inputs."""
        self._parts, self.features_ = None, table.shape("feature")[1]
        fold = fifths(table, self.seed, "deup.fit")
        for _ in finite_batches(table.batches(*self.learns_from), table.name, by="deup.fit"):
            pass  # every row is checked before the first step
        inputs = self._standardised(table, self._out_of_fold(table, fold))
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

    def _out_of_fold(self, table: Table, fold: Int64[Tensor, "n"]) -> Float64[Tensor, "n k"]:
        """The two numbers of every row, by density and posterior of the other folds; the last fits are kept."""
        width = sum(one != "feature" for one in self.inputs)
        numbers = torch.empty(len(table), width, dtype=torch.float64)
        for one in reversed(range(int(fold.max()) + 1)):
            inside, outside = ((fold == one).nonzero()[:, 0], (fold != one).nonzero()[:, 0])
            posterior = self._fitted(chosen_rows(table, outside))
            batches = chosen_rows(table, inside).batches(*self.needs)
            numbers[inside] = torch.cat([self._numbers(*self._read(batch), posterior) for batch in batches])
        return numbers

    def _fitted(self, table: Table) -> Laplace:
        """The posterior; sets what it and the density learn, as far as they are inputs."""
        none, posterior = torch.empty(0, 0, dtype=torch.float64), Laplace()
        self.means_ = self.factor_ = self.basis_ = self.outputs_ = self.curvature_ = none
        self.precision_ = 0.0
        if "density" in self.inputs:
            distance = Mahalanobis().fit(table)
            self.means_, self.factor_ = distance.means_, distance.factor_
        if "variance" in self.inputs:
            posterior.fit(table)
            self.basis_, self.outputs_ = posterior.basis_, posterior.outputs_
            self.curvature_, self.precision_ = posterior.curvature_, posterior.precision_
        return posterior

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


def _with_losses(table: Table) -> Table:
    """With cross-entropies, where there are no losses but logits and labels of the model's classes."""
    others = table.provenance is not None and table.provenance.task_loss not in (None, "cross_entropy")
    if "loss" in table or "logit" not in table or not has_model_labels(table) or others:
        return table
    logit, label = table.column("logit"), table.column("label")
    losses = Computed((len(table),), lambda rows: nll_per_row(take(logit, rows), take(label, rows)).float())
    return table.extended(loss=losses)
