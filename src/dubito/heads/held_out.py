"""Images kept apart from training: how well the head orders them, watched while it learns.

    R-AUROC   AUROC of u against "the nearest other image has another label"       needs feature, label
    order     share of pairs of images whose u stands in the order of their losses  needs feature and the losses

The neighbours are found once; a measurement is then one pass of the head. Of several augmented epochs, one row a
photograph is used: two crops of one photograph would be each other's neighbours.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dubito.errors import DubitoError, TableError, ValueRangeError
from dubito.heads.module import HeadModule
from dubito.heads.recipe import Recipe
from dubito.heads.targets import NEEDS, target_column
from dubito.metrics import auroc, neighbour_matches
from dubito.table import Table
from dubito.table.views import chosen_rows
from dubito.types import Json

_MOST = 10_000


@final
@dataclass
class HeldOut:
    """Some rows in memory, and what is known of them.

    Attributes:
        features: (n, d).
        strange: The nearest other row has another label; None without labels or where all or none have.
        losses: The recipe's losses; None where the table does not have them.
    """

    features: Float[Tensor, "n d"]
    strange: Bool[Tensor, "n"] | None
    losses: Float[Tensor, "n"] | None

    @classmethod
    def of(cls, table: Table, recipe: Recipe) -> "HeldOut":
        """At most 10,000 rows of a table, one a photograph."""
        table.require("feature", by="held_out")
        chosen = one_epoch(table)
        if len(chosen) < 2:
            raise TableError(
                f"held_out: an order needs at least two photographs; {table.name} holds {len(chosen)} out. Hold out "
                f"more of them (a larger share, another table), or train without held_out."
            )
        chosen = chosen[:: -(-len(chosen) // _MOST)]
        names = [name for name in ("feature", "label", "loss", "logit") if name in table]
        rows = table.select(*names).rows(chosen)
        strange = None
        if "label" in rows:
            strange = ~neighbour_matches(rows.feature, rows.label)
            strange = None if bool(strange.all()) or not bool(strange.any()) else strange
        known = all(name in rows for name in NEEDS[recipe.target])
        losses = target_column(rows, recipe).clone() if known else None
        if strange is None and losses is None:
            raise TableError(
                f"held_out: {table.name} has neither labels, some with and some without a neighbour of the same label, "
                f"nor losses to rank. Extract it with labels, or train without held-out images."
            )
        return cls(rows.feature, strange, losses)

    def digest(self) -> str:
        """A hash of the rows and of what is known of them."""
        state = hashlib.blake2b(digest_size=8)
        for part in (self.features, self.strange, self.losses):
            state.update(b"none" if part is None else part.contiguous().numpy().tobytes())
        return state.hexdigest()

    @torch.no_grad()
    def measure(self, module: HeadModule) -> Json:
        """r_auroc and order of a head, where they can be had."""
        u = torch.cat([module(rows) for rows in torch.split(self.features, 2048)])
        found: Json = {}
        if self.strange is not None:
            found["r_auroc"] = auroc(u, self.strange)
        if self.losses is not None:
            found["order"] = _order(u, self.losses)
        return found


def photographs(table: Table) -> Int[Tensor, "n"]:
    """Which photograph each row shows: rows with one id, apart from the epoch behind it, show the same one.

    Positions (`photo`) would not do: in joined tables, they begin anew with each. Where there are no ids, they must.
    """
    if "id" in table:
        names = [re.sub(r"@\d+$", "", str(name)) for name in table.id]
        return torch.from_numpy(np.unique(names, return_inverse=True)[1].reshape(-1))
    position: Tensor = table.whole("photo") if "photo" in table else torch.arange(len(table))
    return position


def one_epoch(table: Table) -> Int[Tensor, "k"]:
    """The first row of every photograph."""
    first = np.unique(photographs(table).numpy(), return_index=True)[1]
    return torch.from_numpy(np.sort(first))


def split(table: Table, share: float, seed: int = 0) -> tuple[Table, Table]:
    """Two tables of different photographs: those to train on, and a share that is held out.

    Rows of one photograph stay together (`photographs`). Ids and row numbers are held in memory, features are not.
    """
    if not 0 < share < 1:
        raise ValueRangeError(f"held_out: a share must lie between 0 and 1; got {share}. 0.1 holds a tenth out.")
    photo = photographs(table)
    photos = torch.unique(photo)
    count = round(share * len(photos))
    if not 1 <= count < len(photos):
        raise DubitoError(
            f"held_out: a share of {share} of the {len(photos)} photographs in {table.name} leaves nothing to "
            f"{'hold out' if count < 1 else 'train on'}. Give another share or more photographs."
        )
    drawn = photos[torch.randperm(len(photos), generator=torch.Generator().manual_seed(seed))[:count]]
    out = torch.isin(photo, drawn)
    return chosen_rows(table, (~out).nonzero()[:, 0]), chosen_rows(table, out.nonzero()[:, 0])


def _order(u: Float[Tensor, "n"], losses: Float[Tensor, "n"]) -> float:
    """Of the pairs with different losses that are neighbours in ten fixed shuffles, the share in the right order."""
    right = pairs = 0.0
    for seed in range(10):
        shuffled = torch.randperm(len(u), generator=torch.Generator().manual_seed(seed))
        du, dl = u[shuffled].diff(), losses[shuffled].diff()
        pairs += float((dl != 0).sum())
        right += float((du * dl > 0).sum()) + float(((du == 0) & (dl != 0)).sum()) / 2
    return right / pairs
