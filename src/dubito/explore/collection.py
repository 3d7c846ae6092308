"""The images that the explorer shows, as columns of numbers: one row per image, one table after the other.

Rows are those of a table, then those of out-of-distribution tables. A column is computed when the page first needs it
and kept as 4 bytes per image; nothing else grows with the number of images.

    score      float32, NaN where a table lacks what the score reads
    category   int32, an index into names; -1 for none
    flag       int32, 1 or 0; -1 where it is not known
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from jaxtyping import Bool, Float32, Int32, Shaped

from dubito.choices import nearest
from dubito.data import open_images
from dubito.errors import DubitoError, TableError, UnknownNameError
from dubito.evaluate.evaluate import uncertainty
from dubito.guard import Guard
from dubito.metrics import Array
from dubito.report.trust import SCORE_MEANINGS
from dubito.scores.available import available_scores, why_not_comparable
from dubito.table import Table
from dubito.threads import Lock
from dubito.types import Images, Json, Score
from dubito.validate import check_rows, check_same_model, has_model_labels

ColumnKind = Literal["score", "category", "flag"]
GUARD = "guard"
OTHER = "other:"
"""Before the names of the second model's columns."""
_ROWS = 2048
"""Rows that are in memory at a time."""
_TESTED = 20_000
"""Images of a larger table, drawn at random, that are compared with the guard's calibration images."""
_FIRST = ("entropy", "max_probability", "neighbours")
"""The score that sizes and orders images at first: the first of these that there is."""


@final
@dataclass(frozen=True)
class ShownColumn:
    """One column of the page.

    Attributes:
        name: In addresses and files.
        title: What people read.
        kind: What its values are.
        read: Computes all rows.
        of: Names of categories: "classes", "label_names", or a list of their own.
        about: What it means, in one sentence.
    """

    name: str
    title: str
    kind: ColumnKind
    read: Callable[[], Shaped[np.ndarray, "n"]]
    of: str | Sequence[str] = ""
    about: str = ""


