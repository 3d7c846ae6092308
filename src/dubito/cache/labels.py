"""Labels and targets of images: what the task loss compares the logits with, and do labels look permuted?

Labels are classes of the model (a loss and an accuracy exist) or of another set ("own"). Targets are anything else that
has one row per image.

Whether predictions fit the labels better when classes are exchanged one to one is read off the counts of (label,
prediction), largest first, on one half of the images of every label, and tested on the other half, so that an order
cannot win by having been fitted. `extract` warns where it is right on ten points more of the images than the labels as
they are, by four standard errors, and above chance by as many:

    better - worse >= max(n / 10, 4 sqrt(better + worse)),     hits > n chance + 4 sqrt(n chance (1 - chance))

where `better` images agree with the exchanged labels only, `worse` ones with the labels as they are only, and chance is
the agreement of the same predictions and labels paired at random. `dubito.audit` reports what is wrong then.
"""

import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, final, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dubito.choices import LabelSpace
from dubito.data.augment import Augmented
from dubito.data.image_set import ImageSet, some
from dubito.data.labels import Labels, with_labels
from dubito.errors import ImagesError, LabelOrderWarning, OwnLabelsWarning, TableError
from dubito.probes import base_probe
from dubito.table import Column, Exact, Table, to_tensor
from dubito.table.views import Computed
from dubito.types import Images, Mixed, Targets, has_logits
from dubito.validate import check_classes

NO_CLASS = -1
"""The class of labels that no class of the model is left for."""
_OWN = "label_space='own'"
_KEY = "targets"
_GAIN, _ERRORS, _FEWEST = 0.1, 4.0, 20
_ROWS, _BLOCKS = 4096, 16
_SHOWN = 3
_NUMBERS = Int[Tensor, "n"]


