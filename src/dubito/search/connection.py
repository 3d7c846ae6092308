"""One connection to a PostgreSQL server: opened when needed, and again after it was lost.

Reading is retried once on a new connection, which is harmless. Writing is one transaction, which the server applies
as a whole or not at all; only a connection lost during the commit leaves open which, and the error says so.
Threads that share an index wait for each other.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, final

from dubito.errors import MissingPackageError, ServerError

Output = TypeVar("Output")
_SECONDS = 10
_LOST = ("08", "57P")
"""How SQL states of a lost connection begin: connection exceptions, and a server that shuts down."""


@final
class Connection:
    """A connection to the server of a dsn; errors never show its password."""

    def __init__(self, dsn: str) -> None:
        try:
            import psycopg  # noqa: PLC0415 (optional packages)
            import psycopg.conninfo  # noqa: PLC0415
            from pgvector.psycopg import register_vector  # noqa: PLC0415
        except ImportError as error:
            raise MissingPackageError(
                f"SafeIndex.on_server needs psycopg and pgvector ({error}). Install them: pip install 'dubito[server]'."
            ) from error
        self._psycopg, self._register, self._dsn = psycopg, register_vector, dsn
        self._open: Any = None
        self._finalizer: Any = None
        self._alone = threading.RLock()
        try:
            parts = self._psycopg.conninfo.conninfo_to_dict(dsn)
        except self._psycopg.ProgrammingError as error:
            raise ServerError(
                "SafeIndex.on_server: the dsn cannot be read (its text is not shown, it may hold a password). Give one "
                "as libpq takes it: 'postgresql://user@host:5432/database' or 'host=... dbname=...'."
            ) from error
        self.where = f"'{parts.get('dbname') or 'the default database'}' at {parts.get('host') or 'this machine'}"

    def read(self, doing: str, work: Callable[[Any], Output]) -> Output:
        """Run `work` with a cursor in a read-only transaction, which sees one state of the database."""
        with self._alone:
            for last in (False, True):
                connection = self._connected(doing)
                try:
                    connection.isolation_level = self._psycopg.IsolationLevel.REPEATABLE_READ
                    connection.read_only = True
                    with connection.transaction(), connection.cursor(binary=True) as cursor:
                        return work(cursor)
                except self._psycopg.Error as error:
                    if last or not self._is_lost(error):
                        raise self._failure(doing, error) from error
                    self.close()
        raise AssertionError("one of the two returns or raises")

    def write(self, doing: str, work: Callable[[Any], Output]) -> Output:
        """Run `work` with a cursor in one transaction: all of it is applied, or nothing."""
        with self._alone:
            self.read(doing, lambda cursor: cursor.execute("SELECT 1"))  # replaces a connection that was lost meanwhile
            connection, done = self._connected(doing), False
            try:
                # Writers lock the row of NAME_about; after that, each statement must see what the previous writer left.
                connection.isolation_level = self._psycopg.IsolationLevel.READ_COMMITTED
                connection.read_only = False
                with connection.transaction(), connection.cursor(binary=True) as cursor:
                    result = work(cursor)
                    done = True
                return result
            except self._psycopg.errors.UniqueViolation as error:
                raise ServerError(
                    f"{doing}: another process has just added an item of the same id ({error.diag.message_detail}). "
                    f"Nothing was added. Rename the item, or remove the other one first."
                ) from error
            except self._psycopg.Error as error:
                applied = "It was one transaction, so nothing was applied, and what was there before is safe"
                if done:
                    applied = "It went away during the commit: either all was applied or nothing, check `id in index`"
                raise self._failure(doing, error, applied) from error

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        with self._alone:
            if self._finalizer is not None:
                self._finalizer()
            self._open = self._finalizer = None

    def _connected(self, doing: str) -> Any:
        if self._open is not None and not self._open.closed:
            return self._open
        try:
            connection = self._psycopg.connect(self._dsn, autocommit=True, connect_timeout=_SECONDS)
        except self._psycopg.Error as error:
            raise self._failure(doing, error) from error
        try:
            # Created only where it is missing: a replica, or a read-only user, could not.
            if connection.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'").fetchone() is None:
                errors = self._psycopg.errors
                with contextlib.suppress(errors.UniqueViolation, errors.DuplicateObject):  # created meanwhile
                    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            self._register(connection)
        except self._psycopg.Error as error:
            connection.close()
            if self._is_lost(error):
                raise self._failure(doing, error) from error
            raise ServerError(
                f"{doing}: the database {self.where} has no pgvector, and it cannot be enabled ({_line(error)}). "
                f"Install pgvector on the server, and have its owner run CREATE EXTENSION vector."
            ) from error
        # Closed at the latest when the index is collected.
        self._open, self._finalizer = connection, weakref.finalize(self, connection.close)
        return connection

    def _is_lost(self, error: Any) -> bool:
        """Whether the connection was lost; a refusal, such as a full disk or a time limit, has another state."""
        if error.sqlstate is None:
            return isinstance(error, self._psycopg.OperationalError | self._psycopg.InterfaceError)
        return str(error.sqlstate).startswith(_LOST)

    def _failure(self, doing: str, error: Exception, applied: str = "Nothing was changed") -> ServerError:
        """What to raise; a connection that was lost is closed, so that the next call opens another."""
        if not self._is_lost(error):
            return ServerError(
                f"{doing}: the server of {self.where} refused ({_line(error)}). Nothing was changed. Look at the "
                f"table, at what this user may do there, and at the server's limits."
            )
        self.close()
        return ServerError(
            f"{doing}: the server of {self.where} cannot be reached or went away ({_line(error)}). {applied}. Check "
            f"that it runs and call again: the next call reconnects."
        )


def _line(error: Exception) -> str:
    """The first line of a server's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
