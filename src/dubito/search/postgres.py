"""Items in PostgreSQL with pgvector, with the uncertainty as a column that filters searches.

    NAME         id text, vector vector(d), u double precision, label bigint       one row per item
    NAME_about   one row of JSON: width, rule, thresholds, counts, revision         written in the same transaction

    SELECT id, label, vector <#> query FROM NAME WHERE u <= threshold ORDER BY vector <#> query LIMIT k

Vectors have length one, so minus their inner product orders by cosine. The search is exact, a scan of all rows, until
an HNSW index is built. Its iterative scan keeps going until enough items pass the filter; a query that it gives up on
is compared with all items. Names and values in SQL text are quoted by psycopg.

A connection is opened when needed, and again after it was lost. Reading is retried once on a new one. Writing is one
transaction, which the server applies as a whole or not at all; only a connection lost during the commit leaves open
which, and the error says so. Writers wait for each other at the row of NAME_about, threads that share an index anyway.

The text of a database is UTF-8, names of files need not be: their other bytes are stored as characters for private use.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar, final

import numpy as np
from jaxtyping import Float32, Float64

from dubito.errors import ArtefactError, MissingPackageError, ServerError, TableError, ValueRangeError, first_words
from dubito.search.backend import Approximation, Block, Hits, Origin, State
from dubito.search.inputs import is_valid_id, original_id, stored_id
from dubito.search.rule import Rule, Thresholds
from dubito.storage import reading
from dubito.types import Json
from dubito.validate import check_number

try:
    import psycopg
    from pgvector.psycopg import register_vector
    from psycopg import IsolationLevel, errors, sql
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.types.json import Jsonb
    from psycopg.types.string import StrBinaryDumper, StrDumperUnknown, TextBinaryLoader
except ImportError as error:
    raise MissingPackageError(
        f"SafeIndex.on_server needs psycopg and pgvector ({error}). Install them: pip install 'dubito[server]'."
    ) from error

Output = TypeVar("Output")
_FORMAT = 2
_MAX_WIDTH = 16_000
"""Of a pgvector column."""
_MAX_HNSW_WIDTH = 2000
_OLDEST_HNSW = (0, 8)
"""The pgvector version that introduced the iterative scan."""
_MAX_EFFORT = 1000
_IDS_AT_ONCE = 50_000
_LONGEST_NAME = 63 - len("_about")
_SECONDS = 10
_LOST = ("08", "57P")
"""How SQL states of a lost connection begin: connection exceptions, and a server that shuts down."""


@final
class PostgresBackend:
    """The backend for items that outgrow one process."""

    def __init__(self, dsn: str, table: str, width: int | None, settings: Json) -> None:
        *schema, last = table.split(".")
        if not last or len(schema) > 1 or "" in schema or len(last.encode()) > _LONGEST_NAME or "\0" in table:
            raise ValueRangeError(
                f"SafeIndex.on_server: table must be 'name' or 'schema.name', at most {_LONGEST_NAME} bytes long; "
                f"got {table!r}. Choose a shorter one."
            )
        self._connection, self._name = Connection(dsn), table
        self._names = {"items": sql.Identifier(*schema, last), "about": sql.Identifier(*schema, f"{last}_about")}
        self._names["index"] = sql.Identifier(f"{last}_hnsw")
        about = self._connection.read("SafeIndex.on_server", self._open) or self._create(width, settings)
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
        return self._state(self._connection.read("SafeIndex", self._about))

    def _state(self, about: Json) -> State:
        thresholds = about["thresholds"] and Thresholds.from_json(about["thresholds"])
        origin = Origin.from_json(about["origin"], f"'{self._name}_about'")
        return State(about["rows"], about["kept"], thresholds, about["labelled"], about["revision"], origin)

    def add(self, blocks: Iterable[Block], rows: int, origin: Origin) -> None:  # noqa: ARG002 (of the protocol)
        """Add all blocks in one transaction, by COPY."""

        def change(cursor: Any, about: Json) -> None:
            with cursor.copy(self._sql("COPY {items} (id, vector, u, label) FROM STDIN (FORMAT binary)")) as copy:
                copy.set_types(["text", "vector", "float8", "int8"])
                for ids, vectors, u, classes in blocks:
                    labelled = classes is not None
                    if about["rows"]:  # another process may have added items since `SafeIndex` checked
                        state = self._state(about)
                        state.check_new(origin, labelled=labelled, by="SafeIndex.add", name="the new block")
                    labels = [None] * len(ids) if classes is None else classes.tolist()
                    for row in zip(ids, vectors, u.tolist(), labels, strict=True):
                        copy.write_row(row)
                    about["labelled"] = labelled
            if not about["rows"]:
                about["origin"] = origin.to_json()
            self._measure(cursor, about)

        self._change("SafeIndex.add", change)

    def remove(self, ids: Sequence[str]) -> None:
        """Remove items in one transaction."""

        def change(cursor: Any, about: Json) -> None:
            for part in _parts(ids):
                if cursor.execute(self._sql("DELETE FROM {items} WHERE id = ANY(%s)"), (part,)).rowcount != len(part):
                    raise TableError(
                        "SafeIndex.remove: another process has removed some of these items. Nothing was removed: check "
                        "`id in index` and call again."
                    )
            self._measure(cursor, about)

        self._change("SafeIndex.remove", change)

    def existing(self, ids: Sequence[str]) -> set[str]:
        """The ids among these that are in the index; one that no server can store is not."""
        query = "SELECT id FROM {items} WHERE id = ANY(%s)"
        parts = _parts([one for one in ids if is_valid_id(one)])
        return {row[0] for part in parts for row in self._rows("SafeIndex", query, part)}

    def left_out(self) -> list[str]:
        """The ids that the filter drops, sorted."""
        return sorted(row[0] for row in self._rows("SafeIndex.left_out", "SELECT id FROM {items} WHERE NOT {keep}"))

    def nearest(self, queries: Float32[np.ndarray, "n d"], k: int, *, exact: bool) -> Hits:
        """Search query by query, in one transaction: all see the same items."""
        results, about = self._connection.read(
            "SafeIndex.search", lambda cursor: self._search(cursor, queries, k, exact)
        )
        cells = np.array(results, dtype=object).reshape(len(results), k, 3)
        labels = cells[..., 1].astype(np.int64) if about["labelled"] else None
        return Hits(cells[..., 0], cells[..., 2].astype(np.float32), labels, exact or not about["approximation"])

    def sample(self, count: int) -> tuple[list[str], Float32[np.ndarray, "s d"]]:
        """The kept items with the lowest MD5 of their id."""
        query = 'SELECT id, vector::real[] FROM {items} WHERE {keep} ORDER BY md5(id) COLLATE "C" LIMIT %s'
        ids, vectors = zip(*self._rows("SafeIndex", query, count), strict=True)
        return list(ids), np.array(vectors, dtype=np.float32)

    def uncertainty_quantiles(self, levels: Float64[np.ndarray, "m"]) -> Float64[np.ndarray, "m"]:
        """Quantiles of all uncertainties."""
        query = "SELECT percentile_cont(%s::float8[]) WITHIN GROUP (ORDER BY u) FROM {items}"
        return np.array(self._rows("SafeIndex", query, levels.tolist())[0][0], dtype=np.float64)

    def build_approximation(self, kind: str | None, effort: int | None) -> str:
        """Build an HNSW index of all items; the server keeps it up to date."""
        if kind not in (None, "hnsw") or self.width > _MAX_HNSW_WIDTH:
            raise ValueRangeError(
                f"SafeIndex.approximate: a server supports 'hnsw' for vectors of up to {_MAX_HNSW_WIDTH} numbers; "
                f"got {kind or 'hnsw'!r} for {self.width}. Leave the kind out, or search exactly."
            )

        def change(cursor: Any, about: Json) -> None:
            (version,) = cursor.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()
            if tuple(int(one) for one in version.split(".")[:2]) < _OLDEST_HNSW:
                raise ServerError(
                    f"SafeIndex.approximate: a filtered HNSW index requires pgvector "
                    f"{'.'.join(map(str, _OLDEST_HNSW))} or later; the server has {version}. Update it, or search "
                    f"exactly."
                )
            cursor.execute(self._sql("CREATE INDEX IF NOT EXISTS {index} ON {items} USING hnsw (vector vector_ip_ops)"))
            about["approximation"] = {"kind": "hnsw", "recall": 0.0, "queries": 0, "effort": effort or 100}

        self._change("SafeIndex.approximate", change)
        return "hnsw"

    @property
    def approximation(self) -> Approximation | None:
        """The approximation in use, as it was measured when it was built."""
        stored = self._connection.read("SafeIndex", self._about)["approximation"]
        return stored and Approximation(stored["kind"], float(stored["recall"]), stored["queries"])

    @approximation.setter
    def approximation(self, measured: Approximation | None) -> None:
        def change(_: Any, about: Json) -> None:
            about["approximation"] = measured and {**(about["approximation"] or {}), **asdict(measured)}

        self._change("SafeIndex.approximate", change)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._connection.close()

    def _sql(self, text: str, **parts: Any) -> sql.Composed:
        """SQL with the quoted names of our tables."""
        return sql.SQL(text).format(**self._names, **parts)

    def _open(self, cursor: Any) -> Json | None:
        """What is stored about an existing index; None if there is no such table."""
        # By way of pg_class: to_regclass alone may remember that a table did not exist before another process made it.
        exists = "SELECT FROM pg_catalog.pg_class WHERE oid = to_regclass(%s)"
        if cursor.execute(exists, (self._names["items"].as_string(cursor),)).fetchone() is None:
            return None
        try:
            return self._about(cursor)
        except errors.UndefinedTable as error:
            raise ArtefactError(
                f"SafeIndex.on_server: '{self._name}' is a table that SafeIndex did not create: there is no "
                f"'{self._name}_about' beside it. Choose another name."
            ) from error

    def _create(self, width: int | None, settings: Json) -> Json:
        """Create both tables, empty; or open them, where another process has just created them."""
        if width is None:
            raise TableError(
                f"SafeIndex.on_server: there is no table '{self._name}' yet, and creating it requires the width of the "
                f"features. Pass width=..., or the name of an existing table."
            )
        hint = "Pass the width of the features; a pgvector column takes no wider ones, but the memory does."
        check_number(width, f"[1, {_MAX_WIDTH}]", by="SafeIndex.on_server", what="width", whole=True, hint=hint)
        empty: Json = {"format": _FORMAT, "width": width, "rule": asdict(Rule(**settings)), "rows": 0, "kept": 0}
        empty |= {"revision": 0, "thresholds": None, "labelled": None, "approximation": None}
        empty["origin"] = Origin().to_json()
        columns = "id text PRIMARY KEY, vector vector({width}) NOT NULL, u double precision NOT NULL, label bigint"

        def create(cursor: Any) -> Json:
            cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"dubito {self._name}",))
            if (about := self._open(cursor)) is not None:
                return about
            cursor.execute(self._sql(f"CREATE TABLE {{items}} ({columns})", width=width))
            cursor.execute(self._sql("CREATE INDEX ON {items} (u)"))
            row = "one boolean PRIMARY KEY DEFAULT true CHECK (one), about jsonb"
            cursor.execute(self._sql(f"CREATE TABLE {{about}} ({row})"))
            cursor.execute(self._sql("INSERT INTO {about} (about) VALUES (%s)"), (Jsonb(empty),))
            return empty

        return self._connection.write("SafeIndex.on_server", create)

    def _about(self, cursor: Any, *, lock: bool = False) -> Json:
        """What is stored about all items; with `lock`, no other writer changes it before this transaction ends."""
        query = self._sql("SELECT about FROM {about} {lock}", lock=sql.SQL("FOR UPDATE" if lock else ""))
        row = cursor.execute(query).fetchone()
        about: Json = row[0] if row else {}
        if about.get("format") != _FORMAT:
            raise ArtefactError(
                f"SafeIndex.on_server: '{self._name}_about' is not of format {_FORMAT}, which this dubito reads. "
                f"Update dubito, or build the index in another table."
            )
        return about

    def _change(self, doing: str, change: Callable[[Any, Json], None]) -> None:
        """Change items, and what is stored about them, in one transaction; other writers wait."""

        def work(cursor: Any) -> None:
            about = self._about(cursor, lock=True)
            change(cursor, about)
            cursor.execute(self._sql("UPDATE {about} SET about = %s"), (Jsonb(about),))

        self._connection.write(doing, work)

    def _measure(self, cursor: Any, about: Json) -> None:
        """Compute thresholds and counts of the current items; percentile_disc is the quantile of `Rule`."""
        quantile = sql.SQL("percentile_disc({}::float8) WITHIN GROUP (ORDER BY u)").format(self.rule.share)
        (overall,) = cursor.execute(self._sql("SELECT {quantile} FROM {items}", quantile=quantile)).fetchone()
        by_class = None
        if self.rule.per_class:
            grouped = "SELECT label, {quantile} FROM {items} GROUP BY label"
            by_class = dict(cursor.execute(self._sql(grouped, quantile=quantile)).fetchall())
        about["thresholds"] = None if overall is None else asdict(Thresholds(overall, by_class))
        about["revision"] += 1
        if overall is None:
            about |= {"labelled": None, "origin": Origin().to_json()}
        counts = self._sql("SELECT count(*), count(*) FILTER (WHERE {keep}) FROM {items}", keep=self._kept(about))
        about["rows"], about["kept"] = cursor.execute(counts).fetchone()

    def _kept(self, about: Json) -> sql.Composed:
        """The condition that an item is kept."""
        thresholds = about["thresholds"]
        if not self.rule.cleans_items or thresholds is None:
            return self._sql("true")
        if not self.rule.per_class:
            return self._sql("u <= {limit}::float8", limit=float(thresholds["overall"]))
        return self._sql("u <= ({limits} ->> label::text)::float8", limits=Jsonb(thresholds["by_class"]))

    def _rows(self, doing: str, query: str, *values: Any) -> list[Any]:
        """The rows of a query, in which {keep} is the condition that an item is kept."""

        def work(cursor: Any) -> list[Any]:
            keep = self._kept(self._about(cursor)) if "{keep}" in query else None
            return list(cursor.execute(self._sql(query, keep=keep), values).fetchall())

        return self._connection.read(doing, work)

    def _search(
        self, cursor: Any, queries: Float32[np.ndarray, "n d"], k: int, exact: bool
    ) -> tuple[list[list[Any]], Json]:
        """Rows of (id, label, cosine) per query, and what is stored about all items."""
        about = self._about(cursor)
        search = self._sql(
            "SELECT id, label, -(vector <#> %(query)s) FROM {items} WHERE {keep} "
            "ORDER BY vector <#> %(query)s LIMIT %(k)s",
            keep=self._kept(about),
        )

        def run(query: Float32[np.ndarray, "d"]) -> list[Any]:
            return list(cursor.execute(search, {"query": query, "k": k}).fetchall())

        approximation = None if exact else about["approximation"]
        set_planner(cursor, approximation and min(_MAX_EFFORT, max(k, int(approximation["effort"]))))
        results = [run(query) for query in queries]
        short = [row for row, one in enumerate(results) if len(one) < k]
        if short and approximation:  # the scan of an HNSW ends after 20,000 items, even if the filter keeps few of them
            set_planner(cursor, None)
            for row in short:
                results[row] = run(queries[row])
        if lengths := [len(one) for one in results if len(one) < k]:
            raise ServerError(
                f"SafeIndex.search: the server returned {lengths[0]} of {k} neighbours: another process has removed "
                f"items. Search again."
            )
        return results, about


def set_planner(cursor: Any, effort: int | None) -> None:
    """Make the planner use the HNSW index with some effort, or without one compare all rows, in this transaction."""
    scan, rest = ("off", "on") if effort is None else ("on", "off")
    settings = {"enable_indexscan": scan, "enable_seqscan": rest, "enable_bitmapscan": rest, "enable_sort": rest}
    settings["plan_cache_mode"] = "force_custom_plan"  # a plan that was cached for one way would serve the other
    if effort is not None:
        settings |= {"hnsw.iterative_scan": "strict_order", "hnsw.ef_search": str(effort)}
    for setting in settings.items():
        cursor.execute("SELECT set_config(%s, %s, true)", setting)


@final
class Connection:
    """A connection to the server of a dsn; errors never show its password."""

    def __init__(self, dsn: str) -> None:
        self._dsn, self._alone = dsn, threading.RLock()
        self._open: Any = None
        self._finalizer: Any = None
        try:
            parts = conninfo_to_dict(dsn)
        except psycopg.ProgrammingError as error:
            raise ServerError(
                "SafeIndex.on_server: the dsn cannot be read (its text is not shown, it may hold a password). Pass one "
                "as libpq takes it: 'postgresql://user@host:5432/database' or 'host=... dbname=...'."
            ) from error
        self.where = f"'{parts.get('dbname') or 'the default database'}' at {parts.get('host') or 'this machine'}"

    def read(self, doing: str, work: Callable[[Any], Output], *, again: bool = True) -> Output:
        """Run `work` with a cursor in a read-only transaction, which sees one state of the database."""
        with self._alone:
            try:
                with self._transaction(doing, IsolationLevel.REPEATABLE_READ, read_only=True) as cursor:
                    return work(cursor)
            except psycopg.Error as error:
                if not again or not _is_lost(error):
                    raise self._failure(doing, error) from error
            self.close()
            return self.read(doing, work, again=False)

    def write(self, doing: str, work: Callable[[Any], Output]) -> Output:
        """Run `work` with a cursor in one transaction: all of it is applied, or nothing."""
        applied = "It was one transaction, so nothing was applied, and what was there before is safe"
        with self._alone:
            self.read(doing, lambda cursor: cursor.execute("SELECT 1"))  # replaces a connection that was lost meanwhile
            try:
                # Writers lock the row of NAME_about; after that, each statement must see what the previous writer left.
                with self._transaction(doing, IsolationLevel.READ_COMMITTED, read_only=False) as cursor:
                    result = work(cursor)
                    applied = "It went away during the commit: either all was applied or nothing, check `id in index`"
                return result
            except errors.UniqueViolation as error:
                raise ServerError(
                    f"{doing}: another process has just added an item of the same id ({error.diag.message_detail}). "
                    f"Nothing was added. Rename the item, or remove the other one first."
                ) from error
            except psycopg.Error as error:
                raise self._failure(doing, error, applied) from error

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        with self._alone:
            if self._finalizer is not None:
                self._finalizer()
            self._open = self._finalizer = None

    @contextlib.contextmanager
    def _transaction(self, doing: str, isolation: IsolationLevel, *, read_only: bool) -> Iterator[Any]:
        connection = self._open if self._open is not None and not self._open.closed else self._connect(doing)
        connection.isolation_level, connection.read_only = isolation, read_only
        with connection.transaction(), connection.cursor(binary=True) as cursor:
            yield cursor

    def _connect(self, doing: str) -> Any:
        try:
            connection = psycopg.connect(self._dsn, autocommit=True, connect_timeout=_SECONDS)
        except psycopg.Error as error:
            raise self._failure(doing, error) from error
        try:
            # Created only where it is missing: a replica, or a read-only user, could not.
            if connection.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'").fetchone() is None:
                with contextlib.suppress(errors.UniqueViolation, errors.DuplicateObject):  # created meanwhile
                    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            register_vector(connection)
            connection.adapters.register_dumper(str, _IdBinaryDumper)
            connection.adapters.register_dumper(str, _IdDumper)
            connection.adapters.register_loader("text", _IdBinaryLoader)
        except psycopg.Error as error:
            connection.close()
            if _is_lost(error):
                raise self._failure(doing, error) from error
            raise ServerError(
                f"{doing}: the database {self.where} has no pgvector, and it cannot be enabled ({_line(error)}). "
                f"Install pgvector on the server, and have its owner run CREATE EXTENSION vector."
            ) from error
        # Closed at the latest when the index is collected.
        self._open, self._finalizer = connection, weakref.finalize(self, connection.close)
        return connection

    def _failure(self, doing: str, error: psycopg.Error, applied: str = "Nothing was changed") -> ServerError:
        """What to raise; a connection that was lost is closed, so that the next call opens another."""
        if not _is_lost(error):
            return ServerError(
                f"{doing}: the server of {self.where} refused ({_line(error)}). Nothing was changed. Look at the "
                f"table, at what this user may do there, and at the server's limits."
            )
        self.close()
        return ServerError(
            f"{doing}: the server of {self.where} cannot be reached or went away ({_line(error)}). {applied}. Check "
            f"that it runs and call again: the next call reconnects."
        )


def _is_lost(error: psycopg.Error) -> bool:
    """Whether the connection was lost; a refusal, such as a full disk or a time limit, has another state."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate.startswith(_LOST)


def _line(error: psycopg.Error) -> str:
    """The first line of a server's message; more of them repeat the query."""
    return first_words((str(error).strip() or type(error).__name__).splitlines()[0])


class _IdDumper(StrDumperUnknown):
    def dump(self, obj: str) -> Any:
        return super().dump(stored_id(obj))


class _IdBinaryDumper(StrBinaryDumper):
    def dump(self, obj: str) -> Any:
        return super().dump(stored_id(obj))


class _IdBinaryLoader(TextBinaryLoader):
    def load(self, data: Any) -> Any:
        return original_id(str(super().load(data)))


def _parts(ids: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), _IDS_AT_ONCE):
        yield list(ids[start : start + _IDS_AT_ONCE])
