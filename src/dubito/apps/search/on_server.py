"""Items in PostgreSQL with pgvector, the uncertainty as a column that searches are filtered by.

    NAME         id text, vector vector(d), u double precision, label bigint       one row an item
    NAME_about   one row of JSON: width, rule, thresholds, counts, revision         written in the transaction that adds

    SELECT id, label, vector <#> query FROM NAME WHERE u <= threshold ORDER BY vector <#> query LIMIT k

Vectors have length one, so minus their inner product orders by cosine. The search is exact, a scan of all rows, until
an HNSW index is asked for; with its iterative scan the filter does not empty the answers. Writers wait for each other
at the row of NAME_about. Names of tables are quoted by psycopg, values are never part of the SQL text.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
from jaxtyping import Float32, Float64

from dubito.apps.search._connection import Connection, to_vector
from dubito.apps.search.backend import Approximation, Block, Hits, State
from dubito.apps.search.rule import ROUNDING, Rule, Thresholds
from dubito.errors import ArtefactError, ServerError, TableError, ValueRangeError
from dubito.types import Json

FORMAT = 1
_LONGEST_NAME = 63 - len("_about")
_WIDEST_HNSW = 2000
_IDS = 50_000
"""Ids that go to the server together."""


@final
class OnServer:
    """The backend for those who outgrow one process."""

    def __init__(self, dsn: str, table: str, width: int | None, asked: Json) -> None:
        self._connection = Connection(dsn)
        self._sql = _sql()
        self._name = table
        *schema, name = table.split(".")
        if not name or len(schema) > 1 or len(name.encode()) > _LONGEST_NAME or "\0" in table:
            raise ValueRangeError(
                f"SafeIndex.on_server: table must be 'name' or 'schema.name', at most {_LONGEST_NAME} bytes long; "
                f"{table!r} came. Choose a shorter one."
            )
        self._items, self._about, self._index = (
            self._sql.Identifier(*schema, name),
            self._sql.Identifier(*schema, f"{name}_about"),
            self._sql.Identifier(f"{name}_hnsw"),
        )
        about = self._connection.write("SafeIndex.on_server", lambda cursor: self._opened(cursor, width, asked))
        self.width, self.rule = int(about["width"]), Rule.from_json(about["rule"])
        if width is not None and width != self.width:
            raise TableError(
                f"SafeIndex.on_server: the items of '{table}' are {self.width} wide; width={width} came. Leave it out, "
                f"or use another table."
            )
        differing = [key for key, value in asked.items() if about["rule"][key] != value]
        if differing:
            key = differing[0]
            raise TableError(
                f"SafeIndex.on_server: '{table}' was made with {key}={about['rule'][key]!r}; {key}={asked[key]!r} "
                f"came. Leave it out, or use another table."
            )

    def state(self) -> State:
        """As the last writer left it."""
        about = self._connection.read("SafeIndex", self._known)
        found = about["thresholds"]
        return State(
            rows=about["rows"],
            kept=about["kept"],
            thresholds=found and Thresholds.from_json(found),
            labelled=about["labelled"],
            revision=about["revision"],
            source=about["source"],
        )

    def add(self, blocks: Iterable[Block], rows: int, source: str | None) -> None:  # noqa: ARG002 (of the protocol)
        """All in one transaction, as the server's own COPY."""

        def work(cursor: Any) -> None:
            about = self._known(cursor, lock=True)
            with cursor.copy(self._with("COPY {items} (id, vector, u, label) FROM STDIN (FORMAT binary)")) as copy:
                copy.set_types(["text", "vector", "float8", "int8"])
                for block in blocks:
                    labels = [None] * len(block.ids) if block.labels is None else block.labels.tolist()
                    for row in zip(block.ids, block.vectors, block.u.tolist(), labels, strict=True):
                        copy.write_row(row)
                    about["labelled"] = block.labels is not None
            about["source"] = about["source"] if about["rows"] else source
            self._settle(cursor, about)

        self._connection.write("SafeIndex.add", work)

    def remove(self, ids: Sequence[str]) -> None:
        """All in one transaction."""

        def work(cursor: Any) -> None:
            about = self._known(cursor, lock=True)
            for start in range(0, len(ids), _IDS):
                some = list(ids[start : start + _IDS])
                cursor.execute(self._with("DELETE FROM {items} WHERE id = ANY(%s)"), (some,))
                if cursor.rowcount != len(some):
                    raise TableError(
                        "SafeIndex.remove: some items went meanwhile, by another hand. Nothing was removed: ask "
                        "`id in index` and call again."
                    )
            self._settle(cursor, about)

        self._connection.write("SafeIndex.remove", work)

    def known(self, ids: Sequence[str]) -> set[str]:
        """Those of the ids that are there."""

        def work(cursor: Any) -> set[str]:
            found: set[str] = set()
            for start in range(0, len(ids), _IDS):
                some = list(ids[start : start + _IDS])
                cursor.execute(self._with("SELECT id FROM {items} WHERE id = ANY(%s)"), (some,))
                found |= {row[0] for row in cursor.fetchall()}
            return found

        return self._connection.read("SafeIndex", work)

    def left_out(self) -> list[str]:
        """The ids that the filter drops."""

        def work(cursor: Any) -> list[str]:
            condition, values = self._filter(self._known(cursor))
            cursor.execute(self._with("SELECT id FROM {items} WHERE NOT {keep} ORDER BY id", keep=condition), values)
            return [row[0] for row in cursor.fetchall()]

        return self._connection.read("SafeIndex.left_out", work)

    def nearest(self, queries: Float32[np.ndarray, "n d"], k: int, *, exact: bool) -> Hits:
        """Query by query, in one transaction: all see the same items."""

        def work(cursor: Any) -> list[list[Any]]:
            about = self._known(cursor)
            self._steer(cursor, about, k, exact=exact)
            condition, values = self._filter(about)
            search = self._with(
                "SELECT id, label, -(vector <#> %(query)s) FROM {items} WHERE {keep} "
                "ORDER BY vector <#> %(query)s LIMIT %(k)s",
                keep=condition,
            )
            found = []
            for query in queries:
                cursor.execute(search, {**values, "query": query, "k": k})
                found.append(cursor.fetchall())
                if len(found[-1]) < k:
                    raise ServerError(
                        f"SafeIndex.search: the server found {len(found[-1])} of {k} neighbours: items went meanwhile, "
                        f"or its HNSW index gave up. Search again, or build it with a larger effort in approximate()."
                    )
            return found

        found = self._connection.read("SafeIndex.search", work)
        ids = np.array([row[0] for rows in found for row in rows], dtype=object).reshape(len(found), k)
        similarities = np.array([row[2] for rows in found for row in rows], dtype=np.float32).reshape(ids.shape)
        if any(row[1] is None for rows in found for row in rows):
            return Hits(ids, similarities, None)
        return Hits(
            ids, similarities, np.array([row[1] for rows in found for row in rows], np.int64).reshape(ids.shape)
        )

    def sample(self, count: int) -> tuple[list[str], Float32[np.ndarray, "s d"]]:
        """The kept items whose lots are lowest."""

        def work(cursor: Any) -> list[Any]:
            condition, values = self._filter(self._known(cursor))
            query = 'SELECT id, vector FROM {items} WHERE {keep} ORDER BY md5(id) COLLATE "C" LIMIT %(count)s'
            cursor.execute(self._with(query, keep=condition), {**values, "count": count})
            return list(cursor.fetchall())

        found = self._connection.read("SafeIndex", work)
        return [row[0] for row in found], np.stack([to_vector(row[1]) for row in found])

    def levels(self, shares: Float64[np.ndarray, "m"]) -> Float64[np.ndarray, "m"]:
        """Quantiles of all uncertainties."""

        def work(cursor: Any) -> Any:
            query = "SELECT percentile_cont(%s::float8[]) WITHIN GROUP (ORDER BY u) FROM {items}"
            cursor.execute(self._with(query), (shares.tolist(),))
            return cursor.fetchone()[0]

        return np.array(self._connection.read("SafeIndex", work), dtype=np.float64)

    def approximate(self, kind: str | None, effort: int | None) -> str:
        """An HNSW index of all items; the server keeps it up to date."""
        if kind not in (None, "hnsw") or self.width > _WIDEST_HNSW:
            raise ValueRangeError(
                f"SafeIndex.approximate: a server has 'hnsw', of vectors of up to {_WIDEST_HNSW} numbers; "
                f"{kind or 'hnsw'!r} came for {self.width}. Leave the kind out, or search exactly."
            )

        def work(cursor: Any) -> None:
            about = self._known(cursor, lock=True)
            cursor.execute(
                self._with("CREATE INDEX IF NOT EXISTS {index} ON {items} USING hnsw (vector vector_ip_ops)")
            )
            about["approximation"] = {"kind": "hnsw", "recall": 0.0, "queries": 0, "effort": effort or 100}
            self._write_about(cursor, about)

        self._connection.write("SafeIndex.approximate", work)
        return "hnsw"

    def remember(self, approximation: Approximation) -> None:
        """What was measured of the approximation."""

        def work(cursor: Any) -> None:
            about = self._known(cursor, lock=True)
            about["approximation"] = {**(about["approximation"] or {}), **approximation.to_json()}
            self._write_about(cursor, about)

        self._connection.write("SafeIndex.approximate", work)

    @property
    def approximation(self) -> Approximation | None:
        """As it was measured when it was built."""
        found = self._connection.read("SafeIndex", self._known)["approximation"]
        return found and Approximation(found["kind"], float(found["recall"]), found["queries"])

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()

    def _with(self, text: str, **parts: Any) -> Any:
        """SQL with the names of our tables, quoted."""
        named = {"items": self._items, "about": self._about, "index": self._index, **parts}
        return self._sql.SQL(text).format(**named)

    def _opened(self, cursor: Any, width: int | None, asked: Json) -> Json:
        cursor.execute("SELECT to_regclass(%s) IS NOT NULL", (self._items.as_string(cursor),))
        there = cursor.fetchone()[0]
        if not there and width is None:
            raise TableError(
                f"SafeIndex.on_server: there is no table '{self._name}' yet, and to make it the width of the features "
                f"must be known. Give width=..., or the name of a table that is there."
            )
        if not there:
            rule = Rule(**asked)
            self._make(cursor, int(width or 0), rule)
        try:
            return self._known(cursor, lock=True)
        except self._undefined() as error:
            raise ArtefactError(
                f"SafeIndex.on_server: '{self._name}' is a table that SafeIndex has not made: there is no "
                f"'{self._name}_about' beside it. Choose another name."
            ) from error

    def _make(self, cursor: Any, width: int, rule: Rule) -> None:
        cursor.execute(
            self._with(
                "CREATE TABLE {items} (id text PRIMARY KEY, vector vector({width}) NOT NULL, "
                "u double precision NOT NULL, label bigint)",
                width=self._sql.Literal(width),
            )
        )
        cursor.execute(self._with("CREATE INDEX ON {items} (u)"))
        cursor.execute(
            self._with("CREATE TABLE {about} (one boolean PRIMARY KEY DEFAULT true CHECK (one), about jsonb)")
        )
        empty: Json = {"format": FORMAT, "width": width, "rule": rule.to_json(), "rows": 0, "kept": 0, "revision": 0}
        empty |= {"thresholds": None, "labelled": None, "source": None, "approximation": None}
        cursor.execute(self._with("INSERT INTO {about} (about) VALUES (%s::jsonb)"), (json.dumps(empty),))

    def _known(self, cursor: Any, *, lock: bool = False) -> Json:
        cursor.execute(
            self._with("SELECT about::text FROM {about} FOR UPDATE" if lock else "SELECT about::text FROM {about}")
        )
        row = cursor.fetchone()
        if row is None or (about := json.loads(row[0])).get("format") != FORMAT:
            raise ArtefactError(
                f"SafeIndex.on_server: '{self._name}_about' is not of the format {FORMAT} that this dubito reads. "
                f"Update dubito, or build the index in another table."
            )
        known: Json = about
        return known

    def _settle(self, cursor: Any, about: Json) -> None:
        """Thresholds and counts of what is there now."""
        rule = Rule.from_json(about["rule"])
        ranked = (
            "SELECT label, u FROM (SELECT label, u, row_number() OVER (w ORDER BY u) AS place, count(*) OVER w AS n "
            "FROM {items} WINDOW w AS (PARTITION BY {group})) r WHERE place = greatest(1, ceil(%s * n::float8 - %s))"
        )
        found: dict[bool, list[Any]] = {}
        for per_class in {False, rule.per_class}:
            group = self._sql.SQL("label" if per_class else "true")
            cursor.execute(self._with(ranked, group=group), (rule.quantile, ROUNDING))
            found[per_class] = cursor.fetchall()
        everywhere = [row[1] for row in found[False]]
        by_class = {int(row[0]): row[1] for row in found[True]} if rule.per_class else None
        about["thresholds"] = Thresholds(everywhere[0], by_class).to_json() if everywhere else None
        about["revision"] += 1
        if not everywhere:
            about |= {"labelled": None, "source": None}
        condition, values = self._filter(about)
        counts = "SELECT count(*), count(*) FILTER (WHERE {keep}) FROM {items}"
        cursor.execute(self._with(counts, keep=condition), values)
        about["rows"], about["kept"] = cursor.fetchone()
        self._write_about(cursor, about)

    def _write_about(self, cursor: Any, about: Json) -> None:
        cursor.execute(self._with("UPDATE {about} SET about = %s::jsonb"), (json.dumps(about),))

    def _filter(self, about: Json) -> tuple[Any, Json]:
        """The condition that an item is kept, and its values."""
        rule, thresholds = Rule.from_json(about["rule"]), about["thresholds"]
        if not rule.cleans_items or thresholds is None:
            return self._sql.SQL("true"), {}
        if not rule.per_class:
            return self._sql.SQL("u <= %(limit)s"), {"limit": thresholds["everywhere"]}
        limits = json.dumps(thresholds["by_class"])
        return self._sql.SQL("u <= (%(limits)s::jsonb ->> label::text)::float8"), {"limits": limits}

    def _steer(self, cursor: Any, about: Json, k: int, *, exact: bool) -> None:
        """Which way the planner may go: for this transaction only."""
        approximation = about["approximation"]
        if exact or not approximation:
            cursor.execute("SET LOCAL enable_indexscan = off")
            return
        effort = min(1000, max(k, int(approximation["effort"])))
        for setting in ("enable_seqscan", "enable_bitmapscan", "enable_sort"):
            cursor.execute(f"SET LOCAL {setting} = off")
        cursor.execute("SET LOCAL hnsw.iterative_scan = strict_order")
        cursor.execute(self._with("SET LOCAL hnsw.ef_search = {effort}", effort=self._sql.Literal(effort)))

    def _undefined(self) -> type[Exception]:
        from psycopg import errors  # noqa: PLC0415 (an optional package)

        return errors.UndefinedTable


def _sql() -> Any:
    from psycopg import sql  # noqa: PLC0415 (an optional package)

    return sql
