"""The two tables of an index on a server, and the pieces of SQL that are written about them.

    NAME         id text, vector vector(d), u double precision, label bigint       one row an item
    NAME_about   one row of JSON: width, rule, thresholds, counts, revision         written in the transaction that adds

Names of tables are quoted by psycopg, values are never part of the SQL text. Writers wait for each other at the row of
NAME_about.
"""

import json
from typing import Any, final

from dubito.errors import ArtefactError, ValueRangeError
from dubito.search.backend import Origin
from dubito.search.rule import Rule, Thresholds
from dubito.types import Json

FORMAT = 1
WIDEST = 16_000
"""Of a pgvector column."""
_LONGEST_NAME = 63 - len("_about")
_QUANTILE = "percentile_disc(%s::float8) WITHIN GROUP (ORDER BY u)"
"""Of n values the one at the place ceil(share n), as `Rule` has it."""


@final
class ItemsTable:
    """Every method but `sql` works on a cursor, in the transaction that it is in."""

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
        """SQL with the names of our tables, quoted."""
        return self._sql.SQL(text).format(**self._named, **parts)

    def opened(self, cursor: Any) -> Json | None:
        """What is known of an index that is there; None if there is no such table."""
        # By way of pg_class: to_regclass alone may remember that a table was not there before another made it.
        there = "SELECT EXISTS (SELECT FROM pg_catalog.pg_class WHERE oid = to_regclass(%s))"
        cursor.execute(there, (self._named["items"].as_string(cursor),))
        if not cursor.fetchone()[0]:
            return None
        try:
            return self.about(cursor)
        except self._undefined as error:
            raise ArtefactError(
                f"SafeIndex.on_server: '{self.name}' is a table that SafeIndex has not made: there is no "
                f"'{self.name}_about' beside it. Choose another name."
            ) from error

    def make(self, cursor: Any, width: int, rule: Rule) -> Json:
        """Both tables, empty; or what is known of them, where another has just made them."""
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"dubito {self.name}",))
        if (there := self.opened(cursor)) is not None:
            return there
        columns = (
            "CREATE TABLE {items} (id text PRIMARY KEY, vector vector({width}) NOT NULL, "
            "u double precision NOT NULL, label bigint)"
        )
        cursor.execute(self.sql(columns, width=self._sql.Literal(width)))
        cursor.execute(self.sql("CREATE INDEX ON {items} (u)"))
        cursor.execute(self.sql("CREATE TABLE {about} (one boolean PRIMARY KEY DEFAULT true CHECK (one), about jsonb)"))
        empty: Json = {"format": FORMAT, "width": width, "rule": rule.to_json(), "rows": 0, "kept": 0, "revision": 0}
        empty |= {"thresholds": None, "labelled": None, **Origin().to_json(), "approximation": None}
        cursor.execute(self.sql("INSERT INTO {about} (about) VALUES (%s::jsonb)"), (json.dumps(empty),))
        return empty

    def about(self, cursor: Any, *, lock: bool = False) -> Json:
        """What is known of all items; with `lock`, no other writer changes it before this transaction ends."""
        cursor.execute(
            self.sql("SELECT about::text FROM {about} FOR UPDATE" if lock else "SELECT about::text FROM {about}")
        )
        row = cursor.fetchone()
        if row is None or (about := json.loads(row[0])).get("format") != FORMAT:
            raise ArtefactError(
                f"SafeIndex.on_server: '{self.name}_about' is not of the format {FORMAT} that this dubito reads. "
                f"Update dubito, or build the index in another table."
            )
        known: Json = about
        return known

    def write_about(self, cursor: Any, about: Json) -> None:
        """For the next one who asks."""
        cursor.execute(self.sql("UPDATE {about} SET about = %s::jsonb"), (json.dumps(about),))

    def settle(self, cursor: Any, about: Json) -> None:
        """Find thresholds and counts of what is there now, and write them down."""
        rule = Rule.from_json(about["rule"])
        quantile = self._sql.SQL(_QUANTILE)
        cursor.execute(self.sql("SELECT {quantile} FROM {items}", quantile=quantile), (rule.share,))
        everywhere, by_class = cursor.fetchone()[0], None
        if rule.per_class:
            grouped = "SELECT label, {quantile} FROM {items} GROUP BY label"
            cursor.execute(self.sql(grouped, quantile=quantile), (rule.share,))
            by_class = {int(label): u for label, u in cursor.fetchall()}
        about["thresholds"] = None if everywhere is None else Thresholds(everywhere, by_class).to_json()
        about["revision"] += 1
        if everywhere is None:
            about |= {"labelled": None, **Origin().to_json()}
        condition, values = self.kept(about)
        counts = "SELECT count(*), count(*) FILTER (WHERE {keep}) FROM {items}"
        cursor.execute(self.sql(counts, keep=condition), values)
        about["rows"], about["kept"] = cursor.fetchone()
        self.write_about(cursor, about)

    def kept(self, about: Json) -> tuple[Any, Json]:
        """The condition that an item is kept, and its values."""
        rule, thresholds = Rule.from_json(about["rule"]), about["thresholds"]
        if not rule.cleans_items or thresholds is None:
            return self._sql.SQL("true"), {}
        if not rule.per_class:
            return self._sql.SQL("u <= %(limit)s"), {"limit": float(thresholds["everywhere"])}
        limits = json.dumps(thresholds["by_class"])
        return self._sql.SQL("u <= (%(limits)s::jsonb ->> label::text)::float8"), {"limits": limits}

    def steer(self, cursor: Any, *, exact: bool, effort: int = 1) -> None:
        """Which way the planner may go, for this transaction only: past the HNSW index, or through it."""
        # A plan that was made for the one way and kept would serve the other.
        cursor.execute("SET LOCAL plan_cache_mode = force_custom_plan")
        scan, rest = ("off", "on") if exact else ("on", "off")
        cursor.execute(f"SET LOCAL enable_indexscan = {scan}")
        for setting in ("enable_seqscan", "enable_bitmapscan", "enable_sort"):
            cursor.execute(f"SET LOCAL {setting} = {rest}")
        if not exact:
            cursor.execute("SET LOCAL hnsw.iterative_scan = strict_order")
            cursor.execute(self.sql("SET LOCAL hnsw.ef_search = {effort}", effort=self._sql.Literal(effort)))
