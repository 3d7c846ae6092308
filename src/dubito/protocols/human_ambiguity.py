"""Is an image uncertain to the model where it is ambiguous to people? AUROC and rank correlation with their judgement.

    ambiguous   people accept several labels for the image, or none       AUROC of u, ambiguous against clear
    degree      H(p), p_l = w_l / Σ_l w_l over labels l                    Spearman of u with it
                w_l = people who chose l;  of yes/maybe/no votes on l: yes + maybe / 2

Kirchhof et al., Pretrained Visual Uncertainties (2024), section 4.5 and Figure 7: AUROC 0.701 on ImageNet ReaL, where
an image without a label counts as ambiguous (0.7007; without those images 0.7013). The degree is ours. Votes on one
label only have the degree 0, however divided they are; where nobody said yes or maybe to any label, there is none.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dubito.data.annotations import Votes, find_rows
from dubito.errors import TableError, ValueRangeError
from dubito.evaluate.uncertainties import uncertainties
from dubito.metrics import Array, Interval, auroc, interval, spearman
from dubito.result import aligned, cell
from dubito.scores import Entropy, MaxProbability
from dubito.table import Table, to_tensor
from dubito.types import Json, Score, finite

PUBLISHED_AUROC = 0.701
"""The paper's value on ImageNet ReaL, ViT-Base."""


def ambiguous_sets(
    sets: Sequence[Collection[int]], none: str = "ambiguous"
) -> tuple[Bool[Tensor, "n"], Bool[Tensor, "n"]]:
    """Which images have not exactly one label, and which images count.

    Args:
        sets: The labels that people accept, an image each.
        none: An image without any label is "ambiguous", as in the paper, or left out, "drop".

    >>> [flags.tolist() for flags in ambiguous_sets([{3}, {3, 5}, set()], none="drop")]
    [[False, True, True], [True, True, False]]
    """
    if none not in ("ambiguous", "drop"):
        raise ValueRangeError(f"none must be 'ambiguous' or 'drop'; got '{none}'. Choose one of the two.")
    sizes = torch.tensor([len(set(labels)) for labels in sets], dtype=torch.long)
    return sizes != 1, (sizes > 0) | (none == "ambiguous")


def ambiguous_images(sets: Mapping[str, Collection[int]], none: str = "ambiguous") -> dict[str, bool]:
    """`ambiguous_sets` by image, for `read_label_sets`; images that do not count are left out."""
    flags, keep = ambiguous_sets(list(sets.values()), none)
    return {name: flag for name, flag, kept in zip(sets, flags.tolist(), keep.tolist(), strict=True) if kept}


def vote_entropy(counts: Array) -> Float[Tensor, "n"]:
    """The entropy, in nats, of each row of votes or soft labels (n, c): 0 where all agree, log c where none do.

    >>> vote_entropy([[5, 0], [2, 2]]).tolist()
    [0.0, 0.6931471805599453]
    """
    votes = finite(to_tensor(counts, "vote_entropy: counts").double(), "vote_entropy: counts")
    if votes.ndim != 2 or bool((votes < 0).any()) or bool((votes.sum(-1) <= 0).any()):
        raise ValueRangeError(
            f"vote_entropy: counts must have the axes (n, c), no negative value and at least one vote a row; "
            f"shape {tuple(votes.shape)} came. Leave images without votes out."
        )
    entropy: Tensor = torch.special.entr(votes / votes.sum(-1, keepdim=True)).sum(-1)
    return entropy


def vote_degree(votes: Mapping[str, Mapping[int, Votes]]) -> dict[str, float]:
    """The degree of ambiguity by image, for `read_votes`; an image with no yes and no maybe is left out.

    >>> vote_degree({"a": {1: Votes(no=0, maybe=2, yes=3), 2: Votes(no=1, maybe=0, yes=4)}})  # 4 against 4
    {'a': 0.6931471805599453}
    """
    weights = {name: [vote.yes + vote.maybe / 2 for vote in asked.values()] for name, asked in votes.items()}
    return {name: float(vote_entropy([row])) for name, row in weights.items() if sum(row) > 0}


