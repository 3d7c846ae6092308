"""`SafeIndex`: cosine search that refuses uncertain queries, leaves uncertain items out, or both.

    cos(x, item) on features at length one, exact by default
    a query with u(x) > t is refused, an item with u > t is never an answer       t: see `rule`
    set(x) = {items: 1 - cos(x, item) <= r(u(x))}                                  r: see `radius`

Kirchhof et al., Pretrained Visual Uncertainties (2024), Section 5.2 and Table 1: ambiguous queries are matched with an
arbitrary class, and ambiguous items lie between classes, where they catch queries of both. The paper judges a whole
data set by itself. Here queries come one at a time, so they are held against the threshold of the items.
"""

from pathlib import Path
from typing import final

import numpy as np
from jaxtyping import Bool, Float64

from dubito.apps.search._answers import find, how_many, spread, within
from dubito.apps.search._folder import read_head, read_index, write_index, write_score
from dubito.apps.search._given import Given, Names, given, twice
from dubito.apps.search.backend import Approximation, Backend, State
from dubito.apps.search.in_memory import InMemory
from dubito.apps.search.radius import Radii, measure
from dubito.apps.search.result import Retrieved
from dubito.apps.search.rule import Rule, Thresholds
from dubito.choices import Clean
from dubito.errors import ArtefactError, TableError, ValueRangeError
from dubito.metrics import Array
from dubito.scores.artefact import load_score
from dubito.table import Table, to_tensor
from dubito.types import Json, Score, finite

REACH = 10
"""Whose distance measures radii: the tenth neighbour's."""
_TOP, _QUERIES = 10, 200
"""An approximation's recall is that of so many neighbours of so many items."""


