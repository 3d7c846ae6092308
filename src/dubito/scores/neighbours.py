"""Distance to the k-th nearest training feature: far from everything the model has seen.

    u(x) = || z/||z|| - z_(k)/||z_(k)|| ||_2,   z_(k) the k-th nearest of a bank in cosine similarity

Sun et al. 2022; exact search by faiss, batch by batch. A feature of zeros has no direction: z/||z|| is then taken as
zero, and u = 1, as far as a cosine of one half.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.errors import TableError
from dubito.scores._features import ScoreOfFeatures, drawn, unit, unit_bank
from dubito.table import Table
from dubito.validate import check_number, check_seed

_BANK = 5000
"""Of a larger table, so many images drawn at random stand for the others."""


def kth_distance(queries: Float[Tensor, "n d"], bank: Float[Tensor, "b d"], k: int) -> Float[Tensor, "n"]:
    """Euclidean distance to the k-th nearest row of the bank; both normalised to length one."""
    import faiss  # noqa: PLC0415 (slow to import; most scores need none of it)

    arrays = queries.float().contiguous().numpy(), bank.float().contiguous().numpy()
    _, index = faiss.knn(*arrays, k, metric=faiss.METRIC_INNER_PRODUCT)
    # From the two vectors, not from their product: near zero, sqrt(2 - 2 cos) would be nothing but rounding.
    kth = bank[torch.from_numpy(index[:, -1])]
    distance: Tensor = torch.linalg.vector_norm(queries.double() - kth.double(), dim=-1)
    return distance


@final
@dataclass
class Neighbours(ScoreOfFeatures):
    """The k-th nearest neighbour's distance on normalised features.

    Attributes:
        k: Which neighbour. One is sensitive to single odd training images, many blur small classes.
        bank_size: Keep this many rows, drawn at random; None keeps all. A fiftieth often serves as well.
        seed: Of that draw.
        bank_: (b, d) normalised features, once fitted.
    """

    k: int = 10
    bank_size: int | None = None
    seed: int = 0

    name = "neighbours"
    kind = "epistemic"
    needs = ("feature",)
    learns_from = ("feature",)
    learned = ("bank_",)

    def __post_init__(self) -> None:
        check_seed(self.seed, by=self.name)

    def learn(self, table: Table) -> None:
        """Keep the normalised features."""
        size = len(table) if self.bank_size is None else min(self.bank_size, len(table))
        hint = f"The bank has {size} rows: fit on more images or choose a smaller k."
        check_number(self.k, f"[1, {size}]", by="neighbours.fit", what="k", whole=True, hint=hint, error=TableError)
        self.bank_ = unit_bank(table, drawn(table, self.bank_size, self.seed), "neighbours.fit")

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The distance of every row."""
        self.check_width(batch, self.bank_.shape[1])
        most, hint = f"[1, {len(self.bank_)}]", "It is not as it was saved: fit it again."
        check_number(self.k, most, by="neighbours.score", what="k", whole=True, hint=hint, error=TableError)
        return kth_distance(unit(batch.feature), self.bank_, self.k)


def neighbours_among(table: Table, k: int = 10) -> Neighbours:
    """Fitted on the images that it will score: the distance of each to its k-th nearest other image.

    Of fewer images the farthest counts, and more than 5,000 are compared with so many drawn at random.
    """
    # One more than the neighbour: the nearest image of each is itself.
    return Neighbours(k=min(k + 1, len(table), _BANK), bank_size=_BANK).fit(table)
