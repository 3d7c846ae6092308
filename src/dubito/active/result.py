"""What active learning chose: picks as rows and as CSV, and the rounds of a loop with what was learned."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
from jaxtyping import Float64, Int64

from dubito.active.answers import write_picks
from dubito.result import aligned
from dubito.types import Json

COLUMNS = ("id", "round", "u", "rank")
_LISTED = 20


@final
@dataclass(frozen=True)
class Picks:
    """Images to label next, in the order in which they were chosen.

    Attributes:
        rows: Of the table.
        ids: Their names; the number of the row where the table has none.
        u: Their uncertainties; None where the strategy did not look at any.
        round: In which they were chosen.
        strategy: By which.
    """

    rows: Int64[np.ndarray, "k"]
    ids: Sequence[str]
    u: Float64[np.ndarray, "k"] | None
    round: int
    strategy: str

    def __len__(self) -> int:
        return len(self.rows)

    def lines(self) -> list[list[str]]:
        """A header and one line a pick: id, round, u, rank."""
        values = [""] * len(self) if self.u is None else [repr(float(one)) for one in self.u]
        body = [[name, str(self.round), u, str(i)] for i, (name, u) in enumerate(zip(self.ids, values, strict=True), 1)]
        return [list(COLUMNS), *body]

    def to_csv(self, path: str | Path) -> Path:
        """Write the picks as CSV with an empty column label, and return its path.

        Labels that stand in such a file already are never lost: it is not replaced by other picks.
        """
        return write_picks(path, self.lines())

    def __str__(self) -> str:
        left = len(self) - _LISTED
        return "\n".join([*aligned(self.lines()[: _LISTED + 1]), *([f"and {left} more"] if left > 0 else [])])

    def to_json(self) -> Json:
        """Plain numbers."""
        return {
            "strategy": self.strategy,
            "round": self.round,
            "rows": self.rows.tolist(),
            "ids": list(self.ids),
            "u": None if self.u is None else self.u.tolist(),
        }


@final
@dataclass(frozen=True)
class Round:
    """One training and what was chosen after it.

    Attributes:
        labelled: How many images the training saw.
        accuracy: On the test table, if there is one and the trainer's answer can be asked about it.
        picks: Chosen after it; None in the last.
    """

    labelled: int
    accuracy: float | None
    picks: Picks | None


@final
@dataclass
class Acquisition:
    """A loop of active learning: print it, or take the learning curve, the picks as CSV, or JSON.

    Attributes:
        name: The pool.
        strategy: By which images were chosen.
        start: The rows that were labelled at the beginning.
        rounds: One after the other.
    """

    name: str
    strategy: str
    start: Int64[np.ndarray, "s"]
    rounds: list[Round] = field(default_factory=list)

    @property
    def labelled(self) -> Int64[np.ndarray, "k"]:
        """All labelled rows, in the order in which they were."""
        return np.concatenate([self.start, *(one.picks.rows for one in self.rounds if one.picks is not None)])

    @property
    def curve(self) -> list[tuple[int, float | None]]:
        """How many images were labelled, and the accuracy then."""
        return [(one.labelled, one.accuracy) for one in self.rounds]

    def picks(self) -> list[list[str]]:
        """A header and one line for every pick of every round."""
        return [list(COLUMNS), *(line for one in self.rounds if one.picks for line in one.picks.lines()[1:])]

    def to_csv(self, path: str | Path) -> Path:
        """Write all picks as CSV with an empty column label, and return its path; labels in such a file stay."""
        return write_picks(path, self.picks())

    def to_json(self) -> Json:
        """Plain numbers."""
        rounds: list[Any] = [
            {"labelled": one.labelled, "accuracy": one.accuracy, "picks": one.picks and one.picks.to_json()}
            for one in self.rounds
        ]
        return {"table": self.name, "strategy": self.strategy, "start": self.start.tolist(), "rounds": rounds}

    def lines(self) -> list[list[str]]:
        """A header and one line a round."""
        body = [
            [str(i), str(one.labelled), "-" if one.accuracy is None else f"{one.accuracy:.3f}", _shown(one.picks)]
            for i, one in enumerate(self.rounds)
        ]
        return [["round", "labelled", "accuracy", "picked"], *body]

    def __str__(self) -> str:
        return "\n".join([f"{self.name}, by {self.strategy}", *aligned(self.lines())])


def _shown(picks: Picks | None) -> str:
    if picks is None or not len(picks):
        return "-"
    return ", ".join(picks.ids[:3]) + (f" and {len(picks) - 3} more" if len(picks) > 3 else "")