@final
class SafeIndex:
    """Items by their features, searched by cosine.

    Attributes:
        score: Judges queries that come as tables, as it judged the items; None if uncertainties came as arrays.
        maker: The model that made the features, part by part, if known.
        backend: Where the items are.

    >>> index = SafeIndex(2, quantile=0.75)
    >>> index.add([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.7, 0.7]], [0.1, 0.2, 0.3, 0.9], ids=["a", "b", "c", "?"])
    >>> found = index.search([[0.8, 0.6], [0.8, 0.6]], [0.2, 0.8], k=2)  # the last query is itself uncertain
    >>> found.ids[0].tolist(), found.refused.tolist()
    (['b', 'a'], [False, True])
    """

    def __init__(
        self,
        width: int,
        *,
        quantile: float = 0.9,
        clean: Clean = "both",
        per_class: bool = False,
        score: Score | None = None,
    ) -> None:
        if width < 1:
            raise ValueRangeError(f"SafeIndex: width must be at least 1, that of the features; {width} came.")
        self.backend: Backend = InMemory(width, Rule(quantile, clean, per_class))
        self.score = score
        self.maker: Json | None = None
        self._radii: Radii | None = None

    @classmethod
    def build(
        cls,
        items: Table | Array,
        uncertainty: Score | Array,
        *,
        ids: Names | None = None,
        labels: Array | None = None,
        quantile: float = 0.9,
        clean: Clean = "both",
        per_class: bool = False,
    ) -> "SafeIndex":
        """An index of these items.

        Args:
            items: A table with features, or features (n, d). A cache is read block by block.
            uncertainty: A fitted score, which the index keeps for queries, or one number an item.
            ids: Their names; by default the table's, or "0", "1", ...
            labels: Their classes; by default the table's, if it has any.
            quantile: The share of items that is kept, and that decides which queries are refused.
            clean: Whether uncertain "queries" are refused, uncertain "items" left out, "both" or "none".
            per_class: Take the quantile in each class, as the paper's code does.
        """
        index = cls(_width(items), quantile=quantile, clean=clean, per_class=per_class)
        index.add(items, uncertainty, ids=ids, labels=labels)
        return index

    @classmethod
    def on_server(
        cls,
        dsn: str,
        *,
        table: str,
        width: int | None = None,
        quantile: float | None = None,
        clean: Clean | None = None,
        per_class: bool | None = None,
        score: Score | None = None,
    ) -> "SafeIndex":
        """An index in a PostgreSQL database with pgvector; made there if the table does not exist.

        Args:
            dsn: As libpq takes it: "postgresql://user@host/database".
            table: Its name, "schema.name" for another schema than the default. A second one, NAME_about, is beside it.
            width: Of the features; needed for a table that is to be made.
            quantile: As of `build`. For a table that exists, these three are its own; others are refused.
            clean: As of `build`.
            per_class: As of `build`.
            score: Judges queries that come as tables; it is not kept on the server.
        """
        from dubito.apps.search.on_server import OnServer  # noqa: PLC0415 (an optional package)

        asked: Json = {"quantile": quantile, "clean": clean, "per_class": per_class}
        index = cls(1, score=score)
        index.backend = OnServer(dsn, table, width, {key: value for key, value in asked.items() if value is not None})
        return index

    @classmethod
    def load(cls, folder: str | Path, *, mapped: bool = True, check: bool = True) -> "SafeIndex":
        """Read back what `save` wrote.

        Args:
            folder: The place.
            mapped: Leave vectors on disk until they are searched; else read them now.
            check: Read every byte once and compare checksums: some seconds for a million vectors of 512.
        """
        place = Path(folder)
        head = read_head(place)
        index = cls(1)
        index.backend = read_index(place, head, mapped=mapped, check=check)
        index.maker = head.get("maker")
        index.score = load_score(place / head["score"]) if head.get("score") else None
        if head.get("radii"):
            index._radii = Radii.from_json(head["radii"], index.backend.state().revision)
        return index

    def save(self, folder: str | Path) -> Path:
        """Write the index into a folder; killed at any instant, it leaves the old one or the new one."""
        place = Path(folder)
        if not isinstance(self.backend, InMemory):
            raise ArtefactError(
                "SafeIndex.save: this index lives on a server, which has kept every change already. Open it with "
                "SafeIndex.on_server, or build one from the same items to save it."
            )
        fresh = self._radii if self._radii and self._radii.revision == self.backend.state().revision else None
        about: Json = {"maker": self.maker, "radii": fresh and fresh.to_json(), "score": None}
        if self.score is not None:
            about["score"] = write_score(place, self.score)
        write_index(place, self.backend, about)
        return place

    def close(self) -> None:
        """Let go of a server's connection; the next call opens it again. In memory, nothing happens."""
        self.backend.close()

    def __len__(self) -> int:
        return self.backend.state().rows

    def __contains__(self, name: str) -> bool:
        return bool(self.backend.known([name]))

    def __repr__(self) -> str:
        state, rule = self.backend.state(), self.rule
        return (
            f"SafeIndex({state.rows} items of width {self.width}, {state.kept} searched; quantile={rule.quantile}, "
            f"clean={rule.clean!r}, per_class={rule.per_class})"
        )

    @property
    def width(self) -> int:
        """Of the features."""
        return self.backend.width

    @property
    def rule(self) -> Rule:
        """What is done about uncertainty."""
        return self.backend.rule

    @property
    def thresholds(self) -> Thresholds:
        """Above which items are left out and queries refused."""
        return _some(self.backend.state())

    @property
    def kept(self) -> int:
        """How many items can be an answer."""
        return self.backend.state().kept

    def left_out(self) -> list[str]:
        """The ids of items that are never an answer."""
        return self.backend.left_out()

    def add(
        self,
        items: Table | Array,
        uncertainty: Score | Array | None = None,
        *,
        ids: Names | None = None,
        labels: Array | None = None,
    ) -> None:
        """Add items, all or none; the thresholds move with them.

        Args:
            items: As of `build`.
            uncertainty: As of `build`; for a table, by default by the score that the index has.
            ids: Names that are not there yet; by default the table's, or the next numbers.
            labels: Classes, if the items before have some.
        """
        by, state = "SafeIndex.add", self.backend.state()
        found = self._given(by, items, uncertainty, ids=ids, labels=labels)
        if found.u is None:
            raise TableError(
                f"{by} needs the uncertainty of every item; none came, and the index has no score of its own. Give a "
                f"fitted score (with a table) or one number an item."
            )
        names = found.ids or [str(state.rows + row) for row in range(found.rows)]
        self._check_new(names, named=found.ids is not None)
        self._check_labels(found, state)
        if not found.rows:
            return
        self.backend.add(found.blocks(names), found.rows, found.source)
        if isinstance(uncertainty, Score):
            self.score = uncertainty
        if not state.rows:
            self.maker = dict(items.maker) if isinstance(items, Table) and items.maker else None

    def remove(self, ids: Names) -> None:
        """Remove items by id, all or none; the thresholds move with the rest."""
        names = [ids] if isinstance(ids, str) else [str(one) for one in ids]
        if again := twice(names):
            raise TableError(f"SafeIndex.remove: every id once; '{again}' came twice. Drop one of them.")
        unknown = sorted({*names} - self.backend.known(names))
        if unknown:
            raise TableError(
                f"SafeIndex.remove: ids must be those of items; {len(unknown)} of {len(names)} are not, such as "
                f"'{unknown[0]}'. Nothing was removed: ask `id in index` first."
            )
        if names:
            self.backend.remove(names)

    def search(
        self,
        queries: Table | Array,
        uncertainty: Score | Array | None = None,
        *,
        k: int = 5,
        labels: Array | None = None,
        exclude: Names | None = None,
        refuse_above: float | Array | None = None,
        sets: bool = False,
        at_most: int = 100,
    ) -> Retrieved:
        """The k most similar items of every query that is not refused.

        Args:
            queries: A table with features, or features (n, d).
            uncertainty: A fitted score, or one number a query; for a table, by default by the score of the index. Not
                needed where no query is refused and no set is asked for.
            k: How many neighbours.
            labels: With per_class, the queries' classes, true or predicted; by default the table's.
            exclude: For each query an id that is not to be its answer: its own, where queries are items.
            refuse_above: Other thresholds than the items', one number or one a query.
            sets: Give also all items within each query's uncertainty.
            at_most: How many items a set may have.
        """
        by, state = "SafeIndex.search", self.backend.state()
        thresholds = _some(state)
        found = self._given(by, queries, uncertainty, labels=labels)
        refuses = self.rule.refuses_queries or refuse_above is not None
        if found.u is None and (refuses or sets):
            raise TableError(
                f"{by} needs the uncertainty of every query; none came"
                + (", and the index has no score of its own" if self.score is None else " with an array of features")
                + ". Give a fitted score (with a table), one number a query, or build the index with clean='items'."
            )
        limits, against = self._limits(found, thresholds, refuse_above)
        refused: Bool[np.ndarray, "n"] = np.zeros(found.rows, bool) if found.u is None else found.u > limits
        hits = find(
            self.backend, found, refused, how_many(k, at_most if sets else 0, state, exclude, found.rows), exclude
        )
        return Retrieved(
            **spread(hits, refused, k),
            refused=refused,
            uncertainty=found.u,
            thresholds=limits,
            against=against,
            sets=within(hits, self._measured(), found.u, refused, at_most) if sets and found.u is not None else None,
            exact=self.backend.approximation is None,
        )

    def approximate(self, kind: str | None = None, *, effort: int | None = None) -> Approximation:
        """Search an approximation from now on, and tell how often it finds what the exact search finds.

        Args:
            kind: In memory a string of faiss.index_factory, such as "HNSW32"; by default an IVF with eight bits a
                number. On a server "hnsw". In memory, adding and removing items ends it; a server keeps it up to date.
            effort: How much of it is looked at: nprobe of an IVF, ef_search of an HNSW.
        """
        state = self.backend.state()
        _some(state)
        kind = self.backend.approximate(kind, effort)
        ids, vectors = self.backend.sample(_QUERIES)
        k = min(_TOP + 1, state.kept)
        near, far = (self.backend.nearest(vectors, k, exact=exact).ids.tolist() for exact in (True, False))
        shares = [
            len({*one} & {*other} - {own}) / max(1, len({*one} - {own}))
            for own, one, other in zip(ids, near, far, strict=True)
        ]
        approximation = Approximation(kind, float(np.mean(shares)) if k > 1 else 1.0, len(ids))
        self.backend.remember(approximation)
        return approximation

    def _given(
        self,
        by: str,
        features: Table | Array,
        uncertainty: Score | Array | None,
        *,
        ids: Names | None = None,
        labels: Array | None = None,
    ) -> Given:
        if uncertainty is None and isinstance(features, Table):
            uncertainty = self.score
        state = self.backend.state()
        if isinstance(uncertainty, Score) and state.rows and self.score and uncertainty.name != self.score.name:
            raise TableError(
                f"{by}: uncertainties must be of the score that the items have, {self.score.name}; {uncertainty.name} "
                f"came. Values of two scores have no common scale: build another index."
            )
        found = given(by, features, uncertainty, width=self.width, ids=ids, labels=labels)
        if state.source and found.source and state.source != found.source:
            raise TableError(
                f"{by}: {found.name} was made by another model ({found.source}) than the items of the index "
                f"({state.source}), so that cosines mean nothing. Extract it with the same model and transform."
            )
        return found

    def _check_new(self, names: list[str], *, named: bool) -> None:
        if again := twice(names):
            raise TableError(f"SafeIndex.add: every id once; '{again}' came twice. Nothing was added: name them apart.")
        if there := sorted(self.backend.known(names)):
            raise TableError(
                f"SafeIndex.add: ids must be new; {len(there)} of {len(names)} are in the index, such as '{there[0]}'. "
                f"Nothing was added: {'remove them first' if named else 'give ids=...'}."
            )

    def _check_labels(self, found: Given, state: State) -> None:
        labelled = found.labels is not None
        if found.rows and state.labelled is not None and state.labelled != labelled:
            raise TableError(
                f"SafeIndex.add: items must have classes or not, all alike; those of the index have "
                f"{'some' if state.labelled else 'none'}, {found.name} has {'some' if labelled else 'none'}. "
                f"{'Give labels=...' if state.labelled else 'Leave the labels out'}."
            )
        if found.rows and self.rule.per_class and not labelled:
            self.rule.thresholds(np.zeros(1), None)

    def _limits(
        self, found: Given, thresholds: Thresholds, refuse_above: float | Array | None
    ) -> tuple[Float64[np.ndarray, "n"], str]:
        """What each query's uncertainty is held against, and that in words."""
        if refuse_above is not None:
            given_ones = finite(to_tensor(refuse_above, "SafeIndex.search: refuse_above").double(), "refuse_above")
            if given_ones.dim() and tuple(given_ones.shape) != (found.rows,):
                raise TableError(
                    f"SafeIndex.search: refuse_above must be one number, or one a query, ({found.rows},); "
                    f"{tuple(given_ones.shape)} came. Give the same queries."
                )
            return np.broadcast_to(given_ones.numpy(), (found.rows,)).copy(), "the threshold that was given"
        if not self.rule.refuses_queries:
            return np.full(found.rows, np.inf), "no threshold"
        if self.rule.per_class and found.labels is None:
            raise TableError(
                "SafeIndex.search: per_class=True needs the class of every query, true or predicted; no labels came. "
                "Give labels=..., refuse_above=index.thresholds.everywhere, or build the index with clean='items'."
            )
        limits = thresholds.of(found.rows, found.labels)
        which = "the items of its class" if self.rule.per_class else "the items"
        return limits, f"the {self.rule.quantile:.4g} quantile of {which}"

    def _measured(self) -> Radii:
        if self._radii is None or self._radii.revision != self.backend.state().revision:
            self._radii = measure(self.backend, REACH)
        return self._radii


def _width(items: Table | Array) -> int:
    if isinstance(items, Table):
        items.require("feature", by="SafeIndex.build")
        return items.shape("feature")[1]
    shape = items.shape if isinstance(items, np.ndarray) else to_tensor(items, "SafeIndex.build: items").shape
    if len(shape) != 2:
        raise TableError(f"SafeIndex.build: features must have the axes (n, d); {tuple(shape)} came. One row an image.")
    return int(shape[1])


def _some(state: State) -> Thresholds:
    if state.thresholds is None:
        raise TableError("SafeIndex: the index is empty, so there is nothing to find. Add items first.")
    return state.thresholds