def ambiguity(
    scores: Mapping[str, Array | Score],
    table: Table,
    *,
    ambiguous: Mapping[str, bool] | Array | None = None,
    degree: Mapping[str, float] | Array | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> "Ambiguity":
    """Every score, and the classifier's own max-probability and entropy, against what people said.

    Args:
        scores: By name: fitted scores, or uncertainties (n) of the table's rows.
        table: The images; it needs the column id unless people's judgements come as arrays.
        ambiguous: By image or by row, whether it is ambiguous: gives the AUROC.
        degree: By image or by row, how ambiguous it is: gives the rank correlation. The two may know different images.
        confidence: Of the bootstrap intervals.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.
    """
    if ambiguous is None and degree is None:
        raise TableError("ambiguity needs ambiguous= or degree=; got neither. Give what people said, by image or row.")
    values = uncertainties(scores, table, by="ambiguity", baselines=(Entropy.name, MaxProbability.name))
    bootstrap = partial(interval, confidence=confidence, resamples=resamples, seed=seed)
    found = Ambiguity(table.name, 0, 0, 0, {}, {})
    if ambiguous is not None:
        rows, flags = _judged(ambiguous, table, "ambiguous")
        found.judged, found.ambiguous = len(rows), int(flags.sum())
        found.auroc = {name: bootstrap(auroc, u[rows], flags) for name, u in values.items()}
    if degree is not None:
        rows, degrees = _judged(degree, table, "degree")
        found.graded = len(rows)
        found.spearman = {name: bootstrap(spearman, u[rows], degrees) for name, u in values.items()}
    return found


@final
@dataclass
class Ambiguity:
    """How far each score agrees with people: print it, or take it as JSON.

    Attributes:
        name: The table.
        judged: How many images people called ambiguous or clear.
        ambiguous: How many of those ambiguous.
        graded: How many images have a degree of ambiguity.
        auroc: By score, ambiguous against clear images; empty without such a judgement.
        spearman: By score, rank correlation with the degree; empty without degrees.
    """

    name: str
    judged: int
    ambiguous: int
    graded: int
    auroc: dict[str, Interval]
    spearman: dict[str, Interval]

    def to_json(self) -> Json:
        """Plain numbers."""
        return {
            "table": self.name,
            "judged": self.judged,
            "ambiguous": self.ambiguous,
            "graded": self.graded,
            "auroc": {name: value._asdict() for name, value in self.auroc.items()},
            "spearman": {name: value._asdict() for name, value in self.spearman.items()},
            "published_auroc": PUBLISHED_AUROC,
        }

    def lines(self) -> list[list[str]]:
        """A header and one line a score, as text cells."""
        shown = {"AUROC": self.auroc, "Spearman": self.spearman}
        columns = {title: values for title, values in shown.items() if values}
        names = self.auroc or self.spearman
        return [
            ["score", *columns],
            *([name, *(cell(values[name]) for values in columns.values())] for name in names),
        ]

    def __str__(self) -> str:
        parts = [
            f"{self.ambiguous} of {self.judged} images ambiguous" if self.auroc else "",
            f"{self.graded} images with a degree" if self.spearman else "",
        ]
        return "\n".join([f"{self.name}: {', '.join(filter(None, parts))}", *aligned(self.lines())])


def _judged(given: Mapping[str, Any] | Array, table: Table, what: str) -> tuple[Int[Tensor, "k"], Tensor]:
    """The rows that people judged, and their judgement, in the order of the table."""
    if isinstance(given, Mapping):
        table.require("id", by=f"ambiguity: {what} by image")
        by_name = find_rows(given, [str(name) for name in table.id], f"ambiguity: {what}")
        by_row = sorted((row, given[name]) for name, row in by_name.items())
        return torch.tensor([row for row, _ in by_row]), torch.tensor([float(value) for _, value in by_row])
    values = to_tensor(given, f"ambiguity: {what}")
    if tuple(values.shape) != (len(table),):
        raise TableError(
            f"ambiguity: {what} must have one value a row of {table.name}, ({len(table)},); "
            f"{tuple(values.shape)} came. Give it in the order of the table, or as a mapping from image to value."
        )
    return torch.arange(len(table)), values
