"""Faults of a PostgreSQL server and of its clients, while an index is built in it, and while it is searched.

    kill, interrupt      SIGKILL, SIGINT for the client
    server killed        SIGKILL for the server, which recovers when it is started again
    server crashed       SIGQUIT: all its processes end at once
    backend killed       SIGKILL for the process that serves the client: the server restarts by itself
    connections cut      pg_terminate_backend
    server stopped       SIGSTOP for all its processes, and some time later SIGCONT

Half of the faults strike at a random instant, half when the client is about to wait for the server, which it does
several times per statement. What a client had added before must be there, each addition as a whole, and once.
"""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import psycopg

from dubito.search import SafeIndex
from tests.faults import processes
from tests.faults.outcome import HUNG, LOST, OK, SILENT, UNNAMED, Outcome, generator
from tests.faults.processes import Child, Ending, call, value_of
from tests.faults.victims import digest, table
from tests.search.conftest import Server, running_server

BLOCKS, BLOCK, SEARCHES = 6, 20, 8
CLIENT = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}
KINDS = ("kill", "server killed", "connections cut", "server stopped", "backend killed", "interrupt", "server crashed")
"""In turn, over building; every third case is a search."""


@dataclass
class DatabasePart:
    """Faults on an index in a database.

    Attributes:
        place: A folder of its own.
        faults: How many there are by default.
    """

    place: Path
    faults: int = 28
    name: str = "database"

    def run(self, faults: int, seed: int) -> Iterator[Outcome]:
        """Case after case, until there are as many faults."""
        with running_server() as server:
            self.server, count, case = server, 0, 0
            self._measure()
            while count < faults:
                for outcome in self.strike(KINDS[case % len(KINDS)], case, seed):
                    count += 1
                    yield outcome
                case += 1

    def _measure(self) -> None:
        """What undisturbed runs give, take and do."""
        value_of(build, self.server.dsn, "warm_up", self.place / "warm_up")
        self.calls, self.seconds = {}, {}
        for work in (build, search):
            begin = time.monotonic()
            self.calls[work], value = value_of(counted, work, self.server.dsn, "undisturbed", self.place / "whole")
            self.seconds[work] = time.monotonic() - begin
        self.found, self.expected = value, value_of(values, self.server.dsn, "undisturbed")

    def strike(self, kind: str, case: int, seed: int) -> list[Outcome]:
        """One case; without an outcome where the client had finished before."""
        draw, name = generator(seed, self.name, case), f"case_{case}"
        work: Any = search if case % 3 == 2 else build
        with tempfile.TemporaryDirectory(dir=self.place) as folder:
            if work is search:
                value_of(build, self.server.dsn, name, Path(folder) / "before")
            log = Path(folder) / "acknowledged"
            ending = self._struck(kind, work, (self.server.dsn, name, log), draw)
            self.server.start()
            if ending is None:
                return []
            acknowledged = len(log.read_bytes()) if log.exists() else 0
            result = self._judge(work, ending, name, acknowledged)
        return [Outcome(self.name, f"{kind}, {work.__name__}", case, *result)]

    def _struck(self, kind: str, work: Any, arguments: tuple[Any, ...], draw: np.random.Generator) -> Ending | None:
        """The end of a client that a fault has struck; None where it had finished before."""
        number = CLIENT.get(kind, signal.SIGSTOP)
        if draw.random() < 0.5:
            child = Child(at_wait, int(draw.integers(self.calls[work])), int(number), work, *arguments)
        else:
            child = Child(work, *arguments)
            time.sleep(draw.uniform(0, self.seconds[work]))
            child.send(number)
        if kind in CLIENT:
            ending = child.end()
            return ending if ending.how in (processes.KILLED, processes.HUNG) else None
        hit = child.stopped()
        if hit:
            self._strike_server(kind, draw)
        child.send(signal.SIGCONT)
        ending = child.end()
        return ending if hit else None

    def _strike_server(self, kind: str, draw: np.random.Generator) -> None:
        """The client stands still meanwhile."""
        assert self.server.process is not None
        server = psutil.Process(self.server.process.pid)
        if kind == "server killed":
            server.kill()
            self.server.process.wait()
            _wait_for_end(self.server)
        elif kind == "server crashed":
            self.server.crash()
        elif kind == "server stopped":
            processes_of_server = [server, *server.children(recursive=True)]
            for one in processes_of_server:
                one.suspend()
            time.sleep(draw.uniform(0, 0.3))
            for one in processes_of_server:
                one.resume()
        else:
            for pid in _backends(self.server.dsn):
                if kind == "backend killed":
                    psutil.Process(pid).kill()
                else:
                    with psycopg.connect(self.server.dsn) as connection:
                        connection.execute("SELECT pg_terminate_backend(%s)", (pid,))

    def _judge(self, work: Any, ending: Ending, name: str, acknowledged: int) -> tuple[str, str]:
        if ending.how == processes.HUNG:
            return HUNG, "the client hangs"
        if work is search and ending.how == processes.FINISHED and ending.value != self.found:
            return SILENT, "a search returns other items"
        rows = value_of(count_rows, self.server.dsn, name)
        if rows % BLOCK or rows < acknowledged * BLOCK:
            return (
                SILENT if rows % BLOCK else LOST
            ), f"{rows} rows are there after {acknowledged} additions of {BLOCK}"
        resumed = call(build, self.server.dsn, name, self.place / "resumed")
        if resumed.how != processes.FINISHED:
            return (HUNG if resumed.how == processes.HUNG else LOST), f"it cannot be resumed: {resumed.value}"
        if value_of(values, self.server.dsn, name) != self.expected:
            return SILENT, "other rows are there after resuming"
        return (UNNAMED, str(ending.value)) if ending.how == processes.RAISED else (OK, "")


