"""Members of the last layer alone, learned and applied from a cache: no images, no backbone.

    logits_m = W (c_m * z) + b

Masks are on the columns of the classifying layer, so each member reads a subset of the features; rows are classes and
stay. Diversity and cross-entropy are those of `extract_members`. This is ours: the paper masks all layers of an MLP.
All members share the features of one backbone, so they agree more than members of a whole model would. What they
predict becomes columns that are computed from the features when rows are read (`from_features`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Int
from torch import Tensor

from dubito.ensembles.implicit import read_masks, write_masks
from dubito.ensembles.layers import masked_linear
from dubito.ensembles.masks import MaskRecipe, rows_each, trained_masks
from dubito.errors import NotFittedError, TableError
from dubito.heads.linear_logits import centred_layer
from dubito.heads.stream import Stream
from dubito.metrics.streaming import SUMMARY, MemberStream
from dubito.storage import to_path
from dubito.table import Column, Exact, Provenance, Table
from dubito.table.views import Computed
from dubito.types import Classifier, finite
from dubito.validate import check_classes, check_model_labels, check_same_model, check_seed

_ROWS, _NUMBERS = 512, 2**22
"""Most rows of a block, and most member logits in it: a few copies of 32 MB are made."""
Head = tuple[Float[Tensor, "c d"], Float[Tensor, "c"] | None]


@final
class HeadMasks:
    """Members that each read some of the features: `fit` on a labelled table, then `extend` any table of that model.

    Args:
        members: Number of members.
        recipe: Settings that the paper leaves open.
        seed: Seed of the initial masks and of the order of rows.

    >>> z, label = torch.eye(4).repeat(50, 5), torch.arange(200) % 4
    >>> table = Table(feature=z, logit=4 * z[:, :4], label=label)
    >>> masks = HeadMasks(members=3, recipe=MaskRecipe(steps=20)).fit(table)
    >>> table = masks.extend(table)
    >>> table.shape("masks"), table.shape("masks_logit")
    ((200, 9), (200, 3, 4))
    """

    def __init__(self, *, members: int = 10, recipe: MaskRecipe | None = None, seed: int = 0) -> None:
        check_seed(seed, by="HeadMasks")
        self.members, self.recipe, self.seed = members, recipe or MaskRecipe(), seed
        self.masks_: Float[Tensor, "m d"] | None = None

    def __repr__(self) -> str:
        state = "not fitted" if self.masks_ is None else f"{self.masks_.shape[1]} features"
        return f"HeadMasks({self.members} members, {state})"

    def fit(self, table: Table, head: Classifier | Head | None = None, *, progress: bool = True) -> "HeadMasks":
        """Learn masks from features and labels, in batches that do not grow with the table; returns itself.

        Args:
            table: Images that the model was trained on, with features, and labels that are the model's classes.
            head: The model, once it has seen a batch, or weight (c, d) and bias (c) of its last layer. By default they
                are recovered from the table's logits by least squares, up to a constant per row. No probability depends
                on that constant, but weights by the size of logits (WeightedMutualInformation) do: give the model then.
            progress: Whether to show a progress bar on a terminal.
        """
        self.masks_ = None
        check_model_labels(table, by="HeadMasks.fit", columns=("feature", "label"))
        weight, bias = _last_layer(table, head)
        width = table.shape("feature")[1]
        if weight.shape[1] != width:
            raise TableError(
                f"HeadMasks.fit: the head reads {weight.shape[1]} features; those of {table.name} are {width} wide. "
                f"Pass the head of the model that made the table."
            )
        check_classes(table.label, len(weight), by="HeadMasks.fit", of=f"the labels of {table.name}")
        self.masks_ = trained_masks(
            lambda masks, z: masked_linear(z, weight, bias, masks["head"], "head"),
            self._batches(table),
            {("head", "columns"): width},
            members=self.members,
            recipe=self.recipe,
            seed=self.seed,
            progress=progress,
        )
        self.weight_, self.bias_ = weight, bias
        self.fitted_on_ = table.select("feature").rows(slice(0, 0))  # its model and width
        return self

    def logits(self, feature: Float[Tensor, "n d"]) -> Float[Tensor, "n m c"]:
        """Each member's logits for these features."""
        masks = self._fitted("logits")
        if feature.shape[1] != masks.shape[1]:
            raise TableError(
                f"HeadMasks: features must be {masks.shape[1]} wide, as in fit; got {feature.shape[1]}. "
                f"Use a table of the same model."
            )
        z = finite(feature.float(), "HeadMasks: features")
        return torch.stack([F.linear(z * mask, self.weight_, self.bias_) for mask in masks], dim=1)

    def extend(self, table: Table) -> Table:
        """The same rows with columns `masks` (n, s), `masks_logit` (n, m, c), and `masks_loss` (n) where labels allow.

        They are computed from the table's features when rows are read.
        """
        self._fitted("extend")
        table.require("feature", by="HeadMasks.extend")
        check_same_model(self.fitted_on_, {"table": table}, by="HeadMasks.extend")
        feature, (classes, size) = table.column("feature"), (len(self.weight_), self.members * len(self.weight_))

        def stream(z: Tensor) -> MemberStream:
            members = MemberStream()
            members.add(self.logits(z))
            return members

        columns: dict[str, Any] = {
            "masks": from_features([feature], lambda z: stream(z).summary().float(), (len(SUMMARY),), size),
            "masks_logit": from_features([feature], self.logits, (self.members, classes), size),
        }
        if "label" in table and table.label_space == "model":
            label = table.column("label")
            columns["masks_loss"] = from_features([feature, label], lambda z, y: stream(z).loss(y).float(), (), size)
        return table.extended(**columns)

    def save(self, path: str | Path) -> Path:
        """Write the masks and the layer to one safetensors file."""
        tensors = {"columns.head": self._fitted("save"), "weight": self.weight_}
        if self.bias_ is not None:
            tensors["bias"] = self.bias_
        made_by = self.fitted_on_.provenance
        provenance = None if made_by is None else made_by.to_json()
        note = {"seed": self.seed, "recipe": asdict(self.recipe), "provenance": provenance}
        return write_masks(to_path(path, "masks"), tensors, note)

    @classmethod
    def load(cls, path: str | Path) -> "HeadMasks":
        """Read what `save` wrote; nothing is unpickled."""
        with read_masks(path) as (tensors, note):
            masks, weight, bias = tensors["columns.head"], tensors["weight"], tensors.get("bias")
            if (
                masks.ndim != 2
                or weight.shape[1:] != masks.shape[1:]
                or (bias is not None and len(bias) != len(weight))
            ):
                shapes = ", ".join(f"{key} {tuple(one.shape)}" for key, one in tensors.items())
                raise ValueError(f"masks and layer must have one width; got {shapes}")
            loaded = cls(members=len(masks), recipe=MaskRecipe(**note["recipe"]), seed=note["seed"])
            loaded.masks_, loaded.weight_, loaded.bias_ = masks, weight, bias
            provenance = Provenance.from_json(note["provenance"], str(path))
            loaded.fitted_on_ = Table(feature=masks[:0], provenance=provenance, name="the table of fit")
        return loaded

    def _fitted(self, method: str) -> Float[Tensor, "m d"]:
        if self.masks_ is None:
            raise NotFittedError(f"HeadMasks.{method} was called before fit. Call fit(table) first.")
        return self.masks_

    def _batches(self, table: Table) -> Iterator[tuple[Float[Tensor, "r d"], Int[Tensor, "r"]]]:
        """Shuffled rows, equally many per member; labels travel as floats, which hold them exactly."""
        size = self.members * rows_each(len(table), self.members, self.recipe)
        stream = Stream(table.column("feature"), table.label.float(), size, self.seed, name=table.name)
        for rows, labels in stream.batches(0, self.recipe.steps):
            fair = len(rows) // self.members * self.members
            if fair:
                yield rows[:fair].clone(), labels[:fair].long()


