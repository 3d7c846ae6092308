"""Density of the training features under a Gaussian mixture: far from all that the model has seen (Pearce et al. 2021).

    u(x) = -log q(z),   q(z) = sum_k pi_k N(z; mu_k, Sigma_k)                     (eq. 3, appendices C.5, C.6 and E.1)

The mixture and its fit by EM are in `gaussians`. The paper starts from k-means; here the classes are the default start,
because they are known and need no luck. `space="log"` fits log(z + offset): the paper does so for pre-trained networks,
and leaves open what it does with features that are zero.

`default_density` chooses the settings that suit a table of n rows of d features and c classes:

    start        by class, k = c Gaussians, where there are labels and n >= 10 c;
                 else free (k-means), k = n / 50 Gaussians, at least 1 and at most c
    covariance   full where n >= 5 k d and 16 k d^2 bytes are at most 1 GB; else tied where n >= 5 d; else diagonal
    EM           not with more than 100 Gaussians by class, nor where an iteration takes more than 2e11 multiply-adds:
                 n k d^2 (full), n d (d + k) (tied), n k d; then the mixture stays as it started, in closed form

So every variance is learned from several rows: with one image per class, Gaussians by class were worse than a single
one. Size and cost are known before anything is fitted. The rule is ours; the paper fits full covariances by EM wherever
it can.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, final, get_args

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from dubito.choices import Covariance, Nonlinearity, Space, Start
from dubito.errors import DubitoWarning, TableError, ValueRangeError
from dubito.scores._features import ScoreOfFeatures, classes_of, labelled, means_of_classes
from dubito.scores.gaussians import Mixture, improve, kmeans, maximise, squared_distances
from dubito.table import Table
from dubito.types import Score, check_finite, finite_batches
from dubito.validate import check_choice, check_number, check_seed

if TYPE_CHECKING:
    from dubito.scores.tune import Tuned

_AT_ONCE = 2048
_SAMPLE = 16_384
_SAMPLE_EACH = 64
"""k-means sees so many rows, or so many for each component if that is more."""
_SAMPLE_BYTES = 1e9
"""But no more than these have room for, with what k-means makes of them."""
_ROWS_PER_FEATURE = 5
_ROWS_PER_CLASS = 10
_ROWS_PER_CLUSTER = 50
_FULL_BYTES = 1e9
_CLOSED_FORM_FROM = 100
QUICK = 1e10
"""Multiply-adds of an iteration of EM, about a second's worth: `most` where a density is fitted beside other scores."""


def in_space(feature: Float[Tensor, "n d"], space: Space, offset: float, where: str) -> Float64[Tensor, "n d"]:
    """The features in float64, or log(z + offset); ValueRangeError where there is no such number."""
    z = feature.double()
    if space == "z":
        return z
    if not bool((z > -offset).all()):
        value, column = float(z.min()), int(z.min(0).values.argmin())
        raise ValueRangeError(
            f"{where}: with space='log', features must be larger than -offset = {-offset:g}; got {value:g} in feature "
            f"{column}. Choose space='z' (features before a non-linearity may be negative), or a larger offset."
        )
    return (z + offset).log()


def reads(table: Table, nonlinearity: Nonlinearity) -> Table:
    """The same rows; what the density reads is their feature."""
    return table if nonlinearity == "after" else table.extended(feature=table.column("pre_activation"))


def class_count(table: Table) -> int | None:
    """The columns of the logits, or else the number of labels that occur; None where there are neither."""
    if "logit" in table:
        return table.shape("logit")[1]
    return len(classes_of(table, "density.fit")) if "label" in table else None


