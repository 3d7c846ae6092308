"""Is an image uncertain to the model where it is ambiguous to people? AUROC and rank correlation with annotations.

    ambiguous   people accept several labels for the image, or none       AUROC of u, ambiguous against clear
    degree      H(p), p_l = w_l / Σ_l w_l over labels l                    Spearman correlation of u with it
                w_l = people who chose l;  of yes/maybe/no votes on l: yes + maybe / 2

Kirchhof et al., Pretrained Visual Uncertainties (2024), section 4.5 and Figure 7: AUROC 0.701 on ImageNet ReaL, where
an image without a label counts as ambiguous (0.7007; without those images 0.7013). The degree is ours. Votes on one
label only have the degree 0, however divided they are; where nobody said yes or maybe to any label, there is none.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dubito.data.labels import Votes, find_rows
from dubito.errors import TableError, ValueRangeError
from dubito.evaluate.evaluate import uncertainties
from dubito.metrics import Array, Interval, auroc, interval, spearman
from dubito.result import Axes, Result, axes, plot_intervals
from dubito.scores import Entropy, MaxProbability
from dubito.table import Table, to_tensor
from dubito.types import Score, finite
from dubito.validate import check_bootstrap, check_choice, check_per_row


def ambiguous_images(sets: Mapping[Any, Collection[int]], none: str = "ambiguous") -> dict[Any, bool]:
    """Whether each image has several labels or none, for `read_label_sets`.

    Args:
        sets: By image, the labels that people accept.
        none: An image without any label is "ambiguous", as in the paper, or left out, "drop".

    >>> ambiguous_images({"a": {3}, "b": {3, 5}, "c": set()}, none="drop")
    {'a': False, 'b': True}
    """
    check_choice(none, ("ambiguous", "drop"), by="ambiguous_images", what="none")
    return {name: len(set(labels)) != 1 for name, labels in sets.items() if len(labels) or none == "ambiguous"}


def vote_entropy(counts: Array) -> Float[Tensor, "n"]:
    """The entropy, in nats, of each row of votes or soft labels (n, c): 0 where all agree, log c where none do.

    >>> vote_entropy([[5, 0], [2, 2]]).tolist()
    [0.0, 0.6931471805599453]
    """
    votes = finite(to_tensor(counts, "vote_entropy: counts").double(), "vote_entropy: counts")
    if votes.ndim != 2 or bool((votes < 0).any()) or bool((votes.sum(-1) <= 0).any()):
        raise ValueRangeError(
            f"vote_entropy: counts must have the axes (n, c), no negative value and at least one vote per row; "
            f"got shape {tuple(votes.shape)}. Leave images without votes out."
        )
    entropy: Tensor = torch.special.entr(votes / votes.sum(-1, keepdim=True)).sum(-1)
    return entropy


def vote_degree(votes: Mapping[str, Mapping[int, Votes]]) -> dict[str, float]:
    """The degree of ambiguity by image, for `read_votes`; an image with no yes and no maybe is left out.

    >>> vote_degree({"a": {1: Votes(no=0, maybe=2, yes=3), 2: Votes(no=1, maybe=0, yes=4)}})  # 4 against 4
    {'a': 0.6931471805599453}
    """
    weights = {name: [vote.yes + vote.maybe / 2 for vote in labels.values()] for name, labels in votes.items()}
    return {name: float(vote_entropy([row])) for name, row in weights.items() if sum(row) > 0}


def human_ambiguity(
    scores: Mapping[str, Array | Score],
    table: Table,
    *,
    ambiguous: Mapping[str, bool] | Array | None = None,
    degree: Mapping[str, float] | Array | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> "HumanAmbiguity":
    """Every score, and the classifier's own max-probability and entropy, against people's annotations.

    Args:
        scores: Fitted scores, or arrays (n,) with the uncertainties of the table's rows, by name.
        table: The images. It needs the column id unless annotations are arrays.
        ambiguous: Whether each image is ambiguous, by image or by row: gives the AUROC.
        degree: How ambiguous each image is, by image or by row: gives the rank correlation. The two annotations may
            cover different images.
        confidence: Confidence of the bootstrap intervals.
        resamples: Number of bootstrap resamples.
        seed: Seed of the bootstrap.
    """
    check_bootstrap(by="human_ambiguity", confidence=confidence, resamples=resamples, seed=seed)
    if ambiguous is None and degree is None:
        raise TableError(
            "human_ambiguity needs ambiguous= or degree=; got neither. Pass annotations by image or by row."
        )
    values = uncertainties(scores, table, by="human_ambiguity", baselines=(Entropy.name, MaxProbability.name))
    bootstrap = partial(interval, confidence=confidence, resamples=resamples, seed=seed)
    result = HumanAmbiguity(table.name, 0, 0, 0, {}, {})
    if ambiguous is not None:
        rows, flags = _annotated(ambiguous, table, "ambiguous")
        result.annotated, result.ambiguous = len(rows), int(flags.sum())
        result.auroc = {name: bootstrap(auroc, u[rows], flags) for name, u in values.items()}
    if degree is not None:
        rows, degrees = _annotated(degree, table, "degree")
        result.graded = len(rows)
        result.spearman = {name: bootstrap(spearman, u[rows], degrees) for name, u in values.items()}
    return result


@final
@dataclass
class HumanAmbiguity(Result):
    """How far each score agrees with people.

    Attributes:
        name: Name of the table.
        annotated: Number of images that people called ambiguous or clear.
        ambiguous: Number of those that are ambiguous.
        graded: Number of images with a degree of ambiguity.
        auroc: By score, ambiguous against clear images; empty without such annotations.
        spearman: By score, the rank correlation with the degree; empty without degrees.
        published_auroc: The paper's AUROC on ImageNet ReaL, ViT-Base.
    """

    name: str
    annotated: int
    ambiguous: int
    graded: int
    auroc: dict[str, Interval]
    spearman: dict[str, Interval]
    published_auroc: float = 0.701

    titles: ClassVar[Mapping[str, str]] = {"auroc": "AUROC", "spearman": "Spearman"}

    def title(self) -> str:
        """The table and its annotations."""
        parts = [f"{self.ambiguous} of {self.annotated} images ambiguous"] if self.auroc else []
        parts += [f"{self.graded} images with a degree"] if self.spearman else []
        return f"{self.name}: {', '.join(parts)}"

    def records(self) -> list[dict[str, Any]]:
        """One row per score."""
        columns = {key: values for key in self.titles if (values := getattr(self, key))}
        return [
            {"score": name, **{key: values[name] for key, values in columns.items()}}
            for name in self.auroc or self.spearman
        ]

    def plot(self, ax: Axes | None = None) -> Axes:
        """The agreement of every score with people, one colour per measure."""
        shown = {title: values for key, title in self.titles.items() if (values := getattr(self, key))}
        picture = plot_intervals(axes(ax), shown)
        picture.set(xlabel=" and ".join(shown), title=self.title())
        return picture


def _annotated(values: Mapping[str, Any] | Array, table: Table, what: str) -> tuple[Int[Tensor, "k"], Tensor]:
    """The annotated rows and their annotations, in the order of the table."""
    if isinstance(values, Mapping):
        table.require("id", by=f"human_ambiguity: {what} by image")
        row_of = find_rows(values, [str(name) for name in table.id], f"human_ambiguity: {what}")
        by_row = sorted((row, float(values[name])) for name, row in row_of.items())
        return torch.tensor([row for row, _ in by_row]), torch.tensor([value for _, value in by_row])
    array = to_tensor(values, f"human_ambiguity: {what}")
    check_per_row(array, table, by="human_ambiguity", what=what)
    return torch.arange(len(table)), array
