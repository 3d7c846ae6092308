"""`SafeIndex`: cosine search that refuses uncertain queries, leaves uncertain items out, or both.

    cos(x, item) on features at length one, exact by default
    a query with u(x) > t is refused, an item with u > t is never an answer       t: see `rule`
    set(x) = {items: 1 - cos(x, item) <= r(u(x))}                                  r: see `radius`

Kirchhof et al., Pretrained Visual Uncertainties (2024), Section 5.2 and Table 1: ambiguous queries are matched with an
arbitrary class, and ambiguous items lie between classes, where they catch queries of both. The paper judges a whole
data set by itself. Here queries come one at a time, so they are held against the threshold of the items.
"""

import operator
from pathlib import Path
from typing import final

import numpy as np
from jaxtyping import Bool

from dubito.choices import Clean
from dubito.errors import ValueRangeError
from dubito.metrics import Array
from dubito.search import _checks
from dubito.search._answers import find, how_many, spread, within
from dubito.search._folder import Parts
from dubito.search._given import Names, texts
from dubito.search._load import read_index
from dubito.search._recall import approximated
from dubito.search._save import write_index
from dubito.search.backend import Approximation, Backend, State
from dubito.search.in_memory import InMemory
from dubito.search.radius import Radii, measure
from dubito.search.result import Retrieved
from dubito.search.rule import Rule, Thresholds
from dubito.table import Provenance, Table
from dubito.types import Json, Score


@final
class SafeIndex:
    """Items by their features, searched by cosine.

    Attributes:
        score: Judges queries that come as tables, as it judged the items; None if uncertainties were arrays.
        provenance: The model that made the features, part by part, if known.
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
            raise ValueRangeError(f"SafeIndex: width must be at least 1, that of the features; got {width}.")
        self.backend: Backend = InMemory(width, Rule(quantile, clean, per_class))
        self.score = score
        self.provenance: Provenance | None = None
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
        index = cls(_checks.width_of(items), quantile=quantile, clean=clean, per_class=per_class)
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
        from dubito.search.on_server import OnServer  # noqa: PLC0415 (an optional package)

        asked: Json = {"quantile": quantile, "clean": clean, "per_class": per_class}
        backend = OnServer(dsn, table, width, {key: value for key, value in asked.items() if value is not None})
        return cls._over(backend, score)

    @classmethod
    def load(cls, folder: str | Path, *, mapped: bool = True, check: bool = True) -> "SafeIndex":
        """Read back what `save` wrote.

        Args:
            folder: The place.
            mapped: Leave vectors on disk until they are searched; else read them now.
            check: Read every byte once and compare checksums: some seconds for a million vectors of 512.
        """
        parts = read_index(Path(folder), mapped=mapped, check=check)
        index = cls._over(parts.backend, parts.score)
        index.provenance, index._radii = parts.provenance, parts.radii
        return index

    def save(self, folder: str | Path) -> Path:
        """Write the index into a folder: a new or empty one, or in place of the index there.

        Killed at any instant, it leaves the old one or the new one.
        """
        place = Path(folder)
        backend = _checks.in_memory(self.backend)
        fresh = self._radii if self._radii and self._radii.revision == backend.state().revision else None
        write_index(place, Parts(backend, self.score, self.provenance, fresh))
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
        return _checks.some(self.backend.state())

    @property
    def kept(self) -> int:
        """How many items can be an answer."""
        return self.backend.state().kept

    def left_out(self) -> list[str]:
        """The ids of items that are never an answer, sorted."""
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
        state = self.backend.state()
        _checks.check_source("SafeIndex.add", items, state.origin.model_id, self.provenance)
        found = _checks.fitting(
            "SafeIndex.add", items, uncertainty, width=self.width, score=self.score, state=state, ids=ids, labels=labels
        )
        _checks.check_judged(found, self.score, "item")
        names = found.ids or [str(state.rows + row) for row in range(found.rows)]
        _checks.check_new(self.backend, names, named=found.ids is not None)
        _checks.check_labels(found, state, self.rule)
        if not found.rows:
            return
        self.backend.add(found.blocks(names), found.rows, found.origin)
        if isinstance(uncertainty, Score):
            self.score = uncertainty
        if not state.rows:
            self.provenance = items.provenance if isinstance(items, Table) else None

    def remove(self, ids: Names) -> None:
        """Remove items by id, all or none; the thresholds move with the rest."""
        names = texts(ids)
        _checks.check_there(self.backend, names)
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
        state = self.backend.state()
        _checks.some(state)
        k, own = operator.index(k), None if exclude is None else texts(exclude)
        _checks.check_source("SafeIndex.search", queries, state.origin.model_id, self.provenance)
        found = _checks.fitting(
            "SafeIndex.search", queries, uncertainty, width=self.width, score=self.score, state=state, labels=labels
        )
        if self.rule.refuses_queries or refuse_above is not None or sets:
            _checks.check_judged(found, self.score, "query")
        limits, against = _checks.limits_of(found, self.rule, state, refuse_above)
        refused: Bool[np.ndarray, "n"] = np.zeros(found.rows, bool) if found.u is None else found.u > limits
        count = how_many(k, at_most if sets else None, state, own, found.rows)
        hits = find(self.backend, found, refused, count, own, labelled=bool(state.labelled))
        nearby = (
            within(hits, self._measured(state), found.u, refused, at_most) if sets and found.u is not None else None
        )
        return Retrieved(
            **spread(hits, refused, k),
            refused=refused,
            uncertainty=found.u,
            thresholds=limits,
            against=against,
            sets=nearby,
            exact=hits.exact,
            queries=found.ids,
        )

    def approximate(self, kind: str | None = None, *, effort: int | None = None) -> Approximation:
        """Search an approximation from now on, and tell how often it finds what the exact search finds.

        Args:
            kind: In memory a string of faiss.index_factory, such as "HNSW32"; by default an IVF with eight bits a
                number. On a server "hnsw". In memory, adding and removing items ends it; a server keeps it up to date.
            effort: How much of it is looked at: nprobe of an IVF, ef_search of an HNSW.
        """
        _checks.some(self.backend.state())
        return approximated(self.backend, kind, effort)

    @classmethod
    def _over(cls, backend: Backend, score: Score | None) -> "SafeIndex":
        """An index of items that are somewhere already."""
        index = cls(backend.width, score=score)
        index.backend = backend
        return index

    def _measured(self, state: State) -> Radii:
        if self._radii is None or self._radii.revision != state.revision:
            self._radii = measure(self.backend)
        return self._radii
