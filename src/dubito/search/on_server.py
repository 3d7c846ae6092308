"""Items in PostgreSQL with pgvector, the uncertainty as a column that searches are filtered by.

    SELECT id, label, vector <#> query FROM NAME WHERE u <= threshold ORDER BY vector <#> query LIMIT k

Vectors have length one, so minus their inner product orders by cosine. The search is exact, a scan of all rows, until
an HNSW index is asked for. With its iterative scan the filter does not empty the answers; a query that it gives up on
is compared with all items. The tables are those of `_items_table`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np
from jaxtyping import Float32, Float64

from dubito.errors import ServerError, TableError, ValueRangeError
from dubito.search._connection import Connection, to_vector
from dubito.search._given import is_name
from dubito.search._items_table import WIDEST, ItemsTable
from dubito.search.backend import Approximation, Block, Hits, Origin, State
from dubito.search.rule import Rule, Thresholds
from dubito.types import Json

_WIDEST_HNSW = 2000
_OLDEST_HNSW = (0, 8)
"""The pgvector that brought the iterative scan."""
_MOST_EFFORT = 1000
_IDS = 50_000
"""Ids that go to the server together."""
_PARTS = {"model_id": "model", "classes": "set of classes", "judged_by": "score"}


@final
class OnServer:
    """The backend for those who outgrow one process."""

    def __init__(self, dsn: str, table: str, width: int | None, asked: Json) -> None:
        self._connection = Connection(dsn)
        self._table = ItemsTable(table)
        about = self._connection.read("SafeIndex.on_server", self._table.opened) or self._made(width, asked)
        self.width, self.rule = int(about["width"]), Rule.from_json(about["rule"])
        if width is not None and width != self.width:
            raise TableError(
                f"SafeIndex.on_server: the items of '{table}' are {self.width} wide; got width={width}. Leave it out, "
                f"or use another table."
            )
        differing = [key for key, value in asked.items() if about["rule"][key] != value]
        if differing:
            key = differing[0]
            raise TableError(
                f"SafeIndex.on_server: '{table}' was made with {key}={about['rule'][key]!r}; got {key}={asked[key]!r}. "
                f"Leave it out, or use another table."
            )

    def state(self) -> State:
        """As the last writer left it."""
        about = self._connection.read("SafeIndex", self._table.about)
        found = about["thresholds"]
        return State(
            rows=about["rows"],
            kept=about["kept"],
            thresholds=found and Thresholds.from_json(found),
            labelled=about["labelled"],
            revision=about["revision"],
            origin=Origin.from_json(about),
        )

    def add(self, blocks: Iterable[Block], rows: int, origin: Origin) -> None:  # noqa: ARG002 (of the protocol)
        """All in one transaction, as the server's own COPY."""

        def work(cursor: Any) -> None:
            about = self._table.about(cursor, lock=True)
            with cursor.copy(self._table.sql("COPY {items} (id, vector, u, label) FROM STDIN (FORMAT binary)")) as copy:
                copy.set_types(["text", "vector", "float8", "int8"])
                for block in blocks:
                    _check_fits(about, block, origin)
                    labels = [None] * len(block.ids) if block.labels is None else block.labels.tolist()
                    for row in zip(block.ids, block.vectors, block.u.tolist(), labels, strict=True):
                        copy.write_row(row)
                    about["labelled"] = block.labels is not None
            about |= {} if about["rows"] else origin.to_json()
            self._table.settle(cursor, about)

        self._connection.write("SafeIndex.add", work)

    def remove(self, ids: Sequence[str]) -> None:
        """All in one transaction."""

        def work(cursor: Any) -> None:
            about = self._table.about(cursor, lock=True)
            for some in _parts(ids):
                cursor.execute(self._table.sql("DELETE FROM {items} WHERE id = ANY(%s)"), (some,))
                if cursor.rowcount != len(some):
                    raise TableError(
                        "SafeIndex.remove: some items went meanwhile, by another hand. Nothing was removed: ask "
                        "`id in index` and call again."
                    )
            self._table.settle(cursor, about)

        self._connection.write("SafeIndex.remove", work)

    def known(self, ids: Sequence[str]) -> set[str]:
        """Those of the ids that are there; one that no server can keep is not."""
        ids = [one for one in ids if is_name(one)]

        def work(cursor: Any) -> set[str]:
            found: set[str] = set()
            for some in _parts(ids):
                cursor.execute(self._table.sql("SELECT id FROM {items} WHERE id = ANY(%s)"), (some,))
                found |= {row[0] for row in cursor.fetchall()}
            return found

        return self._connection.read("SafeIndex", work)

    def left_out(self) -> list[str]:
        """The ids that the filter drops."""

        def work(cursor: Any) -> list[str]:
            condition, values = self._table.kept(self._table.about(cursor))
            query = 'SELECT id FROM {items} WHERE NOT {keep} ORDER BY id COLLATE "C"'
            cursor.execute(self._table.sql(query, keep=condition), values)
            return [row[0] for row in cursor.fetchall()]

        return self._connection.read("SafeIndex.left_out", work)

    def nearest(self, queries: Float32[np.ndarray, "n d"], k: int, *, exact: bool) -> Hits:
        """Query by query, in one transaction: all see the same items."""
        found, exactly = self._connection.read(
            "SafeIndex.search", lambda cursor: self._found(cursor, queries, k, exact)
        )
        rows = [row for rows in found for row in rows]
        shape = (len(found), k)
        labelled = all(row[1] is not None for row in rows)
        return Hits(
            np.array([row[0] for row in rows], dtype=object).reshape(shape),
            np.array([row[2] for row in rows], dtype=np.float32).reshape(shape),
            np.array([row[1] for row in rows], dtype=np.int64).reshape(shape) if labelled else None,
            exactly,
        )

    def sample(self, count: int) -> tuple[list[str], Float32[np.ndarray, "s d"]]:
        """The kept items whose lots are lowest."""

        def work(cursor: Any) -> list[Any]:
            condition, values = self._table.kept(self._table.about(cursor))
            query = 'SELECT id, vector FROM {items} WHERE {keep} ORDER BY md5(id) COLLATE "C" LIMIT %(count)s'
            cursor.execute(self._table.sql(query, keep=condition), {**values, "count": count})
            return list(cursor.fetchall())

        found = self._connection.read("SafeIndex", work)
        return [row[0] for row in found], np.stack([to_vector(row[1]) for row in found])

    def levels(self, shares: Float64[np.ndarray, "m"]) -> Float64[np.ndarray, "m"]:
        """Quantiles of all uncertainties."""

        def work(cursor: Any) -> Any:
            query = "SELECT percentile_cont(%s::float8[]) WITHIN GROUP (ORDER BY u) FROM {items}"
            cursor.execute(self._table.sql(query), (shares.tolist(),))
            return cursor.fetchone()[0]

        return np.array(self._connection.read("SafeIndex", work), dtype=np.float64)

    def approximate(self, kind: str | None, effort: int | None) -> str:
        """An HNSW index of all items; the server keeps it up to date."""
        if kind not in (None, "hnsw") or self.width > _WIDEST_HNSW:
            raise ValueRangeError(
                f"SafeIndex.approximate: a server has 'hnsw', of vectors of up to {_WIDEST_HNSW} numbers; "
                f"got {kind or 'hnsw'!r} for {self.width}. Leave the kind out, or search exactly."
            )

        def work(cursor: Any) -> None:
            about = self._table.about(cursor, lock=True)
            cursor.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'")
            _check_version(cursor.fetchone()[0])
            cursor.execute(
                self._table.sql("CREATE INDEX IF NOT EXISTS {index} ON {items} USING hnsw (vector vector_ip_ops)")
            )
            about["approximation"] = {"kind": "hnsw", "recall": 0.0, "queries": 0, "effort": effort or 100}
            self._table.write_about(cursor, about)

        self._connection.write("SafeIndex.approximate", work)
        return "hnsw"

    def remember(self, approximation: Approximation) -> None:
        """What was measured of the approximation."""

        def work(cursor: Any) -> None:
            about = self._table.about(cursor, lock=True)
            about["approximation"] = {**(about["approximation"] or {}), **approximation.to_json()}
            self._table.write_about(cursor, about)

        self._connection.write("SafeIndex.approximate", work)

    @property
    def approximation(self) -> Approximation | None:
        """As it was measured when it was built."""
        found = self._connection.read("SafeIndex", self._table.about)["approximation"]
        return found and Approximation(found["kind"], float(found["recall"]), found["queries"])

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()

    def _made(self, width: int | None, asked: Json) -> Json:
        if width is None:
            raise TableError(
                f"SafeIndex.on_server: there is no table '{self._table.name}' yet, and to make it the width of the "
                f"features must be known. Give width=..., or the name of a table that is there."
            )
        if not 1 <= width <= WIDEST:
            raise ValueRangeError(
                f"SafeIndex.on_server: width must be between 1 and {WIDEST}, what a column of pgvector holds; got {width}. "
                f"Give the width of the features; wider ones can be searched in memory."
            )
        rule = Rule(**asked)
        return self._connection.write("SafeIndex.on_server", lambda cursor: self._table.make(cursor, width, rule))

    def _found(
        self, cursor: Any, queries: Float32[np.ndarray, "n d"], k: int, exact: bool
    ) -> tuple[list[list[Any]], bool]:
        """Rows of (id, label, cosine) for each query, and whether every item was compared."""
        about = self._table.about(cursor)
        condition, values = self._table.kept(about)
        search = self._table.sql(
            "SELECT id, label, -(vector <#> %(query)s) FROM {items} WHERE {keep} "
            "ORDER BY vector <#> %(query)s LIMIT %(k)s",
            keep=condition,
        )

        def ask(query: Float32[np.ndarray, "d"]) -> list[Any]:
            cursor.execute(search, {**values, "query": query, "k": k})
            return list(cursor.fetchall())

        approximation = None if exact else about["approximation"]
        effort = min(_MOST_EFFORT, max(k, int(approximation["effort"]))) if approximation else 1
        self._table.steer(cursor, exact=approximation is None, effort=effort)
        found = [ask(query) for query in queries]
        few = [row for row, one in enumerate(found) if len(one) < k]
        if few and approximation:  # the scan of an HNSW ends after 20,000 items, however few of them the filter keeps
            self._table.steer(cursor, exact=True)
            for row in few:
                found[row] = ask(queries[row])
        if least := [len(one) for one in found if len(one) < k]:
            raise ServerError(
                f"SafeIndex.search: the server found {least[0]} of {k} neighbours: items went meanwhile, by another "
                f"hand. Search again."
            )
        return found, approximation is None


def _check_fits(about: Json, block: Block, origin: Origin) -> None:
    """Of what the index is now: another writer may have added since `SafeIndex` looked."""
    if not about["rows"]:
        return
    if about["labelled"] != (block.labels is not None):
        raise TableError(
            f"SafeIndex.add: items must have classes or not, all alike; those that another hand has added meanwhile "
            f"have {'some' if about['labelled'] else 'none'}. Nothing was added: give the same."
        )
    there = Origin.from_json(about).to_json()
    for part, came in origin.to_json().items():
        if came and there[part] and came != there[part]:
            raise TableError(
                f"SafeIndex.add: these items are of another {_PARTS[part]} ({came}) than those that another hand has "
                f"added meanwhile ({there[part]}). Nothing was added: use another table."
            )


def _check_version(came: str) -> None:
    if tuple(int(one) for one in came.split(".")[:2]) < _OLDEST_HNSW:
        raise ServerError(
            f"SafeIndex.approximate: an HNSW index that is filtered needs pgvector "
            f"{'.'.join(map(str, _OLDEST_HNSW))} or later; the server has {came}. Update it, or search exactly."
        )


def _parts(ids: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), _IDS):
        yield list(ids[start : start + _IDS])
