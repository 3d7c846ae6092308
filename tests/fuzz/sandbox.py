"""One input at a time: what a target makes of it, within limits of time and memory, and without running code.

`examine` does it in this process, as libFuzzer needs it; `Sandbox` in another one, which may hang or crash.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

TABLE = "tests.fuzz.targets"
ROOM = 3 << 30
"""Bytes of address space beyond what a process has after its imports: a larger allocation fails."""
_PATIENCE = 180.0
"""Seconds until a process that does not react is killed."""
_CODE = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "pty.spawn",
    "pickle.find_class",
    "ctypes.dlopen",
)
"""Events of Python's audit hooks that no reader of data may raise."""
_NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.bind", "urllib.Request")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class HangError(BaseException):
    """An input took too long. No `except Exception` on the way catches it."""


@dataclass(frozen=True)
class Verdict:
    """What became of an input.

    Attributes:
        kind: "loaded", "refused", or a fault: "crash", "hang", "memory" or "code".
        text: The error.
        place: Where it was raised, by which equal faults are known.
    """

    kind: str
    text: str = ""
    place: str = ""

    @property
    def fault(self) -> bool:
        """Whether the library has to be mended."""
        return self.kind not in ("loaded", "refused")


class Examiner:
    """Runs inputs in this process."""

    def __init__(self, folder: Path, table: str = TABLE) -> None:
        module = importlib.import_module(table)  # after libFuzzer has prepared the imports
        (folder / "world").mkdir(parents=True, exist_ok=True)
        faulthandler.enable()
        warnings.simplefilter("ignore")
        self.targets, self.world = module.TARGETS, module.World(folder / "world")
        self._prepared: set[str] = set()
        self._audit = _Audit(folder)
        sys.addaudithook(self._audit)
        soft = _address_space() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (soft, soft))

    def examine(self, name: str, data: bytes) -> Verdict:
        """What a target makes of an input."""
        from dubito.errors import DubitoError  # noqa: PLC0415 (as above)

        target = self.targets[name]
        self._prepare(name)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _memory("VmRSS")
        try:
            with _deadline(target.seconds), self._audit.watching():
                target.run(self.world, data)
            verdict = Verdict("loaded")
        except DubitoError as error:
            verdict = Verdict("refused", str(error)) if _is_readable(str(error)) else _fault("crash", error)
        except HangError as error:
            verdict = _fault("hang", error)
        except BaseException as error:
            verdict = _fault("memory" if _out_of_memory(error) else "crash", error)
        if (self._audit.seen and not target.runs_code) or (self.world.folder / "example" / "executed").exists():
            return Verdict("code", f"{self._audit.seen or 'a pickle'} was executed", str(self._audit.seen))
        taken = _memory("VmHWM") - before
        if not verdict.fault and taken > target.memory:
            return Verdict("memory", f"{taken >> 20} MiB for {len(data)} bytes", name)
        return verdict

    def _prepare(self, name: str) -> None:
        """Whatever is imported and made at the first input does not count for it."""
        if name not in self._prepared:
            self._prepared.add(name)
            for data in self.targets[name].seeds(self.world)[:8]:
                with contextlib.suppress(Exception), _deadline(60):
                    self.targets[name].run(self.world, data)


class Sandbox:
    """Runs inputs in another process, which is replaced when it hangs or crashes.

    Use it in a `with` block.

    Args:
        table: The module with the targets and their world.
    """

    def __init__(self, table: str = TABLE) -> None:
        self.table = table

    def __enter__(self) -> "Sandbox":
        self._scratch = scratch_folder()
        self.folder = self._scratch.__enter__()
        self._process: Any = None
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._scratch.__exit__(None, None, None)

    def run(self, name: str, data: bytes, *, script: bool = False) -> tuple[Verdict, bytes]:
        """What a target makes of an input, or of the input that a script makes, and that input."""
        self._start()
        self._connection.send((name, data, script))
        made = data
        try:
            made = self._receive()
            verdict: Verdict = self._receive()
            alive = verdict.kind not in ("hang", "memory")  # what these left behind is not to count for the next input
        except TimeoutError:
            verdict, alive = Verdict("hang", "it does not end, and cannot be interrupted", name), False
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            verdict, alive = Verdict("crash", f"the process died ({code})", f"{name} {code}"), False
        if not alive:
            self._stop()
        return verdict, made

    def _receive(self) -> Any:
        if not self._connection.poll(_PATIENCE):
            raise TimeoutError
        return self._connection.recv()

    def _start(self) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self.folder, self.table), daemon=True)
            self._process.start()
            theirs.close()
            self._receive()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for a while, in memory where there is such a place: examples are written thousands of times."""
    memory = Path("/dev/shm")  # noqa: S108 (mkdtemp makes a folder of our own in it)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _serve(connection: Any, folder: Path, table: str) -> None:
    """The other process: from requests to verdicts."""
    private(folder)
    examiner = Examiner(folder, table)
    connection.send("ready")
    while True:
        try:
            name, data, script = connection.recv()
        except EOFError:
            return
        made = examiner.targets[name].example(examiner.world, data) if script else data
        connection.send(made)
        connection.send(examiner.examine(name, made))


def private(folder: Path) -> None:
    """Keep what packages would write into a user's folders, and what they would fetch, out of the way."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME", "TORCH_HOME", "MPLCONFIGDIR", "TMPDIR"):
        place = folder / "user" / name.lower()
        place.mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(place)
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", COLUMNS="200", NO_COLOR="1")


class _Audit:
    """Python's audit hook: records code that runs, and refuses the network and files outside of the folder."""

    def __init__(self, folder: Path) -> None:
        self.seen: str | None = None
        self._on, self._folder = False, str(folder)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While an input is read."""
        self.seen, self._on = None, True
        try:
            yield
        finally:
            self._on = False

    def __call__(self, event: str, details: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event in _CODE:
            self.seen = f"{event} {details!r:.200}"
        elif event in _NETWORK:
            raise OSError(101, "Network is unreachable")
        elif event == "open" and isinstance(details[0], str) and isinstance(details[2], int) and details[2] & _WRITING:
            path = os.path.realpath(details[0])
            if not path.startswith((self._folder, "/dev/")):
                raise PermissionError(13, "outside of the sandbox", details[0])


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise HangError where something takes longer."""

    def late(_: int, __: FrameType | None) -> None:
        raise HangError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _fault(kind: str, error: BaseException) -> Verdict:
    """A fault with the last line of dubito's own code that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}dubito{os.sep}" in frame.filename] or frames[-1:]
    place = f"{type(error).__name__} at {Path(own[-1].filename).name}:{own[-1].name}" if own else type(error).__name__
    return Verdict(
        kind,
        f"{type(error).__name__}: {str(error)[:600]}\n" + "".join(traceback.format_tb(error.__traceback__)[-6:]),
        place,
    )


def _is_readable(text: str) -> bool:
    """Whether a message says something; its length is bounded by DubitoError."""
    return len(text) >= 20


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or "bad_alloc" in str(error)


def _memory(what: str) -> int:
    """Bytes that this process has now (VmRSS), or had at most since the peak was reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{what}:"))) << 10


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
