"""Held-out images: how well a head orders them, measured while it learns.

    R-AUROC   AUROC of u against "the nearest other image has another label"       needs feature, label
    order     share of pairs of images whose u has the order of their losses        needs feature and the losses

At the end, the head is compared with what every classifier has for free, max_probability and entropy, on the same rows
(`beside_softmax`): by R-AUROC, and by error AUROC, AUROC of u against "the prediction is wrong".

Neighbours are searched once; a measurement is then one pass of the head. Of several augmented epochs, one row per image
is used: two crops of one image would be each other's neighbours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dubito.errors import DubitoError, TableError
from dubito.heads.module import HeadModule
from dubito.heads.recipe import NEEDS, Recipe, target_column
from dubito.metrics import RankedScore, auroc, confidence, correct, neighbour_matches, rank_scores
from dubito.metrics.bootstrap import FEWEST
from dubito.metrics.information import entropy_of
from dubito.storage import tensors_digest
from dubito.table import Table
from dubito.table.folds import images_of
from dubito.table.views import chosen_rows
from dubito.types import Json
from dubito.validate import check_number, has_model_labels

_MOST = 10_000


@final
@dataclass
class HeldOut:
    """Some rows in memory, with what they are measured by.

    Attributes:
        features: (n, d).
        mismatch: Whether the nearest other row has another label; None without labels or where all or none have.
        losses: The recipe's losses; None where the table does not have them.
    """

    features: Float[Tensor, "n d"]
    mismatch: Bool[Tensor, "n"] | None
    losses: Float[Tensor, "n"] | None

    @classmethod
    def of(cls, table: Table, recipe: Recipe) -> "HeldOut":
        """At most 10,000 rows of a table, one per image."""
        table.require("feature", by="held_out")
        chosen = _one_per_image(table)
        if len(chosen) < 2:
            raise TableError(
                f"held_out: an order needs at least two images; {table.name} holds {len(chosen)} out. Hold out "
                f"more of them (a larger share, another table), or train without held_out."
            )
        names = [name for name in ("feature", "label", "loss", "logit") if name in table]
        rows = table.select(*names).rows(chosen)
        mismatch = ~neighbour_matches(rows.feature, rows.label) if "label" in rows else None
        if mismatch is not None and (bool(mismatch.all()) or not bool(mismatch.any())):
            mismatch = None
        losses = target_column(rows, recipe) if all(name in rows for name in NEEDS[recipe.target]) else None
        if mismatch is None and losses is None:
            raise TableError(
                f"held_out: {table.name} has neither labels, some with and some without a neighbour of the same label, "
                f"nor losses to rank. Extract it with labels, or train without held-out images."
            )
        return cls(rows.feature, mismatch, losses)

    def digest(self) -> str:
        """A hash of everything that measurements depend on."""
        return tensors_digest({name: part for name, part in vars(self).items() if part is not None})

    @torch.no_grad()
    def measure(self, module: HeadModule) -> Json:
        """The head's r_auroc and order, each where it is defined."""
        u = torch.cat([module(rows) for rows in torch.split(self.features, 2048)])
        figures: Json = {}
        if self.mismatch is not None:
            figures["r_auroc"] = auroc(u, self.mismatch)
        if self.losses is not None:
            figures["order"] = _order(u, self.losses)
        return figures


def split(table: Table, share: float, seed: int = 0) -> tuple[Table, Table]:
    """Two tables of different images: those to train on, and a share that is held out.

    All rows of one image stay together. Ids and row numbers are held in memory, features are not.
    """
    check_number(share, "(0, 1)", by="train", what="held_out", hint="0.1 holds a tenth out.")
    image = images_of(table)
    images = torch.unique(image)
    count = round(share * len(images))
    if not 1 <= count < len(images):
        raise DubitoError(
            f"held_out: a share of {share} of the {len(images)} images in {table.name} leaves nothing to "
            f"{'hold out' if count < 1 else 'train on'}. Pass another share or more images."
        )
    drawn = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:count]]
    out = torch.isin(image, drawn)
    return chosen_rows(table, (~out).nonzero()[:, 0]), chosen_rows(table, out.nonzero()[:, 0])


def beside_softmax(
    head: Callable[[Float[Tensor, "n d"]], Float[Tensor, "n"]], table: Table
) -> dict[str, dict[str, RankedScore]]:
    """By metric, the head and the softmax scores that need no training, the best first, on the same held-out rows.

    Metrics that the table does not allow, for want of labels, logits or errors, are left out.
    """
    if "logit" not in table or "label" not in table:
        return {}
    rows = table.select("feature", "logit", "label").rows(_one_per_image(table))
    positives = {"r_auroc": ~neighbour_matches(rows.feature, rows.label)}
    if has_model_labels(table):
        positives["error_auroc"] = ~correct(rows.logit, rows.label)
    u = {
        "head": torch.cat([head(part) for part in torch.split(rows.feature, 2048)]).double(),
        "max_probability": -confidence(rows.logit),
        "entropy": entropy_of(rows.logit.double().softmax(-1)),
    }
    return {
        name: rank_scores(auroc, u, flags, by="train")
        for name, flags in positives.items()
        if min(int(flags.sum()), int((~flags).sum())) >= FEWEST
    }


def _one_per_image(table: Table) -> Int[Tensor, "n"]:
    """The first row of every image; of more than 10,000 images, evenly spaced ones."""
    first = torch.from_numpy(np.sort(np.unique(images_of(table).numpy(), return_index=True)[1]))
    return first[:: max(1, -(-len(first) // _MOST))]


def _order(u: Float[Tensor, "n"], losses: Float[Tensor, "n"]) -> float:
    """Of the pairs with different losses that are neighbours in ten fixed shuffles, the share in the right order."""
    right = pairs = 0.0
    for seed in range(10):
        shuffled = torch.randperm(len(u), generator=torch.Generator().manual_seed(seed))
        du, dl = u[shuffled].diff(), losses[shuffled].diff()
        pairs += float((dl != 0).sum())
        right += float((du * dl > 0).sum()) + float(((du == 0) & (dl != 0)).sum()) / 2
    return right / pairs
