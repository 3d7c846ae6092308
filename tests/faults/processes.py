"""Processes that faults strike. They are forked from one that has imported everything, and start in milliseconds."""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from dubito.errors import DubitoError

ROOT = Path(__file__).parents[2]
FINISHED, REFUSED, RAISED = "finished", "refused", "raised"
KILLED, HUNG = "killed", "hung"
PATIENCE = 60.0
"""Seconds after which a process counts as hung."""
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Ending:
    """How a process ended: finished with a value, refused by an error of dubito, raised another one, killed, hung."""

    how: str
    value: Any = None


class Child:
    """A function in a process of its own.

    Args:
        function: A function of a module; what it returns is the value of the ending.
        arguments: What it is called with.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        _start_server()
        self._reader, writer = _context.Pipe(duplex=False)
        self.process = _context.Process(target=_run, args=(writer, function, arguments))
        self.process.start()
        writer.close()
        self.pid = self.process.pid or 0
        with contextlib.suppress(EOFError):
            self._reader.recv()  # it has begun

    def send(self, number: int) -> bool:
        """Send a signal; whether the process was still alive."""
        alive = self.process.is_alive()
        if alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
        return alive

    def stopped(self) -> bool:
        """Wait until the process is stopped, and return whether it is, rather than ended."""
        end = time.monotonic() + PATIENCE
        while self.process.is_alive() and time.monotonic() < end:
            with contextlib.suppress(psutil.Error):
                if psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
                    return True
            time.sleep(0.005)
        return False

    def end(self, patience: float = PATIENCE) -> Ending:
        """Wait for the end; a process that takes longer than the patience is killed, with its children."""
        wait([self._reader, self.process.sentinel], patience)  # its children may hold the pipe for longer than it lives
        ending = Ending(KILLED if self._reader.poll() or not self.process.is_alive() else HUNG)
        with contextlib.suppress(EOFError, ConnectionError):
            ending = self._reader.recv() if self._reader.poll() else ending
        self.process.join(0 if ending.how == HUNG else patience)
        if self.process.is_alive():
            ending = Ending(HUNG)
            kill_tree(self.pid)
            self.process.join()
        self._reader.close()
        return ending


def call(function: Callable[..., Any], *arguments: Any, patience: float = PATIENCE) -> Ending:
    """Run a function in a process of its own, undisturbed."""
    return Child(function, *arguments).end(patience)


def value_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, which must finish."""
    ending = call(function, *arguments)
    if ending.how != FINISHED:
        raise RuntimeError(f"an undisturbed run of {function} {ending.how}: {ending.value}")
    return ending.value


def kill_tree(pid: int) -> None:
    """Kill a process and all that descend from it."""
    with contextlib.suppress(psutil.Error):
        for one in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            one.kill()


def _start_server() -> None:
    """All children are forked from one process, which finds this package wherever it is started."""
    if str(ROOT) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    _context.set_forkserver_preload(["tests.faults.preload"])


def _run(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method("fork", force=True)  # workers of this process start as they do for users
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # of libraries, too
        os.dup2(silence, stream)
    pipe.send(None)
    try:
        ending = Ending(FINISHED, function(*arguments))
    except DubitoError as error:
        ending = Ending(REFUSED, f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        ending = Ending(KILLED)
    except Exception:
        ending = Ending(RAISED, traceback.format_exc())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.send(ending)
