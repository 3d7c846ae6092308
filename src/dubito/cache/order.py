"""Another order of classes: do the model's predictions fit the labels better when classes are exchanged one to one?

The order is read off the counts of (label, prediction), largest first, on one half of the images of every label, and
tested on the other half, so that it cannot win by having been fitted. `extract` warns where it is right on ten points
more of the images than the labels as they are, by four standard errors, and above chance by as many:

    better - worse >= max(n / 10, 4 sqrt(better + worse)),     hits > n chance + 4 sqrt(n chance (1 - chance))

where `better` images agree with the exchanged labels only, `worse` ones with the labels as they are only, and chance is
the agreement of the same answers and labels paired at random. What is wrong then, `dubito.audit` reports.
"""

import math
import warnings
from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from dubito.errors import LabelOrderWarning
from dubito.table import Table

NO_CLASS = -1
"""Of labels that no class of the model is left for."""
_GAIN, _ERRORS, _FEWEST = 0.1, 4.0, 20
_ROWS, _BLOCKS = 4096, 16
_SHOWN = 3
_NUMBERS = Int[Tensor, "n"]


def matched(predicted: _NUMBERS, labels: _NUMBERS) -> dict[int, int]:
    """One answer for each label and one label for each answer, by the largest counts; ties leave a label alone.

    >>> matched(torch.tensor([2, 2, 0, 0, 0]), torch.tensor([0, 0, 1, 1, 2]))
    {0: 2, 1: 0}
    """
    counts = Counter(zip(labels.tolist(), predicted.tolist(), strict=True))
    order = sorted(counts, key=lambda pair: (-counts[pair], pair[0] != pair[1], pair))
    mapping: dict[int, int] = {}
    taken: set[int] = set()
    for label, answer in order:
        if label not in mapping and answer not in taken:
            mapping[label] = answer
            taken.add(answer)
    return mapping


def exchanged(labels: _NUMBERS, mapping: dict[int, int]) -> _NUMBERS:
    """Labels under an order; one that has no answer keeps its number, if no other label has taken that class.

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
    """The share of agreement if the same answers and the same labels were paired at random."""
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
    rows = _spread(len(table), shard_size)
    some = table.select("logit", "label").rows(rows)
    predicted, labels = some.logit.argmax(-1), some.label
    agreements = _better_order(predicted, labels)
    if agreements is None:
        return
    own, then = agreements
    moved = {label: answer for label, answer in sorted(matched(predicted, labels).items()) if label != answer}
    place = (
        "The model does not name its classes, so class names were taken for them in sorted order. " if by_place else ""
    )
    warnings.warn(
        f"labels of '{images}' seem to be the model's classes in another order: they agree with its answers on "
        f"{100 * own:.1f} % of {len(rows)} images, and with classes exchanged on {100 * then:.1f} % "
        f"({_arrows(moved, table.label_names, table.classes)}). {place}Run dubito.audit(model, images) (dubito audit "
        f"MODEL IMAGES), which reports what to repair.",
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


def _arrows(moved: dict[int, int], theirs: Sequence[str] | None, ours: Sequence[str] | None) -> str:
    def named(number: int, names: Sequence[str] | None) -> str:
        return f"{number} '{names[number]}'" if names is not None and number < len(names) else str(number)

    shown = [f"label {named(label, theirs)} -> class {named(answer, ours)}" for label, answer in moved.items()]
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
