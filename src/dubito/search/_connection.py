"""One connection to a PostgreSQL server: opened when needed, and again after it was lost.

Reading is tried again on a new connection once: nothing can be done twice by it. Writing is one transaction, which the
server keeps whole or not at all; only a connection lost while it commits leaves open which, and the error says so.
Threads that share an index wait for each other.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, final

import numpy as np

from dubito.errors import MissingPackageError, ServerError

Result = TypeVar("Result")
_SECONDS = 10
_LOST = ("08", "57P")
"""How the states of a connection that is no more begin: connection exceptions, and a server that shuts down."""


@final
class Connection:
    """To the server of a dsn; errors never show its password."""

    def __init__(self, dsn: str) -> None:
        self._psycopg, self._register = _packages()
        self._dsn = dsn
        self._open: Any = None
        self._let_go: Any = None
        self._alone = threading.RLock()
        try:
            parts = self._psycopg.conninfo.conninfo_to_dict(dsn)
        except self._psycopg.ProgrammingError as error:
            raise ServerError(
                "SafeIndex.on_server: the dsn cannot be read (its text is not shown, it may hold a password). Give one "
                "as libpq takes it: 'postgresql://user@host:5432/database' or 'host=... dbname=...'."
            ) from error
        self.where = f"'{parts.get('dbname') or 'the default database'}' at {parts.get('host') or 'this machine'}"

    def read(self, doing: str, work: Callable[[Any], Result]) -> Result:
        """What `work` makes of a cursor in a transaction that changes nothing and sees one state of the database."""
        with self._alone:
            for last in (False, True):
                connection = self._connected(doing)
                try:
                    connection.isolation_level = self._psycopg.IsolationLevel.REPEATABLE_READ
                    connection.read_only = True
                    with connection.transaction(), connection.cursor(binary=True) as cursor:
                        return work(cursor)
                except self._psycopg.Error as error:
                    if not self._is_lost(error):
                        raise self._refused(doing, error) from error
                    self.close()
                    if last:
                        raise self._gone(doing, error, "Nothing was changed") from error
        raise AssertionError("one of the two returns or raises")

    def write(self, doing: str, work: Callable[[Any], Result]) -> Result:
        """What `work` makes of a cursor in one transaction: all of it, or nothing."""
        with self._alone:
            self.read(doing, lambda cursor: cursor.execute("SELECT 1"))  # one that died meanwhile is replaced here
            connection, done = self._connected(doing), False
            try:
                # Writers lock the row of NAME_about; then each statement must see what the writer before has left.
                connection.isolation_level = self._psycopg.IsolationLevel.READ_COMMITTED
                connection.read_only = False
                with connection.transaction(), connection.cursor(binary=True) as cursor:
                    result = work(cursor)
                    done = True
                return result
            except self._psycopg.errors.UniqueViolation as error:
                raise ServerError(
                    f"{doing}: somebody else has added an item of the same id meanwhile ({error.diag.message_detail}). "
                    f"Nothing of this call is there. Name it otherwise, or remove it first."
                ) from error
            except self._psycopg.Error as error:
                if not self._is_lost(error):
                    raise self._refused(doing, error) from error
                self.close()
                kept = (
                    "It went while it was confirming, so either all of it or nothing is there: ask `id in index`"
                    if done
                    else "It was one transaction, so nothing of it is there, and what was there before is safe"
                )
                raise self._gone(doing, error, kept) from error

    def close(self) -> None:
        """Let go of the connection; the next call opens another."""
        with self._alone:
            if self._let_go is not None:
                self._let_go()
            self._open = self._let_go = None

    def _connected(self, doing: str) -> Any:
        if self._open is not None and not self._open.closed:
            return self._open
        try:
            connection = self._psycopg.connect(self._dsn, autocommit=True, connect_timeout=_SECONDS)
        except self._psycopg.Error as error:
            raise self._gone(doing, error, "Nothing was changed") from error
        try:
            self._turn_on(connection)
        except self._psycopg.Error as error:
            connection.close()
            if self._is_lost(error):
                raise self._gone(doing, error, "Nothing was changed") from error
            raise ServerError(
                f"{doing}: the database {self.where} has no pgvector, and it cannot be turned on ({_line(error)}). "
                f"Install pgvector on the server, and let its owner run CREATE EXTENSION vector."
            ) from error
        # Closed with the index, too, where nobody has closed it before.
        self._open, self._let_go = connection, weakref.finalize(self, connection.close)
        return connection

    def _turn_on(self, connection: Any) -> None:
        """Made only where it is not there: a replica, or a user who may only read, could not."""
        errors = self._psycopg.errors
        if connection.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'").fetchone() is None:
            with contextlib.suppress(errors.UniqueViolation, errors.DuplicateObject):  # another has just made it
                connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        self._register(connection)

    def _is_lost(self, error: Any) -> bool:
        """Whether the connection is no more; a refusal, such as of a full disk or a time limit, has another state."""
        if error.sqlstate is None:
            return isinstance(error, self._psycopg.OperationalError | self._psycopg.InterfaceError)
        return str(error.sqlstate).startswith(_LOST)

    def _refused(self, doing: str, error: Exception) -> ServerError:
        return ServerError(
            f"{doing}: the server of {self.where} refused ({_line(error)}). Nothing was changed. Look at the table, at "
            f"what this user may do there, and at the server's limits."
        )

    def _gone(self, doing: str, error: Exception, kept: str) -> ServerError:
        return ServerError(
            f"{doing}: the server of {self.where} cannot be reached or went away ({_line(error)}). {kept}. See that it "
            f"runs and call again: the next call connects anew."
        )


def to_vector(found: Any) -> Any:
    """What pgvector gives, as float32."""
    return np.asarray(found.to_numpy() if hasattr(found, "to_numpy") else found, dtype=np.float32)


def _packages() -> tuple[Any, Any]:
    try:
        import psycopg  # noqa: PLC0415 (optional packages)
        import psycopg.conninfo  # noqa: PLC0415
        from pgvector.psycopg import register_vector  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError(
            f"SafeIndex.on_server needs psycopg and pgvector ({error}). Install them: pip install 'dubito[server]'."
        ) from error
    return psycopg, register_vector


def _line(error: Exception) -> str:
    """The first line of what a server says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
