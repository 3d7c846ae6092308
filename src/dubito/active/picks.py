"""Results of active learning: picks to label, as rows and as CSV, and the rounds of a loop with its learning curve."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
from jaxtyping import Float64, Int64

from dubito.active.labels import write_picks
from dubito.result import Result, axes, cell
from dubito.types import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = ("id", "round", "u", "rank")


@final
@dataclass(frozen=True)
class Picks(Result):
    """Images to label next, in the order in which they were chosen.

    Attributes:
        rows: The rows of the table.
        ids: Their ids; row numbers where the table has none.
        u: Their uncertainties; None where the strategy does not use any.
        round: The round in which they were chosen.
        strategy: The strategy that chose them.
    """

    text_rows: ClassVar = 20

    rows: Int64[np.ndarray, "k"]
    ids: Sequence[str]
    u: Float64[np.ndarray, "k"] | None
    round: int
    strategy: str

    def __len__(self) -> int:
        return len(self.rows)

    def title(self) -> str:
        """How many images, by which strategy."""
        return f"{len(self)} images to label, by {self.strategy}"

    def records(self) -> list[dict[str, Any]]:
        """One row per pick: id, round, u, rank."""
        u = [None] * len(self) if self.u is None else self.u.tolist()
        values = zip(self.ids, [self.round] * len(self), u, range(1, len(self) + 1), strict=True)
        return [dict(zip(COLUMNS, one, strict=True)) for one in values]

    def cell(self, key: str, value: Any) -> str:
        """Uncertainties with four digits."""
        return f"{value:.4g}" if key == "u" and value is not None else cell(value)

    def to_csv(self, path: str | Path) -> Path:
        """Write the picks as CSV with an empty column label, and return its path.

        Labels in an earlier file are never lost: it is not replaced by other picks.
        """
        return write_picks(path, [COLUMNS, *(list(one.values()) for one in self.records())])


@final
@dataclass(frozen=True)
class Round:
    """One training and what was chosen after it.

    Attributes:
        labelled: The number of images that were trained on.
        accuracy: The accuracy on the test table, if there is one and what was trained extends tables.
        picks: The images that were chosen after it; None in the last round.
    """

    labelled: int
    accuracy: float | None
    picks: Picks | None

    @classmethod
    def from_json(cls, values: Json) -> "Round":
        """The inverse of `result.plain`."""
        picks = values["picks"]
        if picks is not None:
            u = None if picks["u"] is None else np.array(picks["u"], dtype=np.float64)
            rows = np.array(picks["rows"], dtype=np.int64)
            picks = Picks(rows, list(map(str, picks["ids"])), u, int(picks["round"]), str(picks["strategy"]))
        return cls(int(values["labelled"]), values["accuracy"], picks)


@final
@dataclass
class Acquisition(Result):
    """A loop of active learning, with its learning curve and all picks.

    Attributes:
        name: The name of the pool.
        strategy: The strategy that chose images.
        start: The rows that were labelled at the beginning.
        rounds: One after the other.
    """

    name: str
    strategy: str
    start: Int64[np.ndarray, "s"]
    rounds: list[Round] = field(default_factory=list)

    @property
    def labelled(self) -> Int64[np.ndarray, "k"]:
        """All labelled rows, in the order in which they were labelled."""
        return np.concatenate([self.start, *(one.picks.rows for one in self.rounds if one.picks is not None)])

    @property
    def curve(self) -> list[tuple[int, float | None]]:
        """The learning curve: the number of labelled images and the accuracy of every round."""
        return [(one.labelled, one.accuracy) for one in self.rounds]

    def title(self) -> str:
        """The pool and the strategy."""
        return f"{self.name}, by {self.strategy}"

    def records(self) -> list[dict[str, Any]]:
        """One row per round."""
        return [
            {"round": place, "labelled": one.labelled, "accuracy": one.accuracy, "picked": _summary(one.picks)}
            for place, one in enumerate(self.rounds)
        ]

    def to_csv(self, path: str | Path) -> Path:
        """Write all picks as CSV with an empty column label, and return its path; labels in an earlier file stay."""
        return write_picks(path, [COLUMNS, *pick_lines(self.rounds)])

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the learning curve: accuracy against the number of labelled images."""
        picture = axes(ax)
        known = [(labelled, accuracy) for labelled, accuracy in self.curve if accuracy is not None]
        picture.plot([one for one, _ in known], [accuracy for _, accuracy in known], "o-", label=self.strategy)
        picture.set_xlabel("labelled images")
        picture.set_ylabel("test accuracy")
        picture.legend(frameon=False)
        return picture


def pick_lines(rounds: Sequence[Round]) -> list[list[Any]]:
    """All picks of some rounds, one line each."""
    return [list(pick.values()) for one in rounds if one.picks is not None for pick in one.picks.records()]


def _summary(picks: Picks | None) -> str | None:
    if picks is None or not len(picks):
        return None
    return ", ".join(picks.ids[:3]) + (f" and {len(picks) - 3} more" if len(picks) > 3 else "")
