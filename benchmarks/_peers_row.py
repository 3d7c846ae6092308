"""One row of benchmarks/peers.py: the same thing computed by dubito and by a peer.

A contender takes the columns and returns what is timed: a function that fits, and one that scores, which returns an
array with one number per row, or figures by name. What it does before is not timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from _peers_data import Columns

from dubito.scores import make_score

Contender = tuple[Callable[[], object], Callable[[], Any]]
Side = Callable[[Columns], Contender]


@dataclass(frozen=True)
class Row:
    """One thing that two libraries do.

    Attributes:
        what: The thing.
        peer: The other library, as PyPI calls it.
        ours: What dubito does.
        theirs: What the peer does.
        share: Which share of the rows is scored, where the peer could not score them all.
        columns: Which data: "large", "medium" (100 classes), "small" (10 classes), "votes20", "votes56" or "photos".
        kind: The heading of its table.
        why: Why answers differ, where they do.
        same_work: Whether both do the same work, so that their times can be compared.
    """

    what: str
    peer: str
    ours: Side
    theirs: Side
    share: float = 1
    columns: str = "large"
    kind: str = "Scores"
    why: str = ""
    same_work: bool = True

    @property
    def name(self) -> str:
        """What is computed, by which peer, on which data."""
        return f"{self.what} ({self.peer}{'' if self.columns == 'large' else ', ' + self.columns})"


def nothing() -> None:
    """Where there is nothing to fit."""


def score(name: str, *needs: str, fits: tuple[str, ...] = (), **settings: Any) -> Side:
    """A registered score of ours."""

    def contender(columns: Columns) -> Contender:
        one, table = make_score(name, **settings), columns.test(*needs)
        train = columns.train(*fits) if fits else None
        return (lambda: one.fit(train)) if train is not None else nothing, lambda: one.score(table).numpy()

    return contender
