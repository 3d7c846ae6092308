"""From the bytes of a client to an input of the model, in worker processes: whatever they are, the service lives on.

    bytes       limited where a request is read
    pixels      89 million, where Pillow itself begins to warn; beyond them, an image is a decompression bomb
    seconds     an image that takes longer is refused, and its process is ended and replaced
    a crash     of a process is the end of one image

Processes are forked by a server process that has loaded what they need, so a new one is there within milliseconds, and
they share its memory. Each works on one image at a time, for a thread that waits for it.
"""

import asyncio
import contextlib
import multiprocessing
import pickle
import queue
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, final

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dubito.data.decode import decode
from dubito.errors import BrokenImageError, DubitoError, ImagesError
from dubito.types import Transform

_START_SECONDS = 120.0


@final
class DecoderError(ImagesError):
    """A process that decodes images could not be started: whatever image waits for it is not at fault."""


@final
class Decoders:
    """Worker processes that decode and prepare images.

    Args:
        transform: The model's own.
        workers: Number of processes.
        seconds: How long one image may take.

    Raises:
        ImagesError: The transform cannot be sent to processes.
        DecoderError: It does not take images, or a process could not be started.
    """

    def __init__(self, transform: Transform, workers: int, *, seconds: float) -> None:
        try:
            pickled = pickle.dumps(transform)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ImagesError(
                f"serve: the transform of the model cannot be sent to worker processes ({error}). Define it at the top "
                f"of a module."
            ) from error
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload([__name__])
        self.seconds = seconds
        self._free = asyncio.Semaphore(workers)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._all = [_Worker(context, pickled) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        try:
            for worker in self._all:
                worker.start()
                self._idle.put(worker)
        except BaseException:
            self.close()
            raise

    async def prepare(self, content: bytes, name: str) -> Tensor:
        """An input of the model, as `Transform.prepare` returns it; BrokenImageError for what is no whole image."""
        # An image whose client has gone while it waited here takes no process. One that is being decoded keeps its
        # place until its process is free again, so that there are never more at work than processes.
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        running = self._threads.submit(self.prepare_now, content, name)
        running.add_done_callback(lambda _: _call_soon(loop, self._free.release))
        return await asyncio.wrap_future(running)

    def prepare_now(self, content: bytes, name: str) -> Tensor:
        """The same, for a thread that may wait."""
        worker = self._idle.get()
        try:
            return worker.prepare(content, name, self.seconds)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            worker.end()


@final
class _Worker:
    """One process and the way to it; a process that has ended is replaced when the next image arrives."""

    def __init__(self, context: Any, transform: bytes) -> None:
        self._context, self._transform = context, transform
        self._process: Any = None
        self._connection: Connection | None = None

    def start(self) -> Connection:
        if self._connection is not None:
            return self._connection
        own: Connection
        own, other = self._context.Pipe()
        problem = 'could not be started. A script that starts a service must do so below `if __name__ == "__main__":`'
        try:
            with other:
                process = self._context.Process(target=_work, args=(other, self._transform), daemon=True)
                process.start()
                self._process = process
            answer = own.recv() if own.poll(_START_SECONDS) else f"did not answer within {_START_SECONDS:.0f} s"
            problem = answer or ""
        except EOFError:
            pass  # it has ended before it could say why
        except OSError as error:
            problem = f"could not be started: {error}"
        if problem:
            own.close()
            self.end()
            raise DecoderError(f"serve: a process that decodes images {problem}.")
        self._connection = own
        return own

    def prepare(self, content: bytes, name: str, seconds: float) -> Tensor:
        try:
            connection = self._send((content, name))
            if not connection.poll(seconds):
                self.end()
                raise BrokenImageError(
                    f"image '{name}' must be decoded within {seconds:g} s; it took longer. Shrink it."
                )
            answer = connection.recv()
        except (EOFError, OSError) as error:
            self.end()
            raise BrokenImageError(
                f"image '{name}' ended the process that decoded it, as when memory runs out. Shrink it."
            ) from error
        if isinstance(answer, DubitoError):
            raise answer
        return torch.from_numpy(answer)

    def _send(self, image: tuple[bytes, str]) -> Connection:
        with contextlib.suppress(OSError):
            connection = self.start()
            connection.send(image)
            return connection
        # The process had ended before it got the image, as when the system was short of memory: no fault of the image.
        self.end()
        connection = self.start()
        connection.send(image)
        return connection

    def end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _call_soon(loop: asyncio.AbstractEventLoop, call: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
        loop.call_soon_threadsafe(call)


def _work(connection: Connection, pickled: bytes) -> None:
    """The life of a worker process: it ends with the service, whose end of the pipe is then closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, for the service, which ends its processes
    torch.set_num_threads(1)
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS //= 2  # Pillow refuses images from twice as many pixels on
    try:
        transform: Transform = pickle.loads(pickled)  # noqa: S301 (of our own process)
        _prepared(transform, Image.new("RGB", (64, 48)))  # imports what resizing needs
    except Exception as error:  # whatever a transform of the user raises
        words = str(error).rstrip(".") if isinstance(error, DubitoError) else f"{type(error).__name__}: {error}"
        connection.send(f"cannot prepare them: {words}")
        return
    connection.send(None)
    with contextlib.suppress(EOFError, OSError):
        while True:
            content, name = connection.recv()
            connection.send(_answer(transform, content, name))


def _answer(transform: Transform, content: bytes, name: str) -> Any:
    try:
        return _prepared(transform, decode(content, name))
    except BrokenImageError as error:
        return error
    except MemoryError:
        return BrokenImageError(f"image '{name}' does not fit into memory. Shrink it.")
    except Exception as error:  # a transform of the user may raise anything
        return BrokenImageError(f"image '{name}' could not be prepared: {type(error).__name__}: {error}.")


def _prepared(transform: Transform, image: Image.Image) -> np.ndarray:
    return np.ascontiguousarray(transform.prepare(image).numpy())