@runtime_checkable
class HasClasses(Protocol):
    """A model, or what is recorded of one."""

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of its classes, if known."""


@final
class RecordedImages(ImageSet):
    """Images of which nothing is at hand but their names: those of a table, which can be labelled."""

    def __init__(self, name: str, ids: Sequence[str]) -> None:
        super().__init__(name, ids)

    def read(self, index: int) -> NoReturn:
        """Not possible."""
        raise ImagesError(f"image '{self.ids[index]}' of '{self.name}' is not at hand. Open the images themselves.")

    def contents(self, rows: Sequence[int]) -> NoReturn:
        """Not possible."""
        self.read(rows[0])


def resolve_labels(
    images: Images, model: HasClasses, space: LabelSpace | None
) -> tuple[Int[Tensor, "n"] | None, LabelSpace | None]:
    """The labels to store and their space.

    Integers are indices into the model's classes unless `space` is "own". Class names (folders) are looked up among
    the model's class names, of an ImageNet model among WordNet ids too; where none of them is one, they are the
    folder's own classes, with a warning. A model whose names are not known is taken at its count: as many names as
    outputs, in order (`check_count`). `warn_of_order` reports predictions that fit another order much better. Labels of
    a backbone that does not classify are never the model's.
    """
    labels = images.labels
    if labels is None or space == "own" or not has_logits(model):
        return labels, None if labels is None else "own"
    if images.classes is None:
        return labels, "model"
    indices = _by_name(images.classes, model.classes) if model.classes is not None else None
    if indices is not None:
        return torch.tensor(indices)[labels], "model"
    if space == "model" or (model.classes is None and space is None):
        return labels, "model"
    warnings.warn(
        f"the {len(images.classes)} class names of '{images.name}' ({some(images.classes)}) are none of the model's "
        f"{len(model.classes or ())} classes: labels are kept as their own, without loss and accuracy. Pass "
        f"{_OWN} to say so, or name the classes as the model does.",
        OwnLabelsWarning,
        stacklevel=3,
    )
    return labels, "own"


def names_of_labels(images: Images, model: HasClasses, space: LabelSpace | None) -> list[str] | None:
    """What the images call their labels, where the model does not name them itself."""
    unnamed = space == "own" or (space == "model" and model.classes is None)
    return list(images.classes) if unnamed and images.classes is not None else None


def check_count(names: Sequence[str], classes: int) -> None:
    """Raise ImagesError when names cannot be the classes of a model that has none."""
    if len(names) != classes:
        raise ImagesError(
            f"labels: got {len(names)} class names for a model of {classes} classes whose names are not known, so it "
            f"is unclear which is which. Wrap it with classes=[...], or pass label_space='model' if they are its first "
            f"classes in order, or {_OWN} if they are classes of another set."
        )


def check_model_classes(
    labels: Int[Tensor, "n"], images: Images, classes: int, *, by: str, by_place: bool = False
) -> None:
    """Raise ImagesError for labels that are no classes of the model.

    Args:
        labels: What is stored for the images.
        images: The images.
        classes: How many the model has.
        by: What is called.
        by_place: Class names are taken as the model's classes in order, so there must be as many.
    """
    repair = "Pass the model's class indices, or label_space='own' if these are classes of another set."
    check_classes(labels, classes, by=by, of="labels", ids=images.ids, hint=repair, error=ImagesError)
    if by_place and images.classes is not None:
        check_count(images.classes, classes)


def compared_rows(
    images: Images, values: Shaped[Tensor, "rows ..."] | None, rows: Sequence[int]
) -> tuple[Targets | None, Mixed | None]:
    """What the task loss compares rows with; where images are mixed, also the other one's and the weight.

    Args:
        images: The images; augmented ones have several rows each.
        values: Targets or labels, of every image or of every row; None compares with nothing.
        rows: Which rows.
    """
    if values is None:
        return None, None
    own = values[torch.tensor(rows, dtype=torch.long) % len(values)]
    if not isinstance(images, Augmented) or not images.augment.mixes:
        return own, None
    partners, weight = images.mixing(rows)
    return own, (values[partners], weight)


def label_table(
    table: Table, labels: Labels, label_space: LabelSpace | None = None, *, of_targets: bool = False
) -> Table:
    """A table with labels in place of its own, if any, and with the losses that follow from its logits.

    Losses of ensembles, and of a task loss that is a function, are left out: they take more than the table holds.

    Args:
        table: The table, of images that are not augmented.
        labels: A CSV file, a frame, a mapping from image to label, or one label per row.
        label_space: As of `extract`.
        of_targets: Losses are of targets, not of labels: they stay.
    """
    images = with_labels(RecordedImages(table.name, table.row_ids()), labels)
    # A backbone that does not classify has no classes: its labels are another set's, as for `extract`.
    values, space = resolve_labels(images, table, label_space if "logit" in table else "own")
    stale = () if of_targets else tuple(key for key in table.columns if key == "loss" or key.endswith("_loss"))
    columns: dict[str, Any] = {key: table.column(key) for key in table.columns if key not in stale}
    if values is not None and space == "model":
        logit, base = table.column("logit"), base_probe()
        by_place = table.classes is None and label_space is None
        check_model_classes(values, images, logit.shape[1], by="open", by_place=by_place)
        recorded = None if table.provenance is None else table.provenance.task_loss
        if not of_targets and recorded in (None, base.recorded_loss):
            columns["loss"] = Computed((len(table),), partial(_loss, base, logit, values))
    columns["label"] = values
    labelled = table.with_only(dict(sorted(columns.items(), key=lambda column: (column[0] != "id", column[0]))))
    names = names_of_labels(images, table, space)
    labelled.label_space = space or "model"
    labelled.label_names = table.classes if names is None and space == "model" else names
    return labelled


def _loss(base: Any, logit: Column, values: Int[Tensor, "n"], rows: Exact) -> Float[Tensor, "k"]:
    """The losses of some rows; the logits of all of them are never in memory at once."""
    parts = torch.split(torch.arange(len(values))[rows], _ROWS)
    return torch.cat([base.loss(logit[part], values[part]) for part in parts])


def to_targets(values: Any, images: Images) -> Shaped[Tensor, "n ..."]:
    """One row per image, or per image behind augmented rows; from a tensor, an array, a list, an .npy or .npz file."""
    loaded = _read_targets(Path(values)) if isinstance(values, (str, Path)) else values
    try:
        targets = to_tensor(loaded, "targets")
    except TableError as error:
        raise ImagesError(str(error)) from error
    n = len(images.images if isinstance(images, Augmented) else images)
    if targets.dim() == 0 or len(targets) != n:
        raise ImagesError(
            f"targets must have one row per image, in the order of the images; got shape {tuple(targets.shape)} for "
            f"the {n} images of '{images.name}'. Pass an array ({n}, ...)."
        )
    return targets.float() if targets.dtype == torch.bfloat16 else targets


def _by_name(theirs: Sequence[str], ours: Sequence[str]) -> list[int] | None:
    """The model's index of every class name, None where not one is known; case and underscores do not matter.

    A name is looked up as a whole class name first, then among synonyms (`tench, Tinca tinca` has two) and WordNet ids.
    """
    whole = _classes_by_name(enumerate(ours))
    synonyms = _classes_by_name((index, part) for index, name in enumerate(ours) for part in name.split(","))
    ids = _classes_by_name(enumerate(_wordnet_ids(theirs, ours)))
    classes = {name: whole[_plain(name)] or synonyms[_plain(name)] or ids[_plain(name)] for name in theirs}
    unknown = [name for name in theirs if not classes[name]]
    if len(unknown) == len(theirs):
        return None
    for name, indices in classes.items():
        if len(indices) > 1:
            both = " and ".join(f"{index} '{ours[index]}'" for index in sorted(indices))
            raise ImagesError(
                f"labels: class folder '{name}' stands for {len(indices)} classes of the model, {both}. Rename it to "
                f"the full name of one of them (of an ImageNet class also to its WordNet id), give labels= as class "
                f"indices, or pass {_OWN} if these are classes of another set."
            )
    if unknown:
        raise ImagesError(
            f"labels: {len(theirs) - len(unknown)} of {len(theirs)} class folders are classes of the model, but not "
            f"{', '.join(unknown[:3])}. Rename them, or pass {_OWN} if these are classes of another set."
        )
    return [next(iter(classes[name])) for name in theirs]


def _classes_by_name(pairs: Iterable[tuple[int, str]]) -> dict[str, set[int]]:
    """Every name with all classes that bear it."""
    classes: dict[str, set[int]] = defaultdict(set)
    for index, name in pairs:
        classes[_plain(name)].add(index)
    return classes


def _wordnet_ids(theirs: Sequence[str], ours: Sequence[str]) -> Sequence[str]:
    """ImageNet's ids (n01440764) in the order of its classes, if a folder is named by one and the model is ImageNet's.

    timm and torchvision word the names differently, but both begin their thousand with the tench.
    """
    by_id = any(re.fullmatch(r"n\d{8}", _plain(name)) for name in theirs)
    if not by_id or len(ours) != 1000 or not _plain(ours[0]).startswith("tench"):
        return ()
    from timm.data import ImageNetInfo  # noqa: PLC0415 (slow to import, and few need it)

    return [str(name) for name in ImageNetInfo("imagenet-1k").label_names()]


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", " ")


def _read_targets(path: Path) -> Any:
    """The array of an .npy file, or of an .npz file the one called targets, or its only one; no pickles."""
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return loaded
            names = list(loaded.files)
            if _KEY in names or len(names) == 1:
                return loaded[_KEY if _KEY in names else names[0]]
    except Exception as error:  # readers of headers and archives raise kinds of their own, such as TokenError
        raise ImagesError(
            f"targets file '{path}' must be an .npy or .npz file of plain numbers; opening it gave: {error}. "
            f"Write it with numpy.save(path, targets)."
        ) from error
    raise ImagesError(
        f"targets file '{path}' must hold one array, or one called '{_KEY}'; it has {some(names, 8) or 'none'}. "
        f"Rename the one that is meant."
    )


def matched(predicted: _NUMBERS, labels: _NUMBERS) -> dict[int, int]:
    """One prediction for each label and one label for each prediction, by the largest counts; ties leave a label alone.

    >>> matched(torch.tensor([2, 2, 0, 0, 0]), torch.tensor([0, 0, 1, 1, 2]))
    {0: 2, 1: 0}
    """
    counts = Counter(zip(labels.tolist(), predicted.tolist(), strict=True))
    order = sorted(counts, key=lambda pair: (-counts[pair], pair[0] != pair[1], pair))
    mapping: dict[int, int] = {}
    taken: set[int] = set()
    for label, prediction in order:
        if label not in mapping and prediction not in taken:
            mapping[label] = prediction
            taken.add(prediction)
    return mapping


def exchanged(labels: _NUMBERS, mapping: dict[int, int]) -> _NUMBERS:
    """Labels under an order; one that has no prediction keeps its number, if no other label has taken that class.

    >>> exchanged(torch.tensor([0, 1, 2, 3]), {0: 2, 1: 0})
    tensor([ 2,  0, -1,  3])
    """
    taken = set(mapping.values())
    classes = [mapping.get(label, NO_CLASS if label in taken else label) for label in labels.tolist()]
    return torch.tensor(classes, dtype=labels.dtype)


def cross_fitted(predicted: _NUMBERS, labels: _NUMBERS) -> _NUMBERS:
    """For every image, its label under the order that was read off the other half of its class."""
    then = labels.clone()
    turn, seen = torch.zeros(len(labels), dtype=torch.bool), Counter[int]()
    for row, label in enumerate(labels.tolist()):
        turn[row] = seen[label] % 2 == 1
        seen[label] += 1
    for half in (turn, ~turn):
        then[half] = exchanged(labels[half], matched(predicted[~half], labels[~half]))
    return then


def agreement(predicted: _NUMBERS, labels: _NUMBERS) -> float:
    """The share of agreement if the same predictions and the same labels were paired at random."""
    predictions = Counter(predicted.tolist())
    return sum(count * predictions[label] for label, count in Counter(labels.tolist()).items()) / len(labels) ** 2


def warn_of_order(table: Table, shard_size: int, images: str, *, by_place: bool) -> None:
    """Warn, once an extraction is through, that the labels look like classes in another order.

    Args:
        table: The finished cache; labels are the model's classes.
        shard_size: Rows of a shard: a few shards are looked at, since reading one row verifies all of its shard.
        images: The name of the set.
        by_place: Class names (folders) were taken as the model's classes in sorted order, because it names none.
    """
    sample = table.select("logit", "label").rows(_spread(len(table), shard_size))
    predicted, labels = sample.logit.argmax(-1), sample.label
    agreements = _better_order(predicted, labels)
    if agreements is None:
        return
    arrows = [
        f"label {_named(label, table.label_names)} -> class {_named(prediction, table.classes)}"
        for label, prediction in sorted(matched(predicted, labels).items())
        if label != prediction
    ]
    more = f" and {len(arrows) - _SHOWN} more" if len(arrows) > _SHOWN else ""
    unnamed = "The model does not name its classes, so class names were taken for them in sorted order. "
    warnings.warn(
        f"labels of '{images}' seem to be the model's classes in another order: they agree with its predictions on "
        f"{100 * agreements[0]:.1f} % of {len(sample)} images, and with classes exchanged on "
        f"{100 * agreements[1]:.1f} % ({', '.join(arrows[:_SHOWN])}{more}). {unnamed if by_place else ''}Run "
        f"dubito.audit(model, images) (dubito audit MODEL IMAGES), which reports what to repair.",
        LabelOrderWarning,
        stacklevel=3,
    )


def _better_order(predicted: _NUMBERS, labels: _NUMBERS) -> tuple[float, float] | None:
    """Agreement as labels are and with classes exchanged, if that is clearly better."""
    n = len(labels)
    if n < _FEWEST:
        return None
    then = cross_fitted(predicted, labels)
    own, hit = labels == predicted, then == predicted
    better, worse, hits = int((hit & ~own).sum()), int((own & ~hit).sum()), int(hit.sum())
    chance = agreement(predicted, then)
    clear = better - worse >= max(_GAIN * n, _ERRORS * math.sqrt(better + worse))
    informed = hits > n * chance + _ERRORS * math.sqrt(n * chance * (1 - chance))
    return (int(own.sum()) / n, hits / n) if clear and informed else None


def _spread(n: int, shard_size: int) -> Int[Tensor, "k"]:
    """Rows of a few blocks from the first to the last, because folders come class by class."""
    blocks = -(-n // shard_size)
    chosen = torch.linspace(0, blocks - 1, min(blocks, _BLOCKS)).round().long()
    rows = (chosen[:, None] * shard_size + torch.arange(shard_size)).flatten()
    rows = rows[rows < n]
    return rows[:: max(1, -(-len(rows) // _ROWS))]


def _named(number: int, names: Sequence[str] | None) -> str:
    return f"{number} '{names[number]}'" if names is not None and number < len(names) else str(number)