@final
class Collection:
    """A table, out-of-distribution tables, and everything that can be known about their images.

    Args:
        table: The images to look at; all of its columns are optional.
        ood: By name, out-of-distribution images of the same model.
        other: The same images as another model sees them, to compare with.
        images: Anything that `dubito.open_images` takes: the images themselves.
        guard: A guard of the same model, for verdicts.
        learn_from: In-distribution images for scores that learn.
        scores: By name, further fitted scores, or uncertainties of the table's rows.
    """

    def __init__(
        self,
        table: Table,
        *,
        ood: Mapping[str, Table] | None = None,
        other: Table | None = None,
        images: Any = None,
        guard: Guard | None = None,
        learn_from: Table | None = None,
        scores: Mapping[str, Array | Score] | None = None,
    ) -> None:
        check_rows(table, by="explore")
        self.table, self.guard, self.other = table, guard, other
        self.sets = {_set_name(table, ood or ()): table, **(ood or {})}
        check_same_model(table, {f"ood '{name}'": one for name, one in (ood or {}).items()}, by="explore")
        self.starts = np.cumsum([0, *(len(one) for one in self.sets.values())])
        self.pictures = _Pictures(images, list(self.sets.values()))
        self.notices: list[str] = []
        self._values: dict[str, np.ndarray] = {}
        self._sorted: dict[str, np.ndarray] = {}
        self._lock = Lock()
        available = available_scores(table, learn_from)
        self.scores = self._computable(available.scores, table)
        self.notices += available.remarks
        if available.unfitted:
            self.notices.append(
                f"Not shown are scores that learn from other in-distribution images ({', '.join(available.unfitted)}): "
                f"open the explorer with images that they can learn from."
            )
        self._own_values = {name: one for name, one in (scores or {}).items() if not isinstance(one, Score)}
        self.scores |= {name: one for name, one in (scores or {}).items() if isinstance(one, Score)}
        self.columns = {one.name: one for one in self._columns()}

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def rows(self) -> int:
        """Images of the table itself, which come first."""
        return len(self.table)

    @property
    def first_score(self) -> str | None:
        """The score that orders images at first: the guard's, or one of softmax."""
        scores = [one.name for one in self.columns.values() if one.kind == "score"]
        return next((name for name in (*self._own_values, GUARD, *_FIRST) if name in scores), next(iter(scores), None))

    def values(self, name: str) -> Shaped[np.ndarray, "n"]:
        """All rows of a column; computed once."""
        if name not in self.columns:
            repair = f"Did you mean {nearest(name, self.columns, most=1)[0]}?"
            raise UnknownNameError(f"explore: there is no column '{name}'. {repair}")
        with self._lock:
            if name not in self._values:
                column = self.columns[name]
                dtype = np.float32 if column.kind == "score" else np.int32
                self._values[name] = np.ascontiguousarray(column.read(), dtype=dtype)
            return self._values[name]

    def rank(self, name: str, value: float, *, among_them: bool) -> float:
        """The share of the table's other images that are less uncertain.

        Args:
            name: Name of a score.
            value: Uncertainty of the image.
            among_them: Whether the image is one of the table's own.
        """
        with self._lock:
            if name not in self._sorted:
                self._sorted[name] = np.sort(self.values(name)[: self.rows])
            others = max(1, self.rows - among_them)
            return float(np.searchsorted(self._sorted[name], np.float32(value), side="left")) / others

    def locate(self, row: int) -> tuple[str, Table, int]:
        """The set of a row, its table, and the row there."""
        if not 0 <= row < len(self):
            raise UnknownNameError(f"explore: there are rows 0 to {len(self) - 1}; got {row}. Choose one of them.")
        place = int(np.searchsorted(self.starts, row, side="right")) - 1
        name, table = list(self.sets.items())[place]
        return name, table, row - int(self.starts[place])

    def row_table(self, row: int) -> Table:
        """One image as a table in memory."""
        _, table, local = self.locate(row)
        return table.rows(slice(local, local + 1))

    def ids(self, rows: Sequence[int]) -> list[str]:
        """Names of some images."""
        located = [self.locate(row) for row in rows]
        return [table.row_ids(slice(local, local + 1))[0] for _, table, local in located]

    def named(self, names: AbstractSet[str]) -> dict[int, str]:
        """The rows of images that have one of some names, with it; an image may be in several sets."""
        rows = dict[int, str]()
        if not names:  # of a million images, looking takes a while
            return rows
        for start, table in zip(self.starts, self.sets.values(), strict=False):
            rows |= {int(start) + row: name for row, name in enumerate(table.row_ids()) if name in names}
        return rows

    def blocks(self, *columns: str) -> Iterator[tuple[int, Table]]:
        """The rows of all sets in blocks, each with the number of its first row."""
        for start, table in zip(self.starts, self.sets.values(), strict=False):
            done = int(start)
            for batch in table.batches(*columns, size=_ROWS):
                yield done, batch
                done += len(batch)

    def containing(self, text: str) -> Bool[np.ndarray, "n"]:
        """Which images have a text in their names, whatever its case."""
        wanted, shown = text.casefold(), np.zeros(len(self), dtype=bool)
        for start, table in zip(self.starts, self.sets.values(), strict=False):
            for first in range(0, len(table), _ROWS):
                names = table.row_ids(slice(first, first + _ROWS))
                hits = [wanted in name.casefold() for name in names]
                shown[start + first : start + first + len(hits)] = hits
        return shown

    @cached_property
    def guard_findings(self) -> list[str]:
        """What the guard guarantees, and whether that is about these images; of many, some drawn at random show it."""
        if self.guard is None:
            return []
        table = self.table
        if len(table) > _TESTED:
            table = table.rows(np.sort(np.random.default_rng(0).permutation(len(table))[:_TESTED]))
        return self.guard.decide(table).findings()

    def describe(self) -> list[Json]:
        """Every column as the page needs it."""
        return [
            {"name": one.name, "title": one.title, "kind": one.kind, "of": one.of, "about": one.about}
            for one in self.columns.values()
        ]

    def _columns(self) -> Iterator[ShownColumn]:
        if len(self.sets) > 1:
            yield ShownColumn("set", "set", "category", self._set, list(self.sets), "Which table an image is from.")
        if "label" in self.table:
            yield ShownColumn("label", "label", "category", self._labels, "label_names", "The true class.")
        if "logit" in self.table:
            yield ShownColumn("predicted", "predicted", "category", self._predicted, "classes", "The predicted class.")
        if has_model_labels(self.table):
            yield ShownColumn("correct", "correct", "flag", self._correct, about="Whether the prediction is right.")
        if self.guard is not None:
            accepted, compared = partial(self._accepted, self.guard), partial(self._guard_uncertainty, self.guard)
            yield ShownColumn("accepted", "accepted", "flag", accepted, about="Whether the guard accepts it.")
            about = "What the guard compares with its threshold."
            yield ShownColumn(GUARD, "guard", "score", compared, about=about)
        for name, values in self._own_values.items():
            yield ShownColumn(name, _title(name), "score", partial(self._array, name, values))
        for name, score in self.scores.items():
            about = SCORE_MEANINGS.get(name, f"{_title(score.name).capitalize()}: {score.kind} uncertainty.")
            yield ShownColumn(name, _title(name), "score", partial(self._scored, score), about=about)
        if self.other is not None:
            yield from self._of_other(self.other)

    def _computable(self, scores: Mapping[str, Score], table: Table) -> dict[str, Score]:
        """Those that can score the first image; a notice names the others, such as entropy of a single class."""
        first, computable, reasons = table.rows(slice(0, 1)), dict[str, Score](), list[str]()
        for name, score in scores.items():
            try:
                score.score(first)
            except DubitoError as error:  # noqa: PERF203 (a handful of scores)
                reasons.append(str(error))
            else:
                computable[name] = score
        if reasons:
            left_out = ", ".join(name for name in scores if name not in computable)
            self.notices.append(f"Left out: {left_out}. {reasons[0]}")
        return computable

    def _of_other(self, other: Table) -> Iterator[ShownColumn]:
        """Columns of the second model, for the images that both have seen."""
        row_of = {name: row for row, name in enumerate(other.row_ids())}
        rows = np.array([row_of.get(name, -1) for name in self.table.row_ids()])
        if (rows < 0).all():
            raise TableError(
                f"explore: other must be about the same images as {self.table.name}; {other.name} shares none of its "
                f"ids. Extract the same images with both models."
            )

        model = other.provenance.model if other.provenance and other.provenance.model else other.name
        if "logit" in other and "logit" in self.table:
            read = partial(self._matched, rows, partial(_argmax, other), -1.0)
            names = list(other.classes or ()) or "classes"
            about = f"The class that {model} predicts."
            yield ShownColumn(f"{OTHER}predicted", f"predicted by {model}", "category", read, names, about)
            if _same_classes(self.table, other):
                yield ShownColumn("agree", "models agree", "flag", self._agree, about="Whether both predict one class.")
        for name, score in self._computable(available_scores(other).scores, other).items():
            read = partial(self._matched, rows, partial(score.score, other), np.nan)
            yield ShownColumn(f"{OTHER}{name}", f"{_title(name)} of {model}", "score", read)

    def _matched(
        self, rows: Shaped[np.ndarray, "k"], read: Callable[[], Any], missing: float
    ) -> Shaped[np.ndarray, "n"]:
        """Values of another table's rows, for the images of this one; `missing` where it has no such row."""
        values = np.asarray(read())
        whole = np.full(len(self), missing, dtype=values.dtype)
        whole[: self.rows][rows >= 0] = values[rows[rows >= 0]]
        return whole

    def _set(self) -> Int32[np.ndarray, "n"]:
        return np.repeat(np.arange(len(self.sets)), np.diff(self.starts)).astype(np.int32)

    def _labels(self) -> Int32[np.ndarray, "n"]:
        # Labels of other sets need not be those of the table.
        return self._gather("label", lambda batch: batch.label.numpy(), sets=1)

    def _predicted(self) -> Int32[np.ndarray, "n"]:
        return self._gather("logit", lambda batch: batch.logit.argmax(1).numpy())

    def _correct(self) -> Int32[np.ndarray, "n"]:
        label, predicted = self.values("label"), self.values("predicted")
        return np.where(label < 0, -1, label == predicted).astype(np.int32)

    def _accepted(self, guard: Guard) -> Int32[np.ndarray, "n"]:
        return self._decided(guard)[1]

    def _guard_uncertainty(self, guard: Guard) -> Float32[np.ndarray, "n"]:
        """Infinite for images that are refused whatever their score; where thresholds differ, how far above its own."""
        return self._decided(guard)[0]

    def _decided(self, guard: Guard) -> tuple[Float32[np.ndarray, "n"], Int32[np.ndarray, "n"]]:
        """Uncertainty and acceptance of every image, in one pass over the tables."""
        u, accept = np.empty(len(self), dtype=np.float32), np.empty(len(self), dtype=np.int32)
        for start, batch in self.blocks():
            decided, rows = guard.decide(batch), slice(start, start + len(batch))
            u[rows], accept[rows] = decided.compared, decided.accept
        self._values |= {GUARD: u, "accepted": accept}
        return u, accept

    def _agree(self) -> Int32[np.ndarray, "n"]:
        one, two = self.values("predicted"), self.values(f"{OTHER}predicted")
        return np.where(two < 0, -1, one == two).astype(np.int32)

    def _array(self, name: str, values: Array) -> Float32[np.ndarray, "n"]:
        whole = np.full(len(self), np.nan, dtype=np.float32)
        whole[: self.rows] = uncertainty(values, self.table, by="explore", name=name).numpy()
        return whole

    def _scored(self, score: Score) -> Float32[np.ndarray, "n"]:
        whole = np.full(len(self), np.nan, dtype=np.float32)
        for start, table in zip(self.starts, self.sets.values(), strict=False):
            if table is self.table or why_not_comparable(score, self.table, table) is None:
                whole[start : start + len(table)] = score.score(table).numpy()
        return whole

    def _gather(
        self, column: str, read: Callable[[Table], np.ndarray], sets: int | None = None
    ) -> Int32[np.ndarray, "n"]:
        whole = np.full(len(self), -1, dtype=np.int32)
        for start, table in list(zip(self.starts, self.sets.values(), strict=False))[:sets]:
            done = int(start)
            for batch in table.batches(column, size=_ROWS) if column in table else ():
                whole[done : done + len(batch)] = read(batch)
                done += len(batch)
        return whole


