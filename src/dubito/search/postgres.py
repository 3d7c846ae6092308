"""Items in PostgreSQL with pgvector, with the uncertainty as a column that filters searches.

    NAME         id text, vector vector(d), u double precision, label bigint       one row per item
    NAME_about   one row of JSON: width, rule, thresholds, counts, revision         written in the same transaction

    SELECT id, label, vector <#> query FROM NAME WHERE u <= threshold ORDER BY vector <#> query LIMIT k

Vectors have length one, so minus their inner product orders by cosine. The search is exact, a scan of all rows, until
an HNSW index is built. Its iterative scan keeps going until enough items pass the filter; a query that it gives up on
is compared with all items. Table names are quoted by psycopg, and values are never part of the SQL text. Writers wait
for each other at the row of NAME_about.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, final

import numpy as np
from jaxtyping import Float32, Float64

from dubito.errors import ArtefactError, ServerError, TableError, ValueRangeError
from dubito.search.backend import Approximation, Block, Hits, Origin, State
from dubito.search.connection import Connection
from dubito.search.inputs import is_valid_id
from dubito.search.rule import Rule, Thresholds
from dubito.storage import reading
from dubito.types import Json
from dubito.validate import check_number

_FORMAT = 2
_MAX_WIDTH = 16_000
"""Of a pgvector column."""
_MAX_HNSW_WIDTH = 2000
_OLDEST_HNSW = (0, 8)
"""The pgvector version that introduced the iterative scan."""
_MAX_EFFORT = 1000
_IDS_AT_ONCE = 50_000
_LONGEST_NAME = 63 - len("_about")
_QUANTILE = "percentile_disc(%s::float8) WITHIN GROUP (ORDER BY u)"
"""Of n values the one at position ceil(share n), as in `Rule`."""


@final
class PostgresBackend:
    """The backend for items that outgrow one process."""

    def __init__(self, dsn: str, table: str, width: int | None, settings: Json) -> None:
        self._connection = Connection(dsn)
        self._table = ItemsTable(table)
        about = self._connection.read("SafeIndex.on_server", self._table.open) or self._create(width, settings)
        with reading(f"SafeIndex.on_server: '{table}_about'", "Build the index in another table."):
            self.width, self.rule = int(about["width"]), Rule(**about["rule"])
        for key, value in {"width": self.width if width is None else width, **settings}.items():
            if (own := {"width": self.width, **asdict(self.rule)}[key]) != value:
                raise TableError(
                    f"SafeIndex.on_server: '{table}' was created with {key}={own!r}; got {key}={value!r}. Leave it "
                    f"out, or use another table."
                )

    def state(self) -> State:
        """A summary of all items, as the last writer left it."""
        return self._state(self._connection.read("SafeIndex", self._table.about))

    def _state(self, about: Json) -> State:
        return State(
            rows=about["rows"],
            kept=about["kept"],
            thresholds=about["thresholds"] and Thresholds.from_json(about["thresholds"]),
            labelled=about["labelled"],
            revision=about["revision"],
            origin=Origin.from_json(about["origin"], f"'{self._table.name}_about'"),
        )

    def add(self, blocks: Iterable[Block], rows: int, origin: Origin) -> None:  # noqa: ARG002 (of the protocol)
        """Add all blocks in one transaction, by COPY."""

        def work(cursor: Any) -> None:
            about = self._table.about(cursor, lock=True)
            with cursor.copy(self._table.sql("COPY {items} (id, vector, u, label) FROM STDIN (FORMAT binary)")) as copy:
                copy.set_types(["text", "vector", "float8", "int8"])
                for ids, vectors, u, classes in blocks:
                    labelled = classes is not None
                    if about["rows"]:  # another process may have added items since `SafeIndex` checked
                        self._state(about).check_new(
                            origin, labelled=labelled, by="SafeIndex.add", name="the new block"
                        )
                    labels = [None] * len(ids) if classes is None else classes.tolist()
                    for row in zip(ids, vectors, u.tolist(), labels, strict=True):
                        copy.write_row(row)
                    about["labelled"] = labelled
            if not about["rows"]:
                about["origin"] = origin.to_json()
            self._table.update(cursor, about)

        self._connection.write("SafeIndex.add", work)

    def remove(self, ids: Sequence[str]) -> None:
        """Remove items in one transaction."""

        def work(cursor: Any) -> None:
            about = self._table.about(cursor, lock=True)
            for part in _parts(ids):
                cursor.execute(self._table.sql("DELETE FROM {items} WHERE id = ANY(%s)"), (part,))
                if cursor.rowcount != len(part):
                    raise TableError(
                        "SafeIndex.remove: another process has removed some of these items. Nothing was removed: check "
                        "`id in index` and call again."
                    )
            self._table.update(cursor, about)

        self._connection.write("SafeIndex.remove", work)

    def existing(self, ids: Sequence[str]) -> set[str]:
        """The ids among these that are in the index; one that no server can store is not."""
        query = "SELECT id FROM {items} WHERE id = ANY(%(ids)s)"
        parts = _parts([one for one in ids if is_valid_id(one)])
        return {row[0] for part in parts for row in self._rows("SafeIndex", query, {"ids": part})}

    def left_out(self) -> list[str]:
        """The ids that the filter drops, sorted."""
        query = 'SELECT id FROM {items} WHERE NOT {keep} ORDER BY id COLLATE "C"'
        return [row[0] for row in self._rows("SafeIndex.left_out", query)]

    def nearest(self, queries: Float32[np.ndarray, "n d"], k: int, *, exact: bool) -> Hits:
        """Search query by query, in one transaction: all see the same items."""
        results, about = self._connection.read(
            "SafeIndex.search", lambda cursor: self._search(cursor, queries, k, exact)
        )
        rows, shape = [row for rows in results for row in rows], (len(results), k)
        return Hits(
            np.array([row[0] for row in rows], dtype=object).reshape(shape),
            np.array([row[2] for row in rows], dtype=np.float32).reshape(shape),
            np.array([row[1] for row in rows], dtype=np.int64).reshape(shape) if about["labelled"] else None,
            exact or not about["approximation"],
        )

    def sample(self, count: int) -> tuple[list[str], Float32[np.ndarray, "s d"]]:
        """The kept items with the lowest sampling keys."""
        query = 'SELECT id, vector FROM {items} WHERE {keep} ORDER BY md5(id) COLLATE "C" LIMIT %(count)s'
        rows = self._rows("SafeIndex", query, {"count": count})
        # Depending on its version, pgvector returns arrays or vectors of its own.
        vectors = [one.to_numpy() if hasattr(one, "to_numpy") else one for _, one in rows]
        return [row[0] for row in rows], np.stack(vectors).astype(np.float32)

    def uncertainty_quantiles(self, levels: Float64[np.ndarray, "m"]) -> Float64[np.ndarray, "m"]:
        """Quantiles of all uncertainties."""
        query = "SELECT percentile_cont(%(levels)s::float8[]) WITHIN GROUP (ORDER BY u) FROM {items}"
        return np.array(self._rows("SafeIndex", query, {"levels": levels.tolist()})[0][0], dtype=np.float64)

    def build_approximation(self, kind: str | None, effort: int | None) -> str:
        """Build an HNSW index of all items; the server keeps it up to date."""
        if kind not in (None, "hnsw") or self.width > _MAX_HNSW_WIDTH:
            raise ValueRangeError(
                f"SafeIndex.approximate: a server supports 'hnsw' for vectors of up to {_MAX_HNSW_WIDTH} numbers; "
                f"got {kind or 'hnsw'!r} for {self.width}. Leave the kind out, or search exactly."
            )

        def work(cursor: Any) -> None:
            about = self._table.about(cursor, lock=True)
            cursor.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'")
            version = cursor.fetchone()[0]
            if tuple(int(one) for one in version.split(".")[:2]) < _OLDEST_HNSW:
                raise ServerError(
                    f"SafeIndex.approximate: a filtered HNSW index requires pgvector "
                    f"{'.'.join(map(str, _OLDEST_HNSW))} or later; the server has {version}. Update it, or search "
                    f"exactly."
                )
            cursor.execute(
                self._table.sql("CREATE INDEX IF NOT EXISTS {index} ON {items} USING hnsw (vector vector_ip_ops)")
            )
            about["approximation"] = {"kind": "hnsw", "recall": 0.0, "queries": 0, "effort": effort or 100}
            self._table.write_about(cursor, about)

        self._connection.write("SafeIndex.approximate", work)
        return "hnsw"

    @property
    def approximation(self) -> Approximation | None:
        """The approximation in use, as it was measured when it was built."""
        stored = self._connection.read("SafeIndex", self._table.about)["approximation"]
        return stored and Approximation(stored["kind"], float(stored["recall"]), stored["queries"])

    @approximation.setter
    def approximation(self, measured: Approximation | None) -> None:
        def work(cursor: Any) -> None:
            about = self._table.about(cursor, lock=True)
            about["approximation"] = measured and {**(about["approximation"] or {}), **asdict(measured)}
            self._table.write_about(cursor, about)

        self._connection.write("SafeIndex.approximate", work)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._connection.close()

    def _create(self, width: int | None, settings: Json) -> Json:
        if width is None:
            raise TableError(
                f"SafeIndex.on_server: there is no table '{self._table.name}' yet, and creating it requires the width "
                f"of the features. Give width=..., or the name of an existing table."
            )
        hint = "Give the width of the features; a pgvector column takes no wider ones, but the memory does."
        check_number(width, f"[1, {_MAX_WIDTH}]", by="SafeIndex.on_server", what="width", whole=True, hint=hint)
        rule = Rule(**settings)
        return self._connection.write("SafeIndex.on_server", lambda cursor: self._table.create(cursor, width, rule))

    def _rows(self, doing: str, query: str, values: Json | None = None) -> list[Any]:
        """The rows of a query, in which {keep} is the condition that an item is kept."""

        def work(cursor: Any) -> list[Any]:
            kept = self._table.kept(self._table.about(cursor)) if "{keep}" in query else (None, {})
            cursor.execute(self._table.sql(query, keep=kept[0]), {**kept[1], **(values or {})})
            return list(cursor.fetchall())

        return self._connection.read(doing, work)

    def _search(
        self, cursor: Any, queries: Float32[np.ndarray, "n d"], k: int, exact: bool
    ) -> tuple[list[list[Any]], Json]:
        """Rows of (id, label, cosine) per query, and what is stored about all items."""
        about = self._table.about(cursor)
        condition, values = self._table.kept(about)
        search = self._table.sql(
            "SELECT id, label, -(vector <#> %(query)s) FROM {items} WHERE {keep} "
            "ORDER BY vector <#> %(query)s LIMIT %(k)s",
            keep=condition,
        )

        def run(query: Float32[np.ndarray, "d"]) -> list[Any]:
            cursor.execute(search, {**values, "query": query, "k": k})
            return list(cursor.fetchall())

        approximation = None if exact else about["approximation"]
        effort = min(_MAX_EFFORT, max(k, int(approximation["effort"]))) if approximation else 1
        self._table.set_planner(cursor, exact=approximation is None, effort=effort)
        results = [run(query) for query in queries]
        short = [row for row, one in enumerate(results) if len(one) < k]
        if short and approximation:  # the scan of an HNSW ends after 20,000 items, even if the filter keeps few of them
            self._table.set_planner(cursor, exact=True)
            for row in short:
                results[row] = run(queries[row])
        if lengths := [len(one) for one in results if len(one) < k]:
            raise ServerError(
                f"SafeIndex.search: the server returned {lengths[0]} of {k} neighbours: another process has removed "
                f"items. Search again."
            )
        return results, about


@final
class ItemsTable:
    """The two tables of an index. Every method but `sql` works on a cursor, in its transaction."""

    def __init__(self, name: str) -> None:
        from psycopg import errors, sql  # noqa: PLC0415 (an optional package)

        self.name, self._sql, self._undefined = name, sql, errors.UndefinedTable
        *schema, last = name.split(".")
        if not last or len(schema) > 1 or "" in schema or len(last.encode()) > _LONGEST_NAME or "\0" in name:
            raise ValueRangeError(
                f"SafeIndex.on_server: table must be 'name' or 'schema.name', at most {_LONGEST_NAME} bytes long; "
                f"got {name!r}. Choose a shorter one."
            )
        self._named = {
            "items": sql.Identifier(*schema, last),
            "about": sql.Identifier(*schema, f"{last}_about"),
            "index": sql.Identifier(f"{last}_hnsw"),
        }

    def sql(self, text: str, **parts: Any) -> Any:
        """SQL with the quoted names of our tables."""
        return self._sql.SQL(text).format(**self._named, **parts)

    def open(self, cursor: Any) -> Json | None:
        """What is stored about an existing index; None if there is no such table."""
        # By way of pg_class: to_regclass alone may remember that a table did not exist before another process made it.
        exists = "SELECT EXISTS (SELECT FROM pg_catalog.pg_class WHERE oid = to_regclass(%s))"
        cursor.execute(exists, (self._named["items"].as_string(cursor),))
        if not cursor.fetchone()[0]:
            return None
        try:
            return self.about(cursor)
        except self._undefined as error:
            raise ArtefactError(
                f"SafeIndex.on_server: '{self.name}' is a table that SafeIndex did not create: there is no "
                f"'{self.name}_about' beside it. Choose another name."
            ) from error

    def create(self, cursor: Any, width: int, rule: Rule) -> Json:
        """Create both tables, empty; or open them, where another process has just created them."""
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"dubito {self.name}",))
        if (about := self.open(cursor)) is not None:
            return about
        columns = (
            "CREATE TABLE {items} (id text PRIMARY KEY, vector vector({width}) NOT NULL, "
            "u double precision NOT NULL, label bigint)"
        )
        cursor.execute(self.sql(columns, width=self._sql.Literal(width)))
        cursor.execute(self.sql("CREATE INDEX ON {items} (u)"))
        cursor.execute(self.sql("CREATE TABLE {about} (one boolean PRIMARY KEY DEFAULT true CHECK (one), about jsonb)"))
        empty: Json = {"format": _FORMAT, "width": width, "rule": asdict(rule), "rows": 0, "kept": 0, "revision": 0}
        empty |= {"thresholds": None, "labelled": None, "origin": Origin().to_json(), "approximation": None}
        cursor.execute(self.sql("INSERT INTO {about} (about) VALUES (%s::jsonb)"), (json.dumps(empty),))
        return empty

    def about(self, cursor: Any, *, lock: bool = False) -> Json:
        """What is stored about all items; with `lock`, no other writer changes it before this transaction ends."""
        cursor.execute(
            self.sql("SELECT about::text FROM {about} FOR UPDATE" if lock else "SELECT about::text FROM {about}")
        )
        row = cursor.fetchone()
        if row is None or (about := json.loads(row[0])).get("format") != _FORMAT:
            raise ArtefactError(
                f"SafeIndex.on_server: '{self.name}_about' is not of format {_FORMAT}, which this dubito reads. "
                f"Update dubito, or build the index in another table."
            )
        stored: Json = about
        return stored

    def write_about(self, cursor: Any, about: Json) -> None:
        """Replace what is stored about all items."""
        cursor.execute(self.sql("UPDATE {about} SET about = %s::jsonb"), (json.dumps(about),))

    def update(self, cursor: Any, about: Json) -> None:
        """Compute thresholds and counts of the current items, and store them."""
        rule = Rule(**about["rule"])
        quantile = self._sql.SQL(_QUANTILE)
        cursor.execute(self.sql("SELECT {quantile} FROM {items}", quantile=quantile), (rule.share,))
        overall, by_class = cursor.fetchone()[0], None
        if rule.per_class:
            grouped = "SELECT label, {quantile} FROM {items} GROUP BY label"
            cursor.execute(self.sql(grouped, quantile=quantile), (rule.share,))
            by_class = {int(label): u for label, u in cursor.fetchall()}
        about["thresholds"] = None if overall is None else asdict(Thresholds(overall, by_class))
        about["revision"] += 1
        if overall is None:
            about |= {"labelled": None, "origin": Origin().to_json()}
        condition, values = self.kept(about)
        counts = "SELECT count(*), count(*) FILTER (WHERE {keep}) FROM {items}"
        cursor.execute(self.sql(counts, keep=condition), values)
        about["rows"], about["kept"] = cursor.fetchone()
        self.write_about(cursor, about)

    def kept(self, about: Json) -> tuple[Any, Json]:
        """The condition that an item is kept, and its values."""
        rule, thresholds = Rule(**about["rule"]), about["thresholds"]
        if not rule.cleans_items or thresholds is None:
            return self._sql.SQL("true"), {}
        if not rule.per_class:
            return self._sql.SQL("u <= %(limit)s"), {"limit": float(thresholds["overall"])}
        limits = json.dumps(thresholds["by_class"])
        return self._sql.SQL("u <= (%(limits)s::jsonb ->> label::text)::float8"), {"limits": limits}

    def set_planner(self, cursor: Any, *, exact: bool, effort: int = 1) -> None:
        """Make the planner use the HNSW index or avoid it, for this transaction only."""
        # A plan that was cached for one way would serve the other.
        cursor.execute("SET LOCAL plan_cache_mode = force_custom_plan")
        scan, rest = ("off", "on") if exact else ("on", "off")
        cursor.execute(f"SET LOCAL enable_indexscan = {scan}")
        for setting in ("enable_seqscan", "enable_bitmapscan", "enable_sort"):
            cursor.execute(f"SET LOCAL {setting} = {rest}")
        if not exact:
            cursor.execute("SET LOCAL hnsw.iterative_scan = strict_order")
            cursor.execute(self.sql("SET LOCAL hnsw.ef_search = {effort}", effort=self._sql.Literal(effort)))


def _parts(ids: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), _IDS_AT_ONCE):
        yield list(ids[start : start + _IDS_AT_ONCE])
