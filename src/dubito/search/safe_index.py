"""`SafeIndex`: cosine search that refuses uncertain queries, leaves uncertain items out, or both.

    cos(x, item) on features at length one, exact by default
    a query with u(x) > t is refused, an item with u > t is never returned        t: see `rule`
    set(x) = {items: 1 - cos(x, item) <= r(u(x))}                                  r: see `retrieval`

Kirchhof et al., Pretrained Visual Uncertainties (2024), Section 5.2 and Table 1: ambiguous queries are matched with an
arbitrary class, and ambiguous items lie between classes, where they attract queries of both. The paper filters a whole
data set by itself. Here queries arrive one at a time, so they are compared with the threshold of the items.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast, final

import numpy as np
from jaxtyping import Bool

from dubito.choices import Clean
from dubito.errors import ArtefactError, TableError
from dubito.metrics import Array
from dubito.scores.available import default_score
from dubito.scores.registry import check_registered, load_score, save_score
from dubito.search import retrieval
from dubito.search.backend import Approximation, Backend, State
from dubito.search.inputs import Names, as_list, check_unique, feature_column, read_embeddings
from dubito.search.memory import FOLDER, MemoryBackend
from dubito.search.retrieval import Radii, SearchResult
from dubito.search.rule import Rule, Thresholds
from dubito.storage import Place, RemotePath, to_place
from dubito.table import Provenance, Table
from dubito.threads import Lock
from dubito.types import Json, Score
from dubito.validate import check_number, check_rows

_TOP, _QUERIES = 10, 200
"""Neighbours whose recall is measured, and how many items serve as queries."""
Method = TypeVar("Method", bound=Callable[..., Any])


def _in_one_thread(method: Method) -> Method:
    """A method of an index that no other thread interrupts: additions read the items before they write."""

    @wraps(method)
    def locked(index: "SafeIndex", *args: Any, **kwargs: Any) -> Any:
        with index._lock:
            return method(index, *args, **kwargs)

    return cast("Method", locked)


@final
class SafeIndex:
    """Items by their features, searched by cosine.

    Attributes:
        score: The score of items and queries given as tables; None if uncertainties were arrays.
        backend: Stores and searches the items.

    >>> index = SafeIndex(2, quantile=0.75)
    >>> index.add([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.7, 0.7]], [0.1, 0.2, 0.3, 0.9], ids=["a", "b", "c", "?"])
    >>> result = index.search([[0.8, 0.6], [0.8, 0.6]], [0.2, 0.8], k=2)  # the last query is itself uncertain
    >>> result.ids[0].tolist(), result.refused.tolist()
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
        check_number(width, "[1, inf)", by="SafeIndex", what="width", whole=True, hint="Pass that of the features.")
        self.backend: Backend = MemoryBackend(width, Rule(quantile, clean, per_class))
        self.score = score
        self._lock = Lock()
        self._radii: tuple[int, Radii] | None = None  # and the revision of the items that they were measured on

    @classmethod
    def build(
        cls,
        items: Table | Array,
        uncertainty: Score | Array | None = None,
        *,
        ids: Names | None = None,
        labels: Array | None = None,
        quantile: float = 0.9,
        clean: Clean = "both",
        per_class: bool = False,
    ) -> "SafeIndex":
        """Build an index of some items.

        Args:
            items: A table with features, or features (n, d). A cache is read block by block.
            uncertainty: A fitted score, which the index keeps for queries, or one number per item. By default of a
                table, the head that ships for its model, or max-probability; without logits, the distance to the tenth
                nearest of the other items (`Neighbours`).
            ids: The ids of the items; by default the table's, or "0", "1", ...
            labels: The classes of the items; by default the table's, if it has any.
            quantile: The share of items that is kept; its threshold also decides which queries are refused.
            clean: Whether uncertain "queries" are refused, uncertain "items" left out, "both" or "none".
            per_class: Take the quantile in each class, as the paper's code does.
        """
        width = (1, *feature_column(items, by="SafeIndex.build").shape)[-1]  # `add` checks the axes
        index = cls(int(width), quantile=quantile, clean=clean, per_class=per_class)
        if uncertainty is None and isinstance(items, Table):
            check_rows(items, by="SafeIndex.build", what="items")
            uncertainty, _ = default_score(items)
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
        """Open an index in a PostgreSQL database with pgvector; it is created if the table does not exist.

        Args:
            dsn: As libpq takes it: "postgresql://user@host/database".
            table: The name of the table, or "schema.name". A second table, NAME_about, is created beside it.
            width: The width of the features; required to create a table.
            quantile: As in `build`. An existing table has its own three settings; others are refused.
            clean: As in `build`.
            per_class: As in `build`.
            score: The score of items and queries given as tables; it is not stored on the server.
        """
        from dubito.search.postgres import PostgresBackend  # noqa: PLC0415 (an optional package)

        rule: Json = {"quantile": quantile, "clean": clean, "per_class": per_class}
        settings = {key: value for key, value in rule.items() if value is not None}
        backend = PostgresBackend(dsn, table, width, settings)
        index = cls(backend.width, score=score)
        index.backend = backend
        return index

    @classmethod
    def load(cls, folder: str | Place, *, mapped: bool = True, check: bool = True) -> "SafeIndex":
        """Load an index that `save` wrote.

        Args:
            folder: The folder of the index, or its address.
            mapped: Memory-map the vectors rather than read them now.
            check: Read every byte once and compare checksums: a second for a million vectors of 512 numbers.
        """
        if not isinstance(folder, str | Path | RemotePath):
            raise TableError(f"SafeIndex.load: folder must be the path of an index; got {type(folder).__name__}.")

        def read(saved: Json) -> "SafeIndex":
            place = to_place(folder)
            paths = {kind: FOLDER.part(place, name, check=check) for kind, name in saved["files"].items()}
            backend = MemoryBackend.read(paths, saved, f"the index in '{folder}'", mapped=mapped)
            index = cls(backend.width, score=load_score(paths["score"]) if "score" in paths else None)
            index.backend = backend
            if saved["radii"]:
                radii: Radii = np.array(saved["radii"], dtype=np.float64)
                if radii.ndim != 2 or len(radii) != 2 or not np.isfinite(radii).all():
                    raise ValueError("radii must be as many distances as uncertainties, all of them finite")
                index._radii = backend.state().revision, radii
            return index

        return FOLDER.load(to_place(folder), read)

    @_in_one_thread
    def save(self, folder: str | Place) -> Place:
        """Save the index in a folder: a new or empty one, or in place of the index there.

        A kill at any instant leaves the old index or the new one. A score that is not one of dubito's own cannot be
        saved: set index.score = None before, and pass the uncertainties of queries after loading.
        """
        if not isinstance(self.backend, MemoryBackend):
            raise ArtefactError(
                "SafeIndex.save: this index is on a server, which has stored every change already. Open it with "
                "SafeIndex.on_server, or build one in memory from the same items to save it."
            )
        backend, score = self.backend, self.score
        if score is not None:
            hint = "Set index.score = None and save again; after load, pass the uncertainties of queries."
            check_registered(score, hint=hint)
        revision, radii = self._radii or (None, None)
        current = None if radii is None or revision != backend.state().revision else radii.tolist()

        def write(place: Path) -> Json:
            described = backend.write(place)
            if score is not None:
                described["files"]["score"] = FOLDER.put_folder(place, "score", lambda part: save_score(score, part))
            return {**described, "radii": current}

        FOLDER.save(to_place(folder), write)
        return to_place(folder)

    def close(self) -> None:
        """Close the connection to a server; the next call opens it again. In memory, this does nothing."""
        self.backend.close()

    @_in_one_thread
    def __len__(self) -> int:
        return self.backend.state().rows

    @_in_one_thread
    def __contains__(self, name: str) -> bool:
        return bool(self.backend.existing([name]))

    @_in_one_thread
    def __repr__(self) -> str:
        state, rule = self.backend.state(), self.rule
        return (
            f"SafeIndex({state.rows} items of width {self.width}, {state.kept} searched; quantile={rule.quantile}, "
            f"clean={rule.clean!r}, per_class={rule.per_class})"
        )

    @property
    def width(self) -> int:
        """The width of the features."""
        return self.backend.width

    @property
    def rule(self) -> Rule:
        """How the index treats uncertainty."""
        return self.backend.rule

    @property
    @_in_one_thread
    def provenance(self) -> Provenance | None:
        """The model that made the features of the items, if known."""
        return self.backend.state().origin.provenance

    @property
    @_in_one_thread
    def thresholds(self) -> Thresholds:
        """The uncertainties above which items are left out and queries refused."""
        return _thresholds(self.backend.state())

    @property
    @_in_one_thread
    def kept(self) -> int:
        """How many items are searched."""
        return self.backend.state().kept

    @_in_one_thread
    def left_out(self) -> list[str]:
        """The ids of items that are never returned, sorted."""
        return self.backend.left_out()

    @_in_one_thread
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
            items: As in `build`.
            uncertainty: As in `build`; for a table, the score of the index by default.
            ids: Ids that are not in the index yet; by default the table's, or the next numbers.
            labels: The classes of the items, if those in the index have classes.
        """
        state = self.backend.state()
        new = read_embeddings(
            "SafeIndex.add", items, uncertainty, width=self.width, score=self.score, state=state, ids=ids, labels=labels
        )
        new.require_uncertainties("item")
        names = new.ids or [str(state.rows + row) for row in range(new.rows)]
        check_unique(names, by="SafeIndex.add")
        if existing := sorted(self.backend.existing(names)):
            raise TableError(
                f"SafeIndex.add: ids must be new; {len(existing)} of {len(names)} are in the index, such as "
                f"'{existing[0]}'. Nothing was added: {'remove them first' if new.ids else 'pass ids=...'}."
            )
        if not new.rows:
            return
        state.check_new(new.origin, labelled=new.labels is not None, by=new.by, name=new.name)
        if self.rule.per_class and new.labels is None:
            self.rule.thresholds(np.zeros(1), None)  # raises, and says what is missing
        self.backend.add(new.blocks(names), new.rows, new.origin)
        if isinstance(uncertainty, Score):
            self.score = uncertainty

    @_in_one_thread
    def remove(self, ids: Names) -> None:
        """Remove items by id, all or none; the thresholds move with the rest."""
        names = as_list(ids)
        check_unique(names, by="SafeIndex.remove")
        if unknown := sorted({*names} - self.backend.existing(names)):
            raise TableError(
                f"SafeIndex.remove: ids must be in the index; {len(unknown)} of {len(names)} are not, such as "
                f"'{unknown[0]}'. Nothing was removed: check `id in index` first."
            )
        if names:
            self.backend.remove(names)

    @_in_one_thread
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
    ) -> SearchResult:
        """Find the k most similar items of every query that is not refused.

        Args:
            queries: A table with features, or features (n, d).
            uncertainty: A fitted score, or one number per query; for a table, the score of the index by default. Not
                needed where no query is refused and no sets are returned.
            k: The number of neighbours.
            labels: With per_class, the classes of the queries, true or predicted; by default the table's.
            exclude: For each query an id that is not returned: its own, where queries are items.
            refuse_above: Thresholds in place of the items', one number or one per query.
            sets: Also return all items within each query's uncertainty.
            at_most: The largest number of items in a set.
        """
        check_number(k, "[1, inf)", by="SafeIndex.search", what="k", whole=True, hint="5 is usual.")
        state = self.backend.state()
        _thresholds(state)
        own = None if exclude is None else as_list(exclude)
        embedded = read_embeddings(
            "SafeIndex.search", queries, uncertainty, width=self.width, score=self.score, state=state, labels=labels
        )
        if self.rule.refuses_queries or refuse_above is not None or sets:
            embedded.require_uncertainties("query", ", or build the index with clean='items'")
        limits, against = retrieval.query_limits(embedded, self.rule, state, refuse_above)
        refused: Bool[np.ndarray, "n"] = np.zeros(embedded.rows, bool) if embedded.u is None else embedded.u > limits
        count = retrieval.neighbour_count(k, at_most if sets else None, state, own, embedded.rows)
        hits = retrieval.nearest_items(self.backend, embedded, refused, count, own)
        within = None
        if sets and embedded.u is not None:
            if self._radii is None or self._radii[0] != state.revision:
                self._radii = state.revision, retrieval.measure_radii(self.backend)
            within = retrieval.neighbour_sets(hits, self._radii[1], embedded.u, refused, at_most)
        return SearchResult(
            ids=hits.ids[:, :k],
            similarities=hits.similarities[:, :k],
            labels=None if hits.labels is None else hits.labels[:, :k],
            refused=refused,
            uncertainty=embedded.u,
            thresholds=limits,
            against=against,
            sets=within,
            exact=hits.exact,
            queries=embedded.ids,
        )

    @_in_one_thread
    def approximate(self, kind: str | None = None, *, effort: int | None = None) -> Approximation:
        """Search an approximation from now on, and measure how often it finds what the exact search finds.

            recall = mean over items of |exact top 10 and approximate top 10| / 10, the item itself not counted

        on up to 200 kept items as queries. It is built from the items, so new images get a slightly lower recall.

        Args:
            kind: In memory a string for faiss.index_factory, such as "HNSW32"; by default an IVF with eight bits per
                number. It is discarded when items are added or removed. On a server "hnsw", which is kept up to date.
            effort: How much of it is searched: nprobe of an IVF, ef_search of an HNSW.
        """
        _thresholds(self.backend.state())
        if effort is not None:
            hint = "Leave it out for the default."
            check_number(effort, "[1, inf)", by="SafeIndex.approximate", what="effort", whole=True, hint=hint)
        built = self.backend.build_approximation(kind, effort)
        ids, vectors = self.backend.sample(_QUERIES)
        k = min(_TOP + 1, self.kept)
        exact, approximated = (self.backend.nearest(vectors, k, exact=exact).ids.tolist() for exact in (True, False))
        recalls = [
            len({*one} & {*other} - {own}) / max(1, len({*one} - {own}))
            for own, one, other in zip(ids, exact, approximated, strict=True)
        ]
        approximation = Approximation(built, float(np.mean(recalls)) if k > 1 else 1.0, len(ids))
        self.backend.approximation = approximation
        return approximation


def _thresholds(state: State) -> Thresholds:
    if state.thresholds is None:
        raise TableError("SafeIndex: the index is empty, so there is nothing to find. Add items first.")
    return state.thresholds