def build(dsn: str, name: str, log: Path) -> None:
    """Add what is missing, block by block; each one that has been added is noted."""
    index = SafeIndex.on_server(dsn, table=name, width=8, per_class=True)
    items = table(0, BLOCKS * BLOCK)
    for number in range(BLOCKS):
        block = items.rows(slice(number * BLOCK, (number + 1) * BLOCK))
        if block.id[0] not in index:
            index.add(block, np.linspace(0, 1, BLOCK))
            with log.open("ab") as file:
                file.write(b".")


def search(dsn: str, name: str, log: Path) -> str:
    """Search several times; all results as one hash."""
    index = SafeIndex.on_server(dsn, table=name)
    queries, results = table(1, 4), []
    for _ in range(SEARCHES):
        result = index.search(queries, np.zeros(len(queries)), k=3)
        results.append([result.ids.tolist(), digest({"similarities": result.similarities})])
    return json.dumps(results)


def counted(work: Any, *arguments: Any) -> tuple[int, Any]:
    """Do some work; how often it waits for the server, and what it returns."""
    waits = _Waits()
    value = work(*arguments)
    return waits.count, value


def at_wait(number: int, signal_number: int, work: Any, *arguments: Any) -> Any:
    """Do some work, which sends a signal to itself when it is about to wait for the server for the n-th time."""
    _Waits(number, signal_number)
    return work(*arguments)


class _Waits:
    """Counts how often a client waits for the server; at one of these, it sends itself a signal."""

    def __init__(self, at: int | None = None, number: int = 0) -> None:
        self.count, waits = 0, psycopg.Connection.wait

        def wait(*arguments: Any, **options: Any) -> Any:
            if self.count == at:
                os.kill(os.getpid(), number)
            self.count += 1
            return waits(*arguments, **options)

        psycopg.Connection.wait = wait


def count_rows(dsn: str, name: str) -> int:
    """How many items there are; none without a table."""
    with psycopg.connect(dsn) as connection:
        if connection.execute("SELECT to_regclass(%s)", (name,)).fetchone()[0] is None:
            return 0
        return connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]  # noqa: S608 (our own)


def values(dsn: str, name: str) -> str:
    """Everything that is stored, as one hash."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(f"SELECT id, vector::text, u, label FROM {name} ORDER BY id").fetchall()  # noqa: S608
        about = connection.execute(f"SELECT about FROM {name}_about").fetchall()  # noqa: S608 (our own)
    return digest({"rows": json.dumps(rows), "about": json.dumps(about, sort_keys=True)})


def _backends(dsn: str) -> list[int]:
    """The processes that serve clients, but for this one."""
    query = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    with psycopg.connect(dsn) as connection:
        return [pid for (pid,) in connection.execute(query).fetchall()]


def _wait_for_end(server: Server) -> None:
    """Wait until the processes of a killed server have noticed, so that another one can be started."""
    pattern, end = str(server.folder), time.monotonic() + processes.PATIENCE
    while time.monotonic() < end:
        left = []
        for one in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if one.info["name"] == "postgres" and pattern in one.cwd():
                    left.append(one)
        if not left:
            return
        time.sleep(0.05)
