"""Distance to the k-th nearest training feature: far from everything the model has seen.

    u(x) = || z/||z|| - z_(k)/||z_(k)|| ||_2,   z_(k) the k-th nearest of a bank in cosine similarity

Sun et al. 2022; exact search by faiss, batch by batch. A feature of zeros has no direction: z/||z|| is then taken as
zero, and u = 1, as far as a cosine of one half.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dubito.errors import TableError
from dubito.scores._features import ScoreOfFeatures, drawn, unit, unit_bank
from dubito.table import Table
from dubito.validate import check_number, check_seed

_BANK = 5000
"""Of a larger table, so many images drawn at random stand for the others."""
Search = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""A function like `most_similar`, for instance of tensor operations alone."""


def most_similar(
    queries: Float[Tensor, "n d"], bank: Float[Tensor, "b d"], k: int
) -> tuple[Float[Tensor, "n k"], Int64[Tensor, "n k"]]:
    """The k largest products of every query with rows of the bank, the largest first, and which rows; by faiss."""
    import faiss  # noqa: PLC0415 (slow to import; most scores need none of it)

    arrays = queries.float().contiguous().numpy(), bank.float().contiguous().numpy()
    products, index = faiss.knn(*arrays, k, metric=faiss.METRIC_INNER_PRODUCT)
    return torch.from_numpy(products), torch.from_numpy(index)


def kth_distance(
    queries: Float[Tensor, "n d"], bank: Float[Tensor, "b d"], k: int, search: Search = most_similar
) -> Float[Tensor, "n"]:
    """Euclidean distance to the k-th nearest row of the bank; both normalised to length one."""
    # From the two vectors, not from their product: near zero, sqrt(2 - 2 cos) would be nothing but rounding.
    kth = bank[search(queries, bank, k)[1][:, -1]]
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
        return self.distance(batch.feature)

    def distance(self, feature: Float[Tensor, "n d"], search: Search = most_similar) -> Float[Tensor, "n"]:
        """The same from features, unchecked."""
        return kth_distance(unit(feature), self.bank_, self.k, search)


def neighbours_among(table: Table, k: int = 10) -> Neighbours:
    """Fitted on the images that it will score: the distance of each to its k-th nearest other image.

    Of fewer images the farthest counts, and more than 5,000 are compared with so many drawn at random.
    """
    # One more than the neighbour: the nearest image of each is itself.
    return Neighbours(k=min(k + 1, len(table), _BANK), bank_size=_BANK).fit(table)
