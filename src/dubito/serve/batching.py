"""Images of many requests through the model together: one bounded queue, counted in images, and one batch at a time.

admit       as many images as the queue has room for, or none: whoever is refused hears so at once
collect     until a batch is full, nothing more is being decoded, or the first image has waited long enough
run         in one thread, the model's; images that nobody waits for any more are left out

The model's thread is the main one if the program has nothing else to do. There a pass is faster: the C library gives
other threads memory that large activations outgrow, and OpenMP lets its threads sleep between the operations of a pass
as soon as it knows of more threads than cores.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, final

import torch
from torch import Tensor

from dubito.errors import DubitoError
from dubito.threads import cores

Run = Callable[[Hashable, list[str], list[Tensor]], Sequence[Any]]
"""Of the kind of work, the ids of images and their inputs: one answer per image."""


@final
class QueueFullError(DubitoError):
    """There is no room for more images now."""


@final
class ModelThread(Executor):
    """Runs calls one after the other: in a thread of its own, or in the one that calls `take_over`.

    Args:
        threads: How many threads an operation of torch may use.
    """

    def __init__(self, threads: int | None = None) -> None:
        # In a container, torch counts the cores of the machine rather than those that this process may use.
        self._threads = threads or min(torch.get_num_threads(), cores())
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> "Future[Any]":
        """The next call."""
        future: Future[Any] = Future()
        self._calls.put((future, partial(call, *args, **options)))
        return future

    def take_over(self) -> None:
        """Run the calls in this thread from now on, until `shutdown`."""
        self._calls.put(None)
        self._thread.join()
        self._work()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Run no more calls than those that were submitted before."""
        self._calls.put(None)
        if wait:
            self._thread.join()

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        while (one := self._calls.get()) is not None:
            future, call = one
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # as other executors do: the one who waits gets it
                future.set_exception(error)


@final
@dataclass(eq=False)
class _Waiting:
    kind: Hashable
    id: str
    image: Tensor
    answer: "asyncio.Future[Any]"

    @property
    def group(self) -> tuple[Hashable, tuple[int, ...]]:
        """Images of one group go through the model together."""
        return self.kind, tuple(self.image.shape)


@final
class Batcher:
    """A queue of images, and the loop that empties it.

    Args:
        run: What is done with a batch, in the thread of `model`.
        model: A single thread.
        capacity: How many images may be under way, from their request's arrival to its answer.
        max_batch: How many go through the model together.
        max_wait: Seconds that an image waits for others to join it.
        seen: Called with the size of every batch.
    """

    def __init__(
        self,
        run: Run,
        model: Executor,
        *,
        capacity: int,
        max_batch: int,
        max_wait: float,
        seen: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._run, self._model, self._seen = run, model, seen
        self.capacity, self.max_batch, self.max_wait = capacity, max_batch, max_wait
        self.admitted = 0
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """How long the current batch has been in the model; 0 without one."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    @contextlib.contextmanager
    def admit(self, images: int) -> Iterator[None]:
        """Room for some images, until the end of the context; QueueFullError where there is none."""
        if self.admitted + images > self.capacity:
            raise QueueFullError(
                f"the queue is full: {self.admitted} of {self.capacity} images are under way, and {images} more were "
                f"sent. Send them again later."
            )
        self.admitted += images
        try:
            yield
        finally:
            self.admitted -= images

    async def answer(self, kind: Hashable, name: str, image: Tensor) -> Any:
        """What is made of one image; if this is cancelled, the image stays until its batch is collected, without it."""
        waiting = _Waiting(kind, name, image, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        return await waiting.answer

    async def run(self) -> None:
        """Run batches for ever."""
        while True:
            batch = await self._collect()
            groups: dict[Hashable, list[_Waiting]] = {}
            for one in batch:
                groups.setdefault(one.group, []).append(one)
            for group in groups.values():
                self._seen(len(group))
                await self._answered(group)

    async def _collect(self) -> list[_Waiting]:
        loop = asyncio.get_running_loop()
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        end = loop.time() + self.max_wait
        # While this loop collects, nothing is in the model: whatever was admitted and is not here is being decoded.
        while len(self._waiting) < min(self.max_batch, self.admitted) and (left := end - loop.time()) > 0:
            self._arrived.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), left)
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self.max_batch:
            one = self._waiting.popleft()
            if not one.answer.done():  # cancelled: its client has gone, or its time was up
                batch.append(one)
        return batch

    async def _answered(self, group: list[_Waiting]) -> None:
        """Answers, or errors, for a group; where a batch fails, each of its images is tried alone."""
        self._began = time.monotonic()
        try:
            answers = await asyncio.get_running_loop().run_in_executor(
                self._model, self._run, group[0].kind, [one.id for one in group], [one.image for one in group]
            )
        except Exception as error:  # the model's code may raise anything, and the service goes on
            if len(group) == 1:
                if not group[0].answer.done():
                    group[0].answer.set_exception(error)
                return
            for one in group:
                await self._answered([one])
            return
        finally:
            self._began = None
        for one, answer in zip(group, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)