@final
@dataclass
class Density(ScoreOfFeatures):
    """Minus the log-density of the feature under a Gaussian mixture of training features.

    Attributes:
        components: Number of Gaussians. None: one per class; with start="free", one per column of logits, or per label.
        covariance: "full", "tied" (one for all components), "diagonal" or "spherical". A class with a single row has no
            variance of its own but the regularisation, unless it is tied; a warning says so.
        space: Fit z, or log(z + offset). The paper's best was z for networks trained from scratch, log for pre-trained.
        offset: Keeps the logarithm of a zero finite: about the smallest feature that matters. The paper's is not known.
        regularisation: Added to every variance. 1e-5 on z; on log z the paper's best was 1e-3.
        start: "class": one component for each label. "free": clusters by k-means, without labels.
        max_iterations: Of EM. With 0, the mixture stays as it started: class by class, in closed form.
        tolerance: EM ends when the mean log-likelihood changes by less.
        neurons: Use so many features, drawn at random; None: all.
        seed: Of that draw and of k-means.
        memory: Gigabytes that the fit may take; k-means shrinks its sample, a mixture that takes more is refused.
        nonlinearity: "after" reads the column `feature`; "before" what lies before the last non-linearity, the column
            `pre_activation` of the probe `dubito.probes.PreActivation`. The paper's best was after.
        weights_: (k), once fitted.
        means_: (k, d).
        factors_: Cholesky factors of the precisions: full (k, d, d), tied (d, d), diagonal (k, d), spherical (k).
        neurons_: (d) which features are used.
        width_: Width of the features that it was fitted on.
        log_likelihoods_: Mean over the training rows, before each iteration of EM.
    """

    components: int | None = None
    covariance: Covariance = "full"
    space: Space = "z"
    offset: float = 1e-2
    regularisation: float = 1e-5
    start: Start = "class"
    max_iterations: int = 100
    tolerance: float = 1e-3
    neurons: int | None = None
    seed: int = 0
    memory: float = 4.0
    nonlinearity: Nonlinearity = "after"

    name = "density"
    kind = "epistemic"
    needs = ("feature",)
    learns_from: tuple[str, ...] = field(default=("feature", "label"), init=False, repr=False, compare=False)
    learned = ("weights_", "means_", "factors_", "neurons_", "width_", "log_likelihoods_")

    def __post_init__(self) -> None:
        check_seed(self.seed, by="density")
        choices = {"covariance": Covariance, "space": Space, "start": Start, "nonlinearity": Nonlinearity}
        for name, kinds in choices.items():
            check_choice(getattr(self, name), get_args(kinds), by="density", what=name)
        from_zero = ("max_iterations", "regularisation", "tolerance", "offset")
        for name, least in {"components": 1, "neurons": 1, **dict.fromkeys(from_zero, 0)}.items():
            if getattr(self, name) is not None:
                check_number(getattr(self, name), f"[{least}, inf)", by="density", what=name)
        if self.memory != float("inf"):
            check_number(self.memory, "(0, inf)", by="density", what="memory", hint="It is in gigabytes.")
        self.needs = ("feature",) if self.nonlinearity == "after" else ("pre_activation",)
        self.learns_from = (*self.needs, "label") if self.start == "class" else self.needs

    def learn(self, table: Table) -> None:
        """Fit the mixture; the table is read block by block, in every iteration again."""
        table = reads(table, self.nonlinearity)
        self.width_ = table.shape("feature")[1]
        most, hint = f"[1, {self.width_}]", "Leave it out to use all features."
        check_number(self.neurons or 1, most, by="density.fit", what="neurons", hint=hint, error=TableError)
        draw = torch.randperm(self.width_, generator=torch.Generator().manual_seed(self.seed))
        self.neurons_ = draw[: self.neurons].sort().values
        classes = classes_of(table, "density.fit") if self.start == "class" else None
        k = self._count(table, classes)
        mixture = self._free(table, k) if classes is None else self._by_class(table, classes)
        mixture, self.log_likelihoods_ = improve(
            lambda: (self._prepared(batch.feature, "fit") for batch in table.batches("feature")),
            mixture,
            regularisation=self.regularisation,
            max_iterations=self.max_iterations,
            tolerance=self.tolerance,
        )
        self.weights_, self.means_, self.factors_ = mixture.weights, mixture.means, mixture.factors

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """-log q of every row, in the space of the fit."""
        batch = reads(batch, self.nonlinearity)
        self.check_width(batch, self.width_)
        return -self.mixture.log_density(self._prepared(batch.feature, "score"))

    @property
    def mixture(self) -> Mixture:
        """What was fitted: weights, means, factors; `covariances()` computes the covariances."""
        self.check_fitted()
        return Mixture(self.covariance, self.weights_, self.means_, self.factors_)

    @classmethod
    def tune(
        cls,
        train: Table,
        validation: Table,
        *,
        grid: Mapping[str, Sequence[Any]] | None = None,
        budget: int = 32,
        seed: int = 0,
        **settings: Any,
    ) -> "Tuned":
        """Choose the settings by the log-likelihood of held-out rows of the same kind as the training's (C.5).

        OOD images have no part in it: a score tuned on them must not be tested on them. Likelihoods are those of all
        features in z, so that candidates can be compared.

        Args:
            train: Rows to fit on.
            validation: Rows of the same data that were not fitted on.
            grid: Values by setting; what is left out has those of C.5.
            budget: Fits at most. Combinations of covariance, space and components take turns, the rest is drawn.
            seed: Of the draws.
            settings: Further settings that all candidates share.
        """
        from dubito.scores.tune import tune_density  # noqa: PLC0415 (it makes scores of this class)

        return tune_density(train, validation, grid or {}, budget, seed, settings)

    def _prepared(self, feature: Float[Tensor, "n d"], verb: str) -> Float64[Tensor, "n neurons"]:
        z = in_space(feature, self.space, self.offset, f"density.{verb}")
        return z if len(self.neurons_) == z.shape[1] else z[:, self.neurons_]

    def _count(self, table: Table, classes: Int64[Tensor, "c"] | None) -> int:
        """How many components, checked against the rows and the memory."""
        k = self.components or (class_count(table) if classes is None else len(classes))
        if classes is not None and k != len(classes):
            raise TableError(
                f"density.fit: with start='class' there is one component for each of the {len(classes)} labels of "
                f"{table.name}; got components={k}. Leave components out, or choose start='free'."
            )
        if k is None:
            raise TableError(
                f"density.fit: components must be set; {table.name} has neither label nor logit to count classes. "
                f"Pass components=..., the number of Gaussians."
            )
        if k > len(table):
            raise TableError(
                f"density.fit: {k} components need at least as many rows; {table.name} has {len(table)}. "
                f"Fit on more images or choose fewer components."
            )
        d = len(self.neurons_)
        # k-means comes before and takes less: its sample shrinks to what memory allows, down to 32 k d bytes.
        size = 8 * {"full": 2 * k * d * d, "tied": 4 * d * d + 4 * k * d}.get(self.covariance, 6 * k * d)
        if size > self.memory * 1e9:
            raise ValueRangeError(
                f"density.fit: {k} components with {self.covariance} covariances of {d} features take {size / 1e9:.1f} "
                f"GB ({size:,} bytes); memory={self.memory:g} allows {self.memory:g} GB. Choose covariance='tied' or "
                f"'diagonal', fewer features (neurons=...) or components, or allow more memory."
            )
        return k

    def _by_class(self, table: Table, classes: Int64[Tensor, "c"]) -> Mixture:
        prepare = partial(self._prepared, verb="fit")
        pairs = partial(labelled, table, classes, prepare, by="density.fit")
        means, counts = means_of_classes(pairs(), len(classes), len(self.neurons_))
        single = classes[counts == 1].tolist()
        if single and self.covariance != "tied":
            which = ", ".join(map(str, single[:3])) + (" ..." if len(single) > 3 else "")
            warnings.warn(
                f"density.fit: a class with a single row gets a Gaussian without variance but the regularisation, "
                f"{self.regularisation:g}, which knows no other image; {table.name} has {len(single)} of that kind "
                f"(label {which}). Fit on more images of them, or choose covariance='tied'.",
                DubitoWarning,
                stacklevel=5,
            )
        return maximise(pairs(), means, self.covariance, self.regularisation)

    def _free(self, table: Table, k: int) -> Mixture:
        centres = kmeans(self._sample(table, k), k, self.seed)
        batches = finite_batches(table.batches("feature"), table.name, by="density.fit")
        blocks = (self._prepared(batch.feature, "fit") for batch in batches)
        pairs = ((z, squared_distances(z, centres).argmin(1)) for z in blocks)
        return maximise(pairs, centres, self.covariance, self.regularisation)

    def _sample(self, table: Table, k: int) -> Float[Tensor, "s d"]:
        """Rows that k-means sees: no more than memory has room for, but one for each component."""
        # Four times float32 (rows, centred, and two while distances are summed), and as much for float64 on reading.
        room = int(min(_SAMPLE_BYTES, self.memory * 1e9) / (32 * len(self.neurons_)))
        size = min(len(table), max(_SAMPLE, _SAMPLE_EACH * k), max(room, k))
        draw = torch.randperm(len(table), generator=torch.Generator().manual_seed(self.seed))[:size].sort().values
        parts = []
        for rows in torch.split(draw, _AT_ONCE):
            feature = table.select("feature").rows(rows).feature
            check_finite(feature, "feature", rows.tolist(), table.name, by="density.fit")
            parts.append(self._prepared(feature, "fit").float())
        return torch.cat(parts)


