"""Picks and the rounds of a loop: results, what a trainer returns, and a state that people's labels and kills survive.

acquisition.json, sealed by its own hash, is replaced in one step after every round. It names the loop that it belongs
to: strategy and settings, pool, start, count; another loop is refused. Before the first round only the images to begin
with are fixed, which people may be labelling: a loop that has these in the same pool continues, whatever else differs.
Every round draws from (seed, round) alone, so a loop that was killed continues with the picks it would have made.
picks.csv follows from the state: it is written after it, and again when a loop continues. People fill it in; what they
wrote stays.
"""

import hashlib
import json
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from jaxtyping import Float64, Int64

from dubito.active.labels import add_labels, read_labels, without_label, write_picks
from dubito.errors import ArtefactError, TableError
from dubito.metrics import Array
from dubito.result import Axes, Result, axes, cell, plain
from dubito.storage import COUNT, check_layout, encode, read_sealed, reading, write_sealed, writing
from dubito.table import Table, to_tensor
from dubito.types import Json, Score

STATE = "acquisition.json"
_NUMBERS = (None, [float | None, ...])
_PICKS = {"rows": [COUNT, ...], "ids": [str | int, ...], "u": _NUMBERS, "round": COUNT, "strategy": str}
_ROUND = {"labelled": COUNT, "accuracy": float | None, "picks": (None, _PICKS)}
_LAYOUT = {"identity": {str: Any}, "rounds": [_ROUND, ...]}
PICKS = "picks.csv"
_FORMAT = 1


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
        return [
            {"id": name, "round": self.round, "u": value, "rank": rank}
            for rank, (name, value) in enumerate(zip(self.ids, u, strict=True), 1)
        ]

    def cell(self, key: str, value: Any) -> str:
        """Uncertainties with four digits."""
        return f"{value:.4g}" if key == "u" and value is not None else cell(value)

    def to_csv(self, path: str | Path) -> Path:
        """Write the picks as CSV with an empty column label, and return its path.

        Labels in an earlier file are never lost: it is not replaced by other picks.
        """
        return write_picks(path, self.records())


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
            if len(rows) != len(picks["ids"]) or (u is not None and len(rows) != len(u)):
                raise ValueError("picks must have one id and one uncertainty per row")
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
        records = []
        for number, one in enumerate(self.rounds):
            ids = [] if one.picks is None else one.picks.ids
            picked = ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")
            training = {"round": number, "labelled": one.labelled, "accuracy": one.accuracy}
            records.append({**training, "picked": picked or None})
        return records

    def to_csv(self, path: str | Path) -> Path:
        """Write all picks as CSV with an empty column label, and return its path; labels in an earlier file stay."""
        return write_picks(path, _picked(self.rounds))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the learning curve: accuracy against the number of labelled images."""
        picture = axes(ax)
        measured = [(images, value) for images, value in self.curve if value is not None]
        picture.plot([images for images, _ in measured], [value for _, value in measured], "o-", label=self.strategy)
        picture.set_xlabel("labelled images")
        picture.set_ylabel("test accuracy")
        picture.legend(frameon=False)
        return picture


def read_trained(trained: Any, pool: Table) -> tuple[Table, Score | None, Array | None]:
    """The output of a trainer as the table to choose from, and the score or the uncertainties to choose by, if any."""
    if isinstance(trained, Score):
        return pool, trained, None
    table = trained if isinstance(trained, Table) else _extended(trained, pool)
    if table is not None:
        if len(table) == len(pool) and ("id" not in table or "id" not in pool or np.array_equal(table.id, pool.id)):
            return table, None, None
        got = (
            f"a table of {len(table)} rows"
            if len(table) != len(pool)
            else "a table with other ids, or in another order"
        )
    else:
        try:
            u = to_tensor(trained, "uncertainties")
        except TableError:
            u = torch.empty(0, 0)
        if u.shape == (len(pool),):
            return pool, None, u
        kind = "None" if trained is None else type(trained).__name__
        got = f"{kind} of shape {tuple(u.shape)}" if u.numel() else kind
    raise TableError(
        f"acquire: the trainer must return a Score, uncertainties ({len(pool)},), the pool with other columns or "
        f"something with extend(table); got {got}. End it with return, such as: return pool.extended(logit=...)."
    )


def _extended(trained: Any, table: Table) -> Table | None:
    """The table with the predictions of what was learned, as `LinearHeads` and `HeadMasks` add them, or None."""
    if isinstance(trained, MutableSequence) or not hasattr(trained, "extend"):  # a list has an `extend` of its own
        return None
    extended: Any = trained.extend(table)
    if not isinstance(extended, Table):
        raise TableError(
            f"acquire: extend(table) of {type(trained).__name__}, which the trainer returned, must return a table; "
            f"got {type(extended).__name__}. End it with: return table.extended(logit=...)."
        )
    return extended


def accuracy_of(trained: Any, test: Table | None) -> float | None:
    """The accuracy on a test table, if there is one and what was trained extends tables."""
    table = None if test is None else _extended(trained, test)
    if table is None:
        return None
    table.require("logit", "label", by="acquire: the accuracy on test images")
    right = sum(int((batch.logit.argmax(1) == batch.label).sum()) for batch in table.batches("logit", "label"))
    return right / len(table) if len(table) else None


def identity_of(table: Table) -> Json:
    """Which images a table has, independent of its place on the disk."""
    state = hashlib.blake2b(digest_size=16)
    if "id" in table:
        state.update(encode("\n".join(map(str, table.id))))
    if "feature" in table and len(table):
        state.update(table.select("feature").rows(slice(0, 8)).feature.numpy().tobytes())
    return {"rows": len(table), "model_id": table.model_id, "digest": state.hexdigest()}


def write_loop(folder: Path, identity: Json, begin: Sequence[str], rounds: list[Round]) -> None:
    """Replace the state of a folder and its picks.csv, whose first lines are the images of the beginning to label."""
    with writing(STATE, folder):
        write_sealed(folder / STATE, {"format": _FORMAT, "identity": identity, "rounds": plain(rounds)})
    first = [{"id": name, "round": "", "u": "", "rank": rank} for rank, name in enumerate(begin, 1)]
    write_picks(folder / PICKS, [*first, *_picked(rounds)])


def _picked(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    return [pick for one in rounds if one.picks is not None for pick in one.picks.records()]


def read_rounds(folder: Path, identity: Json) -> list[Round]:
    """The finished rounds; ArtefactError if they are another loop's or cannot be read."""
    path = folder / STATE
    if not path.exists():
        return []
    with reading(f"'{path}'", "Delete it to start over."):
        state = read_sealed(path, format=_FORMAT)
        check_layout(state, _LAYOUT)
        saved, rounds = dict(state["identity"]), [Round.from_json(one) for one in state["rounds"]]
    now = json.loads(json.dumps(identity))
    if differing := [part for part in (now if rounds else ("pool", "start")) if saved.get(part) != now[part]]:
        raise ArtefactError(
            f"'{folder}' holds another loop; these arguments differ: {', '.join(differing)}. Use another folder, or "
            f"delete this one."
        )
    return rounds


def with_labels(
    pool: Table, begin: Int64[np.ndarray, "s"], folder: Path | None, classes: Sequence[str] | None
) -> tuple[Table, list[str]]:
    """The pool with the labels of picks.csv, if any, and the images of the beginning that people label there."""
    files = [folder / PICKS] if folder is not None and (folder / PICKS).exists() else []
    written = {name for file in files for name in read_labels(file).labels}
    listed = {*pool.row_ids(without_label(pool, begin)), *written}
    first = [name for name in pool.row_ids(begin) if name in listed]
    if written or classes is not None:
        pool = add_labels(pool, *(files if written else ()), classes=classes)
    return pool, first


def reusable(done: list[Round], rounds: int, images: int) -> list[Round]:
    """The rounds that stay; the training at the end of a shorter loop is repeated if this one is longer."""
    kept = [one for one in done if one.picks is not None][:rounds]
    at_end = done[len(kept) :][:1]
    if len(kept) == rounds or (at_end and at_end[0].labelled == images):
        kept += [replace(one, picks=None) for one in at_end]
    return kept
