"""A linear classifier on the features of labelled rows, and an ensemble of them that may disagree.

The classifier is `heads.linear_probe`'s with W0 = 0, and each member one with a draw W0 from the prior that the penalty
corresponds to, N(0, 1 / strength): anchored ensembles, Pearce et al. 2020 (1810.05546). In directions that few labels
leave open, members of a bootstrap would all agree, while these differ. W - W0 is a sum of labelled rows, so the
solution is sought in their span.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from dubito.active.labels import require_labels
from dubito.ensembles.head_masks import from_features
from dubito.errors import TableError
from dubito.heads.linear_probe import fit_linear, pool_scale
from dubito.table import Table
from dubito.validate import check_classes, check_number, check_seed


@final
@dataclass(frozen=True)
class LinearTrainer:
    """Trains linear classifiers on the labelled rows of a table: a trainer for `Acquire.run`.

    Attributes:
        members: The size of the ensemble `members`, for strategies that use disagreement; 0 for none.
        strength: The strength of the penalty on weights; 1 is scikit-learn's C = 1.
        seed: Seed of the members.
    """

    members: int = 0
    strength: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.members != 0:
            hint = "0 is for none, 20 are usual."
            check_number(self.members, "[2, inf)", by="LinearTrainer", what="members", whole=True, hint=hint)
        check_number(self.strength, "(0, inf)", by="LinearTrainer", what="strength", hint="1 is usual.")
        check_seed(self.seed, by="LinearTrainer")

    def __call__(self, table: Table, rows: Int64[Tensor, "k"]) -> "LinearHeads":
        """Train on these rows of the table, which has features and labels."""
        table.require("feature", by="LinearTrainer")
        if not len(rows):
            raise TableError("LinearTrainer needs at least one labelled row; got none. Begin with start=10 or more.")
        require_labels(table, rows.numpy(), "LinearTrainer")
        label = table.select("label").rows(rows).label.numpy()
        own = "logit" not in table or table.label_space == "own"
        # At least two: the first few labels may all be the same.
        classes = max(2, int(table.label.max()) + 1, len(table.label_names or ())) if own else table.shape("logit")[1]
        hint = "Name other classes (classes=[...]), or leave column 'logit' out of the pool."
        check_classes(torch.from_numpy(label), classes, by="LinearTrainer", hint=hint)
        mean, scale = pool_scale(table, by="LinearTrainer")
        x = (table.select("feature").rows(rows).feature.double() - mean).numpy() / scale
        # The number of rows is part of the seed: members of two rounds are independent.
        rng = np.random.default_rng([self.seed, len(rows)])
        span = np.eye(x.shape[1])
        if len(x) < x.shape[1]:  # an orthonormal basis of the rows, and the rows in it
            span, rows_in_span = np.linalg.qr(x.T)
            x = rows_in_span.T
        priors = [np.zeros((len(span), classes))]
        priors += [rng.normal(scale=self.strength**-0.5, size=(len(span), classes)) for _ in range(self.members)]
        heads = []
        for prior in priors:
            within = span.T @ prior
            fitted = fit_linear(x, label, within, self.strength)
            heads.append(np.vstack([prior + span @ (fitted[:-1] - within), fitted[-1:]]))
        return LinearHeads(mean.numpy(), scale, np.stack(heads).astype(np.float32))


@final
@dataclass(frozen=True)
class LinearHeads:
    """One classifier on all labelled rows, and its members.

    Attributes:
        mean: (d) Mean of the pool's features.
        scale: Their common scale.
        heads: (1 + m, d + 1, c) Weights, biases last.
    """

    mean: Float64[np.ndarray, "d"]
    scale: float
    heads: Float32[np.ndarray, "h e c"]

    def extend(self, table: Table) -> Table:
        """The table with their logits: logit, and members_logit if there are members; computed when rows are read."""
        table.require("feature", by="LinearHeads.extend")
        feature, (many, _, classes) = table.column("feature"), self.heads.shape
        if feature.shape[1] != len(self.mean):
            raise TableError(
                f"LinearHeads.extend: features of {table.name} must be {len(self.mean)} wide, as those of "
                f"the training; got {feature.shape[1]}. Extract both tables with the same model."
            )
        columns = {"logit": from_features([feature], lambda z: self._logits(z, 0, 1)[:, 0], (classes,), classes)}
        if many > 1:
            shape, size = (many - 1, classes), (many - 1) * classes
            columns["members_logit"] = from_features([feature], lambda z: self._logits(z, 1, many), shape, size)
        # Predictions of another model must not stand beside these.
        stale = [key for key in table.columns if key == "loss" or key.split("_")[0] == "members"]
        return table.select(*(key for key in table.columns if key not in stale)).extended(**columns)

    def _logits(self, z: Tensor, first: int, last: int) -> Tensor:
        x = ((z.double() - torch.from_numpy(self.mean)) / self.scale).float()
        heads = torch.from_numpy(self.heads[first:last])
        return torch.einsum("nd,mdc->nmc", x, heads[:, :-1]) + heads[:, -1]