def default_density(
    train: Table, covariance: Covariance | None = None, *, by: str = "default_density", most: float = 2e11
) -> Density:
    """The density that suits the size of a table: see the rule above.

    Args:
        train: Rows to fit on.
        covariance: Kind of covariance, whatever the rule says.
        by: The function that the user called, for errors.
        most: Multiply-adds that an iteration of EM may take; ten to twenty seconds on one core by default.

    >>> import torch
    >>> table = Table(feature=torch.randn(400, 8), logit=torch.randn(400, 4), label=torch.arange(400) % 4)
    >>> default_density(table).covariance, default_density(table.rows(slice(0, 90))).covariance
    ('full', 'tied')
    """
    train.require("feature", by=by)
    rows, width = train.shape("feature")
    classes = len(torch.unique(train.label)) if "label" in train else train.shape("logit")[1] if "logit" in train else 1
    by_class = "label" in train and rows >= _ROWS_PER_CLASS * classes
    components = classes if by_class else max(1, min(classes, rows // _ROWS_PER_CLUSTER))
    if covariance is None:
        small = 16 * components * width**2 <= _FULL_BYTES
        covariance = "tied" if rows >= _ROWS_PER_FEATURE * width else "diagonal"
        covariance = "full" if small and rows >= _ROWS_PER_FEATURE * components * width else covariance
    numbers = {"full": components * width * width, "tied": width * (width + components)}
    costly = rows * numbers.get(covariance, components * width) > most
    return Density(
        components=None if by_class else components,
        covariance=covariance,
        start="class" if by_class else "free",
        max_iterations=0 if costly or (by_class and components > _CLOSED_FORM_FROM) else 100,
    )


def describe_density(density: Score, train: Table | None) -> str:
    """The density in words, with its size: what was fitted, or what will be."""
    fitted = density.is_fitted
    if not isinstance(density, Density) or (train is None and not fitted):
        return density.name
    if fitted:
        components, width = density.means_.shape
    elif train is not None:
        width = density.neurons or train.shape("feature")[1]
        by_class = density.start == "class"
        components = density.components or (len(torch.unique(train.label)) if by_class else class_count(train) or 1)
    many = "1 Gaussian" if components == 1 else f"{components} Gaussians"
    by = " (one per class)" if density.start == "class" else " (by k-means)" if components != 1 else ""
    numbers = {"full": components * width**2, "tied": width**2 + components * width}
    size = f", {8 * numbers.get(density.covariance, 2 * components * width) / 1e6:,.1f} MB"
    fit = "in closed form" if density.max_iterations == 0 else "by EM"
    where = " (log z)" if density.space == "log" else ""
    return f"{many}{by}, {density.covariance} covariances of {width} features{where}, {fit}{size}"