@final
class _Pictures:
    """Which images are at hand, by row."""

    def __init__(self, images: Any, tables: Sequence[Table]) -> None:
        self.images: Images | None = None if images is None else open_images(images)
        self._tables = tables
        self._row_of: dict[str, int] = {}
        if self.images is not None:
            self._row_of = {name: row for row, name in enumerate(self.images.ids)}

    def place(self, name: str) -> int | None:
        """The image's place in its set; None where it is not there."""
        return self._row_of.get(name)

    def words(self) -> str:
        """What is at hand, as a sentence; empty where all pictures are there."""
        if self.images is None:
            return "No pictures: open the explorer with images to see them."
        names = [name for table in self._tables for name in table.row_ids(slice(_ROWS))]
        there = sum(name in self._row_of for name in names)
        if there == len(names):
            return ""
        checked = f"of the first {len(names):,}" if len(names) >= _ROWS else f"of {len(names):,}"
        example = next(name for name in names if name not in self._row_of)
        return (
            f"{len(names) - there:,} {checked} images are not in {self.images.name}, such as '{example}'. They may "
            f"have been moved or renamed since they were extracted."
        )


def _set_name(table: Table, taken: Container[str]) -> str:
    """The last part of a path, as a table is named by its folder; the whole where another set has that name."""
    short = Path(table.name).name
    return short if short and short not in taken else table.name


def _argmax(table: Table) -> Shaped[np.ndarray, "n"]:
    return np.concatenate([batch.logit.argmax(1).numpy() for batch in table.batches("logit", size=_ROWS)])


def _same_classes(one: Table, two: Table) -> bool:
    known = one.classes and two.classes
    return (
        list(one.classes or ()) == list(two.classes or ()) if known else one.shape("logit")[1] == two.shape("logit")[1]
    )


def _title(name: str) -> str:
    return name.replace("_", " ")