def _last_layer(table: Table, head: Classifier | Head | None) -> Head:
    if head is None:
        table.require("logit", by="HeadMasks.fit without a head")
        repair = "or the model, or its last layer's weight and bias: fit(table, head=...)"
        columns = ("feature", "logit")
        return centred_layer(lambda: table.batches(*columns), table.name, by="HeadMasks.fit", repair=repair)
    weight, bias = head.head() if isinstance(head, Classifier) else head
    return weight.detach().cpu().float(), None if bias is None else bias.detach().cpu().float()


def from_features(
    columns: Sequence[Column], compute: Callable[..., Tensor], shape: tuple[int, ...], size: int
) -> Computed:
    """A column that is a function of others, in blocks of rows: intermediate results must not grow with the table.

    Args:
        columns: Columns of equal length, such as features.
        compute: The function of their rows.
        shape: Shape of one row of the result.
        size: How many numbers a row has on the way, such as members times classes.
    """
    n, rows_at_once = columns[0].shape[0], max(1, min(_ROWS, _NUMBERS // size))

    def block(index: Tensor) -> Tensor:
        first, last = int(index[0]), int(index[-1])
        consecutive = last - first == len(index) - 1 and bool((index.diff() == 1).all())
        rows: Any = slice(first, last + 1) if consecutive else index
        return compute(*(column[rows] for column in columns))

    def read(rows: Exact) -> Tensor:
        index = torch.arange(n)[rows] if isinstance(rows, slice) else rows
        if len(index) == 0:
            return torch.empty(0, *shape)
        return torch.cat([block(part) for part in torch.split(index, rows_at_once)])

    return Computed((n, *shape), read)
